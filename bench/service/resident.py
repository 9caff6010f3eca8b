"""The resident memory of the processes of a running service and its store."""

from __future__ import annotations

from bench.memory import descendants, kind_of, status_kib
from bench.processes import RunFailedError

_OWN, _MAPPED = ("RssAnon:",), ("RssShmem:", "RssFile:")


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
                if name := kind_of(pid).removesuffix("s"):
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


def _resident_mib(name: str, pid: int, fields: tuple[str, ...]) -> float:
    kib = status_kib(pid, *fields)
    if not kib:
        raise RunFailedError(f"the {name} has ended")
    return kib / 1024
