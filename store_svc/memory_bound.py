"""How much memory a store may take by its settings, so that whoever limits its container knows what to leave it."""

from __future__ import annotations

from store_svc.calls import SHORT_CALLS

_MIB = 1 << 20

_BASE = 160 * _MIB
"""Interpreter, libraries, an empty catalog, gRPC's own buffers."""

_KEPT = 256 * _MIB
"""What glibc keeps of freed memory (svc_common/memory.py)."""

_QUEUE = 96 * _MIB
"""Chunks that wait for the writer, and those that it writes."""

_WRITER = 8 * _MIB
"""Of a stream of a writer: a message that comes, and one that waits for room."""

_STREAM = 8 * _MIB
"""Of a stream to a reader that moves: up to three chunks made ahead, and one on its way."""

_CALL = _MIB // 2
"""Of any call: its thread and one more, as a writer and a read of many chunks have, and what gRPC has of it."""

_SHORT_CALL = 4 * _MIB
"""The message of a short call."""

_CAPTURE = 3 * 1024 // 2
"""Of a capture that has ended: its place in the catalog."""


def memory_bound(*, max_streams: int, max_writers: int, max_open_mib: int, max_captures: int) -> int:
    """Return the bytes below which a store stays, without the pages of its database, which are the kernel's to drop.

    docs/operations/bounds.md explains the sum; `python -m tests.hostile` compares it with a store under attack. The
    arguments are the settings of the same names.
    """
    return (
        _BASE + _KEPT + _QUEUE
        + _WRITER * max_writers
        + _STREAM * max_streams
        + _CALL * (max_streams + max_writers + SHORT_CALLS)
        + _SHORT_CALL * SHORT_CALLS
        + _MIB * max_open_mib
        + _CAPTURE * max_captures
    )  # fmt: skip
