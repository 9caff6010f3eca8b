"""How processes that serve for a long time keep their memory."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes none that is greater
_KEPT_BYTES = 256 << 20
_LEAST_ARENAS = 2


def keep_memory() -> bool:
    """Let freed memory be used again instead of going back to the kernel; return whether the C library can.

    By glibc's defaults the buffer of nearly each chunk is new memory: given back when the chunk is done with, and for
    the next one mapped, zeroed and touched page by page again. That took 40 % of the processor time of a store under
    load, and made chunks the more expensive the larger they were.

    What is kept is kept for each of glibc's arenas, of which there are eight a core by default. One a core is enough,
    and the process is soon as large as it will be.

    For processes of ours alone, before they start threads. A library must leave its user's process as it is.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False  # another C library
    kept = bool(set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES))
    few = bool(set_option(_M_ARENA_MAX, max(os.cpu_count() or 1, _LEAST_ARENAS)))
    return bool(set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and kept and few


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries without looking for garbage meanwhile; what was imported stays out of later looks, too.

    Modules make hundreds of thousands of objects, and next to none of them goes: vLLM's import spends much of its time
    on looking.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def freeze_heap() -> None:
    """Leave out of garbage collections what is there by now: for a process that has loaded all that it needs.

    A full collection looks at every object, a million where vLLM is loaded, and holds up the process meanwhile; so
    Python puts it off until a quarter as many have come that lived for a while. In a service that is garbage of
    thousands of calls. Of a heap that begins empty, collections are quick, and come often.
    """
    gc.collect()
    gc.freeze()
