#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generate the Python bindings of `proto/` into `openengine/`, or check that they are fresh.

The generators run in their own virtual environment, `.venv/codegen`, which is made on first use and kept
while the pins below stay as they are. Only the standard library is needed to run this script.

    python scripts/generate_bindings.py            # write openengine/v1/*_pb2*.py and *.pyi
    python scripts/generate_bindings.py --check    # write nothing; summarise the differences

Exit status: 0 fresh or written, 1 stale, 2 the schema does not compile, 3 the generators cannot be installed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
PACKAGE = Path("openengine/v1")
SERVICE_FILE = PACKAGE / "service.proto"
CODEGEN_VENV = ROOT / ".venv" / "codegen"

# Generated code refuses runtimes older than its generator; protobuf vouches for it up to the next major
# version. grpcio-tools 1.72.2 emits code for protobuf 6.30.0, so 6.x and 7.x load it. Raising it raises the
# lower bounds of `grpcio` and `protobuf` in pyproject.toml.
REQUIREMENTS = (
    "grpcio-tools==1.72.2",
    "grpcio==1.72.2",
    "protobuf==6.33.6",
    "setuptools==80.9.0",
    "mypy-protobuf==5.1.0",
    "types-protobuf==6.32.1.20251210",
)
GENERATED_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
DIFF_LINES_SHOWN = 6


class CommandError(Exception):
    """A command ended with a failure."""


class InstallationError(Exception):
    """The generators could not be installed."""


def codegen_bin() -> Path:
    """Return the folder of executables of the generator environment, making the environment if needed."""
    bin_dir = CODEGEN_VENV / ("Scripts" if os.name == "nt" else "bin")
    stamp = CODEGEN_VENV / "requirements.stamp"
    wanted = "\n".join((*REQUIREMENTS, f"python {sys.version_info.major}.{sys.version_info.minor}", ""))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return bin_dir
    print(f"installing the generators into {CODEGEN_VENV.relative_to(ROOT)}", file=sys.stderr)
    pip = [str(bin_dir / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        venv.create(CODEGEN_VENV, clear=True, with_pip=True)
        run([*pip, "install", *REQUIREMENTS])
    except (CommandError, OSError, subprocess.CalledProcessError) as error:
        raise InstallationError(str(error)) from error
    stamp.write_text(wanted, encoding="utf-8")
    return bin_dir


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    """Run `command`; on failure raise `CommandError` with what it printed."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"{done.stdout}{done.stderr}"
        raise CommandError(f"{' '.join(command)}\nexit status {done.returncode}\n{said}")


def proto_files() -> list[str]:
    """Return the schema files, relative to the import root, in a stable order."""
    return sorted(path.relative_to(PROTO_ROOT).as_posix() for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))


def generate(target: Path) -> None:
    """Write the bindings of all schema files below `target`."""
    bin_dir = codegen_bin()
    env = {**os.environ, "PATH": os.pathsep.join((str(bin_dir), os.environ.get("PATH", "")))}
    protoc = [str(bin_dir / "python"), "-m", "grpc_tools.protoc", f"--proto_path={PROTO_ROOT}"]
    run([*protoc, f"--python_out={target}", f"--mypy_out=quiet:{target}", *proto_files()], env)
    grpc_out = [f"--grpc_python_out={target}", f"--mypy_grpc_out=quiet:{target}"]
    run([*protoc, *grpc_out, SERVICE_FILE.as_posix()], env)


def generated_files(root: Path) -> dict[str, str]:
    """Return name and text of every generated file of the package below `root`."""
    folder = root / PACKAGE
    paths = {path for pattern in GENERATED_PATTERNS for path in folder.glob(pattern)}
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(paths)}


def differences(fresh: dict[str, str], present: dict[str, str]) -> list[str]:
    """Describe how the checked-in files differ from freshly generated ones; empty if they do not."""
    report = [f"missing: {name}" for name in sorted(fresh.keys() - present.keys())]
    report += [f"without a schema file: {name}" for name in sorted(present.keys() - fresh.keys())]
    for name in sorted(fresh.keys() & present.keys()):
        before, after = present[name].splitlines(), fresh[name].splitlines()
        diff = list(difflib.unified_diff(before, after, lineterm="", n=0))
        if not diff:
            continue
        changes = [line for line in diff[2:] if not line.startswith("@@")]
        report.append(f"stale: {name} ({len(changes)} lines differ)")
        report += [f"    {line[:160]}" for line in changes[:DIFF_LINES_SHOWN]]
        if len(changes) > DIFF_LINES_SHOWN:
            report.append(f"    ... and {len(changes) - DIFF_LINES_SHOWN} more")
    return report


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Generate the Python bindings of the OpenEngine schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the bindings are stale")
    args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory(prefix="openengine-bindings-") as scratch:
        try:
            generate(Path(scratch))
        except InstallationError as error:
            print(f"installing the generators failed: {error}", file=sys.stderr)
            return 3
        except CommandError as error:
            print(f"generating the bindings failed: {error}", file=sys.stderr)
            return 2
        fresh, present = generated_files(Path(scratch)), generated_files(ROOT)
        report = differences(fresh, present)
        if args.check:
            if report:
                report.insert(0, f"{PACKAGE.as_posix()} is stale; run scripts/generate_bindings.py")
                print("\n".join(report), file=sys.stderr)
                return 1
            print(f"{len(present)} generated files are fresh")
            return 0
        for name in present.keys() - fresh.keys():
            (ROOT / PACKAGE / name).unlink()
        for name in fresh:
            shutil.copyfile(Path(scratch) / PACKAGE / name, ROOT / PACKAGE / name)
        print(f"wrote {len(fresh)} files to {PACKAGE.as_posix()}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
