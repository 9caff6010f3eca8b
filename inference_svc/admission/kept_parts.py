"""Keeps the resolved parts of requests, because callers repeat what they capture, steer, score and sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_KEPT_BYTES = 8 << 10
_KEPT = 64

_Part = TypeVar("_Part", bound=Message)


class KeptParts(Generic[_Part]):
    """Resolves one part of requests for one model, and keeps the results.

    It keeps them as bytes: every request gets a message of its own.
    """

    def __init__(self, resolve: Callable[[_Part], _Part]) -> None:
        """Keep nothing yet. `resolve` checks a part, and depends on nothing else."""
        self._resolve = resolve
        self._kept: dict[bytes, bytes] = {}

    def resolve(self, part: _Part) -> _Part:
        """Return a resolved part.

        Raises:
            Failure: It is invalid. The reason and the metadata name the field.
        """
        if part.ByteSize() > _MAX_KEPT_BYTES:
            return self._resolve(part)
        data = part.SerializeToString()
        known = self._kept.pop(data, None)
        if known is not None:
            self._kept[data] = known  # now the newest
            return type(part).FromString(known)
        resolved = self._resolve(part)
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]  # the oldest
        self._kept[data] = resolved.SerializeToString()
        return resolved
