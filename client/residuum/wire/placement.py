"""Which of several stores keeps a capture. The rule is written in placement.proto; test vectors lie beside it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

from residuum.wire.ids import is_valid_id

_DOMAIN = b"residuum.store.v1"


class StoreAddress(NamedTuple):
    """A store."""

    name: str
    """What it is called for as long as it lives: captures are placed by it."""
    endpoint: str
    """Where it is reached from here, host:port."""

    def __str__(self) -> str:
        return self.endpoint if self.name == self.endpoint else f"{self.name} ({self.endpoint})"


def score(store: str, capture_id: str) -> int:
    """Return the score of the store of that name for a capture, an integer of 64 bits: the highest keeps it."""
    name = store.encode()
    digest = hashlib.sha256(_DOMAIN + struct.pack("<I", len(name)) + name + capture_id.encode()).digest()
    return int.from_bytes(digest[:8], "big")


def first_rank(stores: Iterable[str], capture_id: str) -> str:
    """Return the name of the store that keeps a capture, of one or more different names."""
    return min(stores, key=lambda store: (-score(store, capture_id), store.encode()))


def ranks(stores: Iterable[str], capture_id: str) -> list[str]:
    """Return the names of stores in the order in which they are asked for a capture."""
    return sorted(stores, key=lambda store: (-score(store, capture_id), store.encode()))


def parse_stores(texts: Iterable[str]) -> tuple[StoreAddress, ...]:
    """Return the stores that are written as "host:port" or "name=host:port", in their order.

    One without a name is called by its endpoint. Whether that is host:port is for others to check.

    Raises:
        ValueError: A name is malformed, or two stores share a name or an endpoint.
    """
    stores = tuple(_parse(text.strip()) for text in texts)
    for what, values in (("name", [item.name for item in stores]), ("endpoint", [item.endpoint for item in stores])):
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"the {what} {value!r} stands for two stores; each has its own")
    return stores


def _parse(text: str) -> StoreAddress:
    name, equals, endpoint = text.rpartition("=")
    if not equals:
        return StoreAddress(text, text)
    if not is_valid_id(name):
        raise ValueError(
            f"{name!r} is no name for a store: write 1 to 128 of a-z A-Z 0-9 . _ - that do not start with . or -, "
            "as in a=host:port"
        )
    return StoreAddress(name, endpoint)
