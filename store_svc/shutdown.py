"""Waiting for the end of the process without losing it."""

from __future__ import annotations

import os
import signal


class Ending:
    """Comes with SIGTERM, SIGINT, or a call of `request`; make it in the main thread.

    A pipe, because a Python handler alone can be lost: it runs in the main thread between two bytecodes, and when the
    signal arrives just before that thread blocks in a lock, that is never.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _do_nothing)

    def request(self) -> None:
        """Make `wait` return; from any thread."""
        os.write(self._writer, b"\0")

    def wait(self) -> None:
        """Wait for the end."""
        os.read(self._reader, 1)


def _do_nothing(*_: object) -> None:
    """Handle a signal: that it came has been written to the pipe."""
