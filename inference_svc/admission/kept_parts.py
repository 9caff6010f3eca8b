"""Keeps what was made of parts of requests, because callers repeat what they capture, steer, score and sample."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

from residuum.wire.limits import MAX_PROBES_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

_MAX_KEPT_BYTES = MAX_PROBES_BYTES
"""Parts of more bytes are not kept. Probes are the largest parts that callers repeat."""
_KEPT = 32

_Made = TypeVar("_Made")


class KeptParts(Generic[_Made]):
    """Makes something of serialised parts of a request, and keeps the newest results.

    Requests with equal parts get the same object, so nothing may change it.
    """

    def __init__(self, make: Callable[..., _Made]) -> None:
        """Keep nothing yet. `make` takes the parts, and depends on nothing else."""
        self._make = make
        self._kept = lru_cache(maxsize=_KEPT)(make)

    def __call__(self, *parts: bytes | None) -> _Made:
        """Return what `make` makes of the parts. None: the request does not have the part."""
        if sum(len(part) for part in parts if part) > _MAX_KEPT_BYTES:
            return self._make(*parts)
        return self._kept(*parts)


def data_of(part: Message | None) -> bytes | None:
    """Return a part serialised, for `KeptParts`."""
    return None if part is None else part.SerializeToString()
