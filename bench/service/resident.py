"""The resident memory of the processes of a running service and its store."""

from __future__ import annotations

from pathlib import Path

from bench.capture.memory import descendants
from bench.children import RunFailedError

_KINDS = {
    "VLLM::": "engine",
    "inference_svc.shipping": "shipper",
    "multiprocessing.resource_tracker": "",
}
"""What a command line contains, and how the process is called; those with an empty name hold nothing of ours."""

_OWN, _MAPPED = ("RssAnon",), ("RssShmem", "RssFile")


class Processes:
    """The processes, each by its name."""

    def __init__(self, roots: dict[str, int]) -> None:
        """Find the processes that these started, which go on running from now on.

        Args:
            roots: The processes that were started by hand, by name.
        """
        self._pids = dict(roots)
        for root in roots.values():
            for pid in sorted(descendants(root)):
                if name := _kind_of(pid):
                    self._pids[self._free(name)] = pid

    def own_mib(self) -> dict[str, float]:
        """Return what each keeps in memory of its own.

        Raises:
            RunFailedError: One is gone.
        """
        return {name: _resident_mib(name, pid, _OWN) for name, pid in self._pids.items()}

    def mapped_mib(self) -> dict[str, float]:
        """Return what each has touched of what it maps: libraries, the ring, the store's database."""
        return {name: _resident_mib(name, pid, _MAPPED) for name, pid in self._pids.items()}

    def _free(self, name: str) -> str:
        taken = sum(known.startswith(name) for known in self._pids)
        return f"{name} {taken + 1}" if taken else name


def _kind_of(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return next((name for mark, name in _KINDS.items() if mark in command), "")


def _resident_mib(name: str, pid: int, parts: tuple[str, ...]) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        raise RunFailedError(f"the {name} has ended") from None
    values = [int(line.split()[1]) for line in lines if line.startswith(parts)]
    if not values:
        raise RunFailedError(f"the {name} has ended")  # and its parent has not heard of it yet
    return sum(values) / 1024
