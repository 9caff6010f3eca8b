"""Checks for what vLLM needs on a CPU and no wheel contains: libnuma, a C++ compiler and Python's headers.

vLLM's kernels link to libnuma, which a minimal Debian lacks. If it is missing, this script unpacks Debian's package
into `.venv`, which needs no root, and makes the environment's Python load it at every start.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

LIBNUMA = "libnuma.so.1"


def main() -> None:
    """Provide libnuma, and print advice if the compiler or the headers are missing."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        print("setup: Python's C headers are missing; compiled engines need them (Debian 12: python3.11-dev)")
    if not shutil.which("g++"):
        print("setup: there is no C++ compiler; compiled engines need one (Debian 12: g++)")
    try:
        ctypes.CDLL(LIBNUMA)
    except OSError:
        provide_libnuma()


def provide_libnuma() -> None:
    """Unpack libnuma into the environment. If that fails, exit with advice."""
    native = Path(sys.prefix, "native")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["apt-get", "download", "libnuma1"], cwd=scratch, check=True, capture_output=True)  # noqa: S607
            (archive,) = Path(scratch).glob("*.deb")
            subprocess.run(["dpkg-deb", "--extract", str(archive), str(native)], check=True, capture_output=True)  # noqa: S607
        library = next(native.rglob(LIBNUMA)).resolve()
    except (OSError, subprocess.CalledProcessError, ValueError, StopIteration):
        sys.exit(f"setup: vLLM needs the library {LIBNUMA}. Debian: apt install libnuma1")
    hook = Path(sysconfig.get_paths()["purelib"], "residuum_native.pth")
    hook.write_text(f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)\n")
    print(f"setup: {LIBNUMA} was missing on this machine; it was installed into .venv from Debian's libnuma1")


if __name__ == "__main__":
    main()
