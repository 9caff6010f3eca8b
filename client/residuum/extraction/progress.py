"""The progress of a job: a bar on a terminal or in Jupyter, or plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from residuum.transport.progress import shows_bars, size

_SECONDS = 10.0
"""The time between two plain lines."""


@dataclass
class Totals:
    """What a run has done so far."""

    prompts: int = 0
    failed: int = 0
    tokens: int = 0
    rows: int = 0
    bytes: int = 0
    left_out: int = 0


Report = Callable[[Totals], None]
"""Called whenever prompts have ended."""


@contextlib.contextmanager
def show_progress(total: int, done_before: int, *, enabled: bool, lines: bool) -> Iterator[Report]:
    """Show the progress while the block runs.

    Args:
        total: The prompts of the job.
        done_before: Those of earlier runs.
        enabled: Whether to show a bar, on a terminal or in Jupyter.
        lines: Whether to print plain lines to stderr instead, now and then, where there is no terminal.
    """
    began = time.monotonic()
    with _shown(total, done_before, "extracting", enabled=enabled, lines=lines) as show:
        yield lambda totals: show(
            done_before + totals.prompts, line_of(totals, total, done_before, time.monotonic() - began)
        )


@contextlib.contextmanager
def show_reading(total: int, *, enabled: bool, lines: bool) -> Iterator[Callable[[int], None]]:
    """Show how many documents have been read while the block runs. The arguments are those of `show_progress`."""
    with _shown(total, 0, "reading documents", enabled=enabled, lines=lines) as show:
        yield lambda done: show(done, f"reading documents: {done} of {total}")


@contextlib.contextmanager
def _shown(total: int, done: int, text: str, *, enabled: bool, lines: bool) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows how many are done, and a text."""
    if lines and not sys.stderr.isatty():
        yield _Lines().show
        return
    if not enabled or not shows_bars():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total, completed=done)
        yield lambda now_done, now_text: bar.update(task, completed=now_done, description=now_text)


class _Lines:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, _: int, text: str) -> None:
        """Print a line if the last one is old enough."""
        now = time.monotonic()
        if now - self._last < _SECONDS:
            return
        self._last = now
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def line_of(totals: Totals, total: int, done_before: int, seconds: float) -> str:
    """Return the progress as one line."""
    done, speed = done_before + totals.prompts, totals.prompts / max(seconds, 1e-9)
    left = f"{(total - done) / speed:.0f} s left" if speed else "time left unknown"
    failed = f", {totals.failed} failed" if totals.failed else ""
    return (
        f"{done} of {total} prompts{failed}, {speed:.1f} prompts/s, {totals.tokens / max(seconds, 1e-9):.0f} tokens/s, "
        f"{size(totals.bytes)}, {left}"
    )
