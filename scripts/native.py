"""What vLLM needs on a CPU and no wheel brings: libnuma, which is provided, a C++ compiler and Python's headers.

vLLM's kernels are linked against libnuma, and a small Debian is without it. Where it is missing, Debian's own package
is taken apart inside `.venv`, which needs no root, and every start of `.venv`'s Python loads it.
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
    """Provide the one, and say what to do about the others."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        print("setup: Python's C headers are missing; compiled engines need them (Debian 12: python3.11-dev)")
    if not shutil.which("g++"):
        print("setup: there is no C++ compiler; compiled engines need one (Debian 12: g++)")
    try:
        ctypes.CDLL(LIBNUMA)
    except OSError:
        provide_libnuma()


def provide_libnuma() -> None:
    """Unpack it into the environment, or end with advice."""
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
    print(f"setup: {LIBNUMA} was missing on this machine; taken from Debian's libnuma1")


if __name__ == "__main__":
    main()
