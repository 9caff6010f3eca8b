"""Generate the Python stubs in client/residuum/v1/ from protos/, with the tools pinned in requirements/dev.lock.

.venv/bin/python scripts/generate_stubs.py            write the stubs
.venv/bin/python scripts/generate_stubs.py --check    fail if committed stubs are out of date, and name them

The proto path, the proto package and the Python package are equal, so protoc's output needs no patching.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("residuum", "v1")
COMMITTED = ROOT / "client" / PACKAGE
BIN = Path(sys.executable).parent


def main() -> int:
    """Write the stubs or check them. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare, and fail on any difference")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / PACKAGE
        differences = compare(fresh)
        if options.check:
            return report(differences)
        for name in differences:
            if (fresh / name).exists():
                shutil.copyfile(fresh / name, COMMITTED / name)
            else:
                (COMMITTED / name).unlink()
            print(COMMITTED.relative_to(ROOT) / name)
    print(f"{len(differences)} stubs changed")
    return 0


def generate(folder: Path) -> None:
    """Run protoc with its Python, gRPC and mypy plugins into `folder`."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    command += [f"--plugin=protoc-gen-{name}={BIN}/protoc-gen-{name}" for name in ("mypy", "mypy_grpc")]
    command += [f"--{name}_out={folder}" for name in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command += [str(path) for path in sorted((PROTOS / PACKAGE).glob("*.proto"))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"protoc failed:\n{result.stderr}")


def compare(fresh: Path) -> list[str]:
    """Return the names of committed stubs that are missing, stale or left over."""
    generated = {path.name for path in fresh.iterdir()}
    committed = {path.name for path in COMMITTED.iterdir() if "_pb2" in path.name and path.is_file()}
    same, _, _ = filecmp.cmpfiles(fresh, COMMITTED, generated & committed, shallow=False)
    return sorted((generated | committed) - set(same))


def report(differences: list[str]) -> int:
    """Print which stubs are out of date. Return the exit status."""
    for name in differences:
        print(f"differs from protos/: {COMMITTED.relative_to(ROOT) / name}", file=sys.stderr)
    if differences:
        print("run `make protos` and commit the result", file=sys.stderr)
        return 1
    print("the stubs are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
