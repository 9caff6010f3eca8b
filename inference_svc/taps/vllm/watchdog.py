"""A worker must not outlive its service: not even when that was killed, or while a step waits for the store."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

from svc_common.logs import get_logger

_log = get_logger(__name__)

_GRACE_SECONDS = 5.0
"""For a worker that is being stopped in order, whose parent may end first."""

_POLL_SECONDS = 1.0
_ENDED = ("Z", "X")
"""States of a process that has ended and that nobody has waited for."""


def end_with(pids: set[int]) -> None:
    """End this process soon after the first of some processes has ended, whatever this one is doing then.

    Args:
        pids: The service, and the process that started this one. Those that have ended already count as well.
    """
    threading.Thread(target=_watch, args=(pids,), name="residuum-watchdog", daemon=True).start()


def _watch(pids: set[int]) -> None:
    try:
        _wait(pids)
    except ProcessLookupError:
        pass
    except OSError as error:  # no such call in this kernel, or a sandbox forbids it
        _log.info("processes cannot be waited for; they are looked up", cause=str(error))
        while all(map(_is_running, pids)):
            time.sleep(_POLL_SECONDS)
    time.sleep(_GRACE_SECONDS)
    _log.error("the service has gone; its worker ends itself")
    os._exit(1)


def _wait(pids: set[int]) -> None:
    """Wait until one of the processes has ended.

    Raises:
        ProcessLookupError: One had ended before.
        OSError: That cannot be waited for here.
    """
    poll = select.poll()
    for pid in pids:
        poll.register(os.pidfd_open(pid), select.POLLIN)  # readable once the process has ended
    poll.poll()


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in _ENDED
