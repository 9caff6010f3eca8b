"""Progress bars, on a terminal or in a notebook; rich is imported when the first one is drawn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]
"""Says that so many more are done."""


@contextlib.contextmanager
def progress_bar(label: str, total: int | None, *, enabled: bool = True, of_bytes: bool = False) -> Iterator[Advance]:
    """Show a bar while the block runs: on stderr if that is a terminal, or below the cell in Jupyter.

    Args:
        label: What is being done.
        total: How many there are; None if that is not known.
        enabled: Show it at all.
        of_bytes: Count bytes instead of things.
    """
    if not enabled or not (sys.stderr.isatty() or _is_jupyter()):
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


def _is_jupyter() -> bool:
    if "IPython" not in sys.modules:  # then there is no kernel, and rich need not be asked
        return False
    from rich.console import Console

    return Console().is_jupyter


def _ignore(done: int) -> None:
    """Take note of nothing."""
