"""Waits with a limit: a service that hangs fails its test with a message, and does not hang the whole run."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

PATIENCE_SECONDS = 60.0
"""A generous limit for expected events, so that a busy machine does not fail tests."""


def wait_for(
    probe: Callable[[], _T],
    what: str | Callable[[], str] = "the condition holds",
    seconds: float = PATIENCE_SECONDS,
    every: float = 0.01,
) -> _T:
    """Poll until a probe returns something true, and return it.

    Args:
        probe: What to ask.
        what: What is expected, for the message; or a function that returns it, such as the log of a service.
        seconds: The limit.
        every: Seconds between two probes.
    """
    end = time.monotonic() + seconds
    while not (result := probe()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(every)
    return result


def read_line(pipe: TextIO, what: str, seconds: float = PATIENCE_SECONDS) -> str:
    """Return the first line that a process prints to a pipe; empty if it has closed the pipe."""
    if not select.select([pipe], [], [], seconds)[0]:
        raise AssertionError(f"not within {seconds:g} s: {what}")
    return pipe.readline()
