"""The memory of processes, and that of the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

_KINDS = {"VLLM::": "engine", "inference_svc.shipping": "shippers"}
"""The kind of process, by a text in its command line."""


def peak_mib() -> dict[str, int]:
    """Return the peak resident memory of this process ("front end") and of its descendants, by kind, in MiB."""
    peaks = {"front end": peak_of(os.getpid())}
    for pid in descendants(os.getpid()):
        if kind := kind_of(pid):
            peaks[kind] = peaks.get(kind, 0) + peak_of(pid)
    return peaks


def peak_of(pid: int) -> int:
    """Return the peak resident memory of a process in MiB; 0 if the process has ended."""
    return status_kib(pid, "VmHWM:") >> 10


def status_kib(pid: int, *fields: str) -> int:
    """Return the sum of some fields of a process's status in KiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(fields))


def kind_of(pid: int) -> str:
    """Return the kind of a process; empty if it is of no known kind or has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return next((kind for mark, kind in _KINDS.items() if mark in command), "")


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread may have ended
            children += [int(child) for child in path.read_text().split()]
    return children + [deeper for child in children for deeper in descendants(child)]


def provide_memory(num_bytes: int) -> None:
    """Write to memory and free it again, so that what is measured next does not wait for new memory.

    The host of a virtual machine provides memory when the machine writes to it for the first time. That can be more
    than ten times slower than writing, and would be counted for whatever happens to use new memory.
    """
    np.ones(num_bytes, np.uint8)
