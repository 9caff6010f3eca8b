"""Bounds the store's memory by its settings, so that operators can choose a container's memory limit."""

from __future__ import annotations

from store_svc.archive.copying import COPIERS
from store_svc.calls import MAX_SEARCHES, SHORT_CALLS
from store_svc.writing.write_queue import MOST_GROUP_BYTES

_MIB = 1 << 20

_BASE = 160 * _MIB
"""Interpreter, libraries, an empty catalog, gRPC's own buffers."""

_KEPT = 256 * _MIB
"""Freed memory that glibc keeps (svc_common/memory.py)."""

_QUEUE = 4 * MOST_GROUP_BYTES
"""Chunks that wait for the writer, for two transactions; chunks that it is writing, and LMDB's copies of these."""

_WRITER = 12 * _MIB
"""For each writer stream: one message being received, and one waiting for room in the queue, with a large chunk from
shared memory."""

_STREAM = 8 * _MIB
"""For each active read stream: up to three prepared chunks, and one being sent."""

_CALL = _MIB // 2
"""For each call: its thread, the second thread of writers and of long reads, and gRPC's own state."""

_SHORT_CALL = 4 * _MIB
"""For each short call: its message."""

_SEARCH = 32 * _MIB
"""For each search: its best hits and those of each thread, the numbers of a million selected captures, the blocks of
rows of its threads, and the messages with hits."""

_COPIER = 64 * _MIB
"""For each capture that is copied to the archive: an object with chunks, twice while it is sent, and its index. The
capture's own object takes less, also for 262,144 chunks."""

_FETCHING = 18 * _MIB
"""For each active read stream, if its rows come from the archive: a range of 8 MiB that is read, and one that is
fetched ahead."""

_LANES = 8
"""Lanes of all searches, which read from the archive, too."""

_CAPTURE = 3 * 1024 // 2
"""For each ended capture: its entry in the catalog."""


def memory_bound(
    *, max_streams: int, max_writers: int, max_open_mib: int, max_captures: int, has_archive: bool = False
) -> int:
    """Return the most memory that a store takes, in bytes.

    The bound leaves out the mapped pages of the database, which the kernel can drop. docs/operations/bounds.md explains
    the sum; `python -m tests.hostile` compares it with a store under attack. The arguments are the settings of the same
    names.
    """
    return (
        _BASE + _KEPT + _QUEUE
        + _WRITER * max_writers
        + _STREAM * max_streams
        + _CALL * (max_streams + max_writers + SHORT_CALLS)
        + _SHORT_CALL * SHORT_CALLS
        + _SEARCH * MAX_SEARCHES
        + _MIB * max_open_mib
        + _CAPTURE * max_captures
        + (_COPIER * COPIERS + _FETCHING * (max_streams + _LANES) if has_archive else 0)
    )  # fmt: skip
