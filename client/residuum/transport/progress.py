"""Progress bars on a terminal or in a notebook, and sizes for people. rich is imported for the first bar."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from residuum.protocol.arguments import check_flag

Advance = Callable[[int], None]
"""Adds a number of finished items to the bar."""


@contextlib.contextmanager
def progress_bar(label: str, total: int | None, *, enabled: bool = True, of_bytes: bool = False) -> Iterator[Advance]:
    """Show a bar while the block runs: on stderr if that is a terminal, or below the cell in Jupyter.

    Args:
        label: What is being done.
        total: The number of items; None if it is unknown.
        enabled: Whether to show the bar.
        of_bytes: Whether the items are bytes.

    Raises:
        TypeError: `enabled` is not a bool. The user's name for it is `progress`.
    """
    if not check_flag("progress", enabled) or not shows_bars():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


def size(count: float) -> str:
    """Return a number of bytes as readable text, such as "2.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - the step between the units
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def shows_bars() -> bool:
    """Tell whether a bar can be shown: stderr is a terminal, or this is Jupyter."""
    return sys.stderr.isatty() or _is_jupyter()


def _is_jupyter() -> bool:
    if "IPython" not in sys.modules:  # avoids importing rich, which is slow, where there is no kernel
        return False
    from rich.console import Console

    return Console().is_jupyter


def _ignore(done: int) -> None:
    """Advance no bar."""
