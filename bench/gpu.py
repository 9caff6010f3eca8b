"""What GPUs a machine has, and how much of their memory is in use; nothing where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

_SECONDS = 60.0
_QUERY = "name,driver_version,memory.total,memory.used"
_MIB = 1 << 20

_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
memory = [torch.cuda.mem_get_info(index) for index in range(count)]
names = [torch.cuda.get_device_name(index) for index in range(count)]
print(json.dumps([[name, total, total - free] for name, (free, total) in zip(names, memory)]))
"""
"""A program of its own: a CUDA context takes memory for as long as its process lives."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    driver: str
    """The driver's version; empty if it is not known."""
    total_mib: int
    used_mib: int
    """In use now, by whichever process."""


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine, as nvidia-smi tells, or, where that is missing, torch."""
    told = _run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    if told is not None:
        return parse(told)
    told = _run([sys.executable, "-c", _ASK_TORCH])
    found = json.loads(told) if told else []
    return [Gpu(name, "", total // _MIB, used // _MIB) for name, total, used in found]


def parse(table: str) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's answer."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    return [Gpu(name, driver, _number(total), _number(used)) for name, driver, total, used in rows]


def used_mib() -> int:
    """Return the memory that is in use on all GPUs together."""
    return sum(gpu.used_mib for gpu in gpus())


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0  # "[N/A]" where the driver does not tell


def _run(command: list[str]) -> str | None:
    """Return what a command prints; None if it is not there, fails or hangs."""
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
