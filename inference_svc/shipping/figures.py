"""Figures of a process that another one reads: a small file that is replaced as a whole.

Workers and shippers leave theirs beside the control sockets; the service reads them when somebody asks. Nobody waits
for anybody: figures can be had while the model waits for the store, and a reader costs the step nothing. Prometheus's
own mode for several processes would do the same by files, but is set for a whole process by its environment, and so
for vLLM's figures, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Figures = Mapping[str, float]

_PERIOD_SECONDS = 1.0


class FigureFile:
    """Keeps a file up to date, by no more than one write a second, and none while nothing changes."""

    def __init__(self, path: Path, look: Callable[[], Figures]) -> None:
        """Keep what `look` returns in a file, by calls of `refresh`."""
        self._path = path
        self._look = look
        self._written: Figures | None = None
        self._next = 0.0

    def refresh(self) -> None:
        """Write the figures if it is time and they have changed. That the disk is full is no reason to stop."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PERIOD_SECONDS
        figures = self._look()
        if figures == self._written:
            return
        part = self._path.with_name(self._path.name + ".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(figures))
            part.replace(self._path)
            self._written = figures

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def read_figures(path: str | os.PathLike[str]) -> Figures:
    """Return the figures of a process; empty if it has left none."""
    try:
        figures: Figures = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}
    return figures


def beside(control_path: str | os.PathLike[str]) -> Path:
    """Return where the worker of a control socket leaves its figures."""
    return Path(control_path).with_suffix(".figures")


def figures_by_store(figures: Figures) -> dict[str, dict[str, float]]:
    """Return the figures that a process has of each store, which stand there as "figure:store", by the store's name."""
    found: dict[str, dict[str, float]] = {}
    for key, value in figures.items():
        name, colon, store = key.partition(":")
        if colon:
            found.setdefault(store, {})[name] = value
    return found
