"""Ends a service that gets SIGTERM before it can handle signals, and one whose launcher has been killed."""

from __future__ import annotations

import os
import signal
import threading
import time

STARTER = "RESIDUUM_STARTER_PID"
"""The variable by which the launcher tells a service that it ends with the launcher."""

_POLL_SECONDS = 0.5


def end_at_sigterm() -> None:
    """Let SIGTERM end this process, until the service sets a handler of its own.

    Linux ignores signals without a handler in the first process of a container. Importing vLLM may take a minute, and a
    pod that is deleted meanwhile would serve until it is killed.
    """
    signal.signal(signal.SIGTERM, _end)


def end_with_starter() -> None:
    """Stop this service, as SIGTERM does, once the launcher that started it has ended. Others are not watched.

    A launcher that is killed cannot stop its services, which would keep their ports, their memory and the GPU.
    """
    starter = os.environ.pop(STARTER, "")  # it is not for what this process starts
    if starter:
        threading.Thread(target=_watch, args=(int(starter),), name="residuum-starter", daemon=True).start()


def _watch(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _end(*_: object) -> None:
    os._exit(0)  # at once: an exception could be caught by what is being imported
