"""Ends a service that gets SIGTERM before it can handle signals: while its program is imported."""

from __future__ import annotations

import os
import signal


def end_at_sigterm() -> None:
    """Let SIGTERM end this process, until the service sets a handler of its own.

    Linux ignores signals without a handler in the first process of a container. Importing vLLM may take a minute, and a
    pod that is deleted meanwhile would serve until it is killed.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    os._exit(0)  # at once: an exception could be caught by what is being imported
