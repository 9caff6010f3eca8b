"""Figures that one process writes and another reads, in a small file that is replaced as a whole.

Workers and shippers keep their files in the folder of the control sockets. The service reads them when Prometheus
scrapes. No process waits for another: the figures are there even while the model waits for the store, and reading them
does not delay a step.

Prometheus's own multi-process mode uses files too. But an environment variable turns it on for the whole process, so it
would change vLLM's metrics as well.
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
    """Keeps a file of figures up to date. Writes at most once a second, and only changes."""

    def __init__(self, path: Path, collect: Callable[[], Figures]) -> None:
        """Keep the figures that `collect` returns in a file, whenever `refresh` is called."""
        self._path = path
        self._collect = collect
        self._written: Figures | None = None
        self._next = 0.0

    def refresh(self) -> None:
        """Write the figures if a second has passed and they have changed. Ignores errors, such as a full disk."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PERIOD_SECONDS
        figures = self._collect()
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
    """Return the figures in a file; empty if there is no readable file."""
    try:
        figures: Figures = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}
    return figures


def figures_path(control_path: str | os.PathLike[str]) -> Path:
    """Return the path of the figures of the worker that serves a control socket."""
    return Path(control_path).with_suffix(".figures")


def figures_by_store(figures: Figures) -> dict[str, dict[str, float]]:
    """Return the figures of each store by its name, from the keys of the form "figure:store"."""
    found: dict[str, dict[str, float]] = {}
    for key, value in figures.items():
        name, colon, store = key.partition(":")
        if colon:
            found.setdefault(store, {})[name] = value
    return found
