"""A worker must not outlive its service: not even when that was killed, or while a step waits for the store."""

from __future__ import annotations

import os
import select
import threading
import time

from residuum.rpc.logs import get_logger

_log = get_logger(__name__)

_GRACE_SECONDS = 5.0
"""For a worker that is being stopped in order, whose parent may end first."""


def end_with(pids: set[int]) -> None:
    """End this process soon after the first of some processes has ended, whatever this one is doing then.

    Args:
        pids: The service, and the process that started this one. Those that have ended already count as well.
    """
    threading.Thread(target=_watch, args=(pids,), name="residuum-watchdog", daemon=True).start()


def _watch(pids: set[int]) -> None:
    poll = select.poll()
    try:
        for pid in pids:
            poll.register(os.pidfd_open(pid), select.POLLIN)  # readable once the process has ended
        poll.poll()
    except ProcessLookupError:
        pass
    time.sleep(_GRACE_SECONDS)
    _log.error("the service has gone; its worker ends itself")
    os._exit(1)
