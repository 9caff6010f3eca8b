"""Waits for the signal that ends the process."""

from __future__ import annotations

import os
import signal


class Shutdown:
    """A shutdown request, made by SIGTERM, SIGINT or a call of `request`. Create it in the main thread.

    It uses a pipe because a Python signal handler alone can be lost. The handler runs in the main thread between two
    bytecodes. If the signal arrives just before that thread blocks on a lock, the handler never runs.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _do_nothing)

    def request(self) -> None:
        """Make `wait` return. Any thread may call this."""
        os.write(self._writer, b"\0")

    def wait(self) -> None:
        """Wait until shutdown is requested."""
        os.read(self._reader, 1)


def _do_nothing(*_: object) -> None:
    """Handle a signal without action: Python has already written it to the pipe."""
