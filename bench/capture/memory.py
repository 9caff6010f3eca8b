"""How much memory processes took at their peak."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_KINDS = {"VLLM::": "engine", "inference_svc.shipping": "shippers"}
"""What a command line contains, and the kind of process it tells."""


def peak_mib() -> dict[str, int]:
    """Return the peak resident memory of this process ("front end") and of its descendants, by kind, in MiB."""
    peaks = {"front end": peak_of(os.getpid())}
    for pid in descendants(os.getpid()):
        kind = _kind(pid)
        if kind:
            peaks[kind] = peaks.get(kind, 0) + peak_of(pid)
    return peaks


def peak_of(pid: int) -> int:
    """Return the peak resident memory of a process in MiB; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM:")), 0)


def _kind(pid: int) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return next((kind for mark, kind in _KINDS.items() if mark in command), None)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            children += [int(child) for child in path.read_text().split()]
    return children + [deeper for child in children for deeper in descendants(child)]
