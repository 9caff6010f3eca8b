"""Keeps what was made of parts of requests, because callers repeat what they capture, steer, score and sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_KEPT = 64
_MAX_KEPT_BYTES = 4 << 20
"""Bytes of all kept parts. What is made of a part takes about as many, and what is derived from that perhaps several
times as many."""

_Made = TypeVar("_Made")


class KeptParts(Generic[_Made]):
    """Makes something of serialised parts of a request, and keeps the results of those used last.

    Requests with equal parts get the same object, so nothing may change it.
    """

    def __init__(self, make: Callable[..., _Made]) -> None:
        """Keep nothing yet. `make` takes the parts, and depends on nothing else."""
        self._make = make
        self._kept: dict[tuple[bytes | None, ...], _Made] = {}
        self._bytes = 0

    def __call__(self, *parts: bytes | None) -> _Made:
        """Return what `make` makes of the parts. None: the request does not have the part."""
        if parts in self._kept:
            made = self._kept[parts] = self._kept.pop(parts)  # now the newest
            return made
        size = _size(parts)
        if size > _MAX_KEPT_BYTES:
            return self._make(*parts)
        made = self._kept[parts] = self._make(*parts)
        self._bytes += size
        while len(self._kept) > _MAX_KEPT or self._bytes > _MAX_KEPT_BYTES:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._bytes -= _size(oldest)
        return made


def _size(parts: tuple[bytes | None, ...]) -> int:
    return sum(len(part) for part in parts if part)
