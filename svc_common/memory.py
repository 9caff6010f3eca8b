"""Memory management of long-running processes: glibc's allocator and Python's garbage collector."""

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
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc accepts no greater value
_KEPT_BYTES = 256 << 20
_MIN_ARENAS = 2


def keep_memory() -> bool:
    """Make glibc reuse freed memory instead of returning it to the kernel. Return whether the C library supports this.

    With glibc's defaults, nearly every chunk's buffer is new memory. It goes back to the kernel after use, and the next
    chunk's buffer is mapped, zeroed and faulted in page by page again. This took 40 % of the processor time of a store
    under load, and made larger chunks more expensive per byte.

    glibc keeps memory per arena, and by default has eight arenas per core. One per core is enough, and lets the
    process reach its final size soon.

    Call this only in the services' own processes, before they start threads. A library must not change its user's
    process.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False  # not glibc
    kept = bool(set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES))
    few = bool(set_option(_M_ARENA_MAX, max(os.cpu_count() or 1, _MIN_ARENAS)))
    return bool(set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and kept and few


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while importing large libraries, and exclude the imported objects from later ones.

    Modules create hundreds of thousands of objects, of which almost none is garbage. With collection enabled, vLLM's
    import spends much of its time on it.
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
    """Exclude all current objects from garbage collection. Call it once a process has loaded all that it needs.

    A full collection visits every object, a million with vLLM loaded, and stops the process meanwhile. So Python delays
    it until the long-lived objects have grown by a quarter. In a service that is the garbage of thousands of calls.
    After freezing, the collected heap starts empty, so collections are quick and frequent.
    """
    gc.collect()
    gc.freeze()
