"""The anonymous memory of a process, and the limit that follows from its settings."""

from __future__ import annotations

import threading
from pathlib import Path

_KEPT_MIB = 256
"""Freed memory that glibc keeps (svc_common/memory.py)."""


def inference_bound_mib(*, base_mib: float, max_requests: int, max_registration_mib: int, max_vector_mib: int) -> float:
    """Return how much the front end may grow after its start, by the settings of the inference service."""
    calls = max_requests + 256
    return base_mib + _KEPT_MIB + 0.1 * calls + 4 * 256 + 4 * max_registration_mib + 2 * max_vector_mib


def own_mib(pid: int) -> float:
    """Return the anonymous resident memory of a process. The kernel can drop the pages of the database at any time."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Peak:
    """Samples the memory of a process every 20 ms, so it may miss shorter peaks."""

    def __init__(self, pid: int) -> None:
        self.mib = own_mib(pid)
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.mib = max(self.mib, own_mib(self._pid))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
