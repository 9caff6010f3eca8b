"""The watchdog: it ends a worker whose service has ended, even if the service was killed or a step is waiting."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

from svc_common.logs import get_logger

_log = get_logger(__name__)

_GRACE_SECONDS = 5.0
"""Time for an orderly stop, in which the parent may end before its worker."""

_POLL_SECONDS = 1.0
_ENDED = ("Z", "X")
"""The states, in /proc, of a process that has ended but still has an entry."""


def end_with(pids: set[int]) -> None:
    """End this process a few seconds after the first of some processes has ended, whatever it is doing.

    Args:
        pids: The service, and the process that started this one. Processes that have already ended count too.
    """
    threading.Thread(target=_watch, args=(pids,), name="residuum-watchdog", daemon=True).start()


def _watch(pids: set[int]) -> None:
    try:
        _wait(pids)
    except ProcessLookupError:
        pass
    except OSError as error:  # the kernel has no pidfd_open, or a sandbox forbids it
        _log.info("cannot wait for processes; polling /proc instead", cause=str(error))
        while all(map(_is_running, pids)):
            time.sleep(_POLL_SECONDS)
    time.sleep(_GRACE_SECONDS)
    _log.error("the service has ended; its worker ends too")
    os._exit(1)


def _wait(pids: set[int]) -> None:
    """Wait until one of the processes has ended.

    Raises:
        ProcessLookupError: One of them had ended already.
        OSError: This system does not support waiting for processes that are not children.
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
