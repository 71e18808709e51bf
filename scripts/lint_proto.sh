#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint the schema and check its format with buf, which runs from its own virtual environment, .venv/buf.
#   scripts/lint_proto.sh          check
#   scripts/lint_proto.sh --fix    rewrite the files in buf's format, then check
set -euo pipefail
cd "$(dirname "$0")/.."

buf_version=1.75.0
buf=.venv/buf/bin/buf

if [[ "$("$buf" --version 2>/dev/null)" != "$buf_version" ]]; then
    echo "installing buf $buf_version into .venv/buf" >&2
    "${PYTHON:-python3}" -m venv --clear .venv/buf
    .venv/buf/bin/python -m pip install --quiet --disable-pip-version-check "buf-bin==$buf_version"
fi

if [[ "${1:-}" == --fix ]]; then
    "$buf" format --write proto
fi
"$buf" lint proto
"$buf" format --diff --exit-code proto
echo "schema is clean"
