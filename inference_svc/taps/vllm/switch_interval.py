"""The interpreter's switch interval in the engine's process: how long a thread that runs Python makes others wait."""

from __future__ import annotations

import sys

from svc_common.logs import get_logger

SWITCH_SECONDS = 50e-6

_log = get_logger(__name__)


def shorten_switch_interval() -> None:
    """Have every thread of this process give up the GIL after 50 µs if another one waits for it, instead of 5 ms.

    The sink's thread and the dispatcher's run Python beside the engine's thread, which gives up the GIL in each call of
    torch and CUDA, and may have to wait to get it back.

    This holds for vLLM's own threads too, and for good. It costs a switch between threads (some 10 µs) for each 50 µs
    in which two threads want to run Python; if one does, it costs nothing. `bench.host.waiting --switch-us` compares
    intervals.
    """
    if sys.getswitchinterval() > SWITCH_SECONDS:
        _log.info("switch interval shortened", before=sys.getswitchinterval(), now=SWITCH_SECONDS)
        sys.setswitchinterval(SWITCH_SECONDS)
