"""Placement: which store holds a capture. placement.proto defines the rule; store_ranks.json has test vectors."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

from residuum.wire.ids import is_valid_id

_DOMAIN = b"residuum.store.v1"


class StoreAddress(NamedTuple):
    """A store's name and address."""

    name: str
    """The store's name. Placement uses it, so it must never change."""
    endpoint: str
    """The address at which this process reaches the store, host:port."""

    def __str__(self) -> str:
        return self.endpoint if self.name == self.endpoint else f"{self.name} ({self.endpoint})"


def score(store: str, capture_id: str) -> int:
    """Return a store's score for a capture, a 64-bit integer. The store with the highest score holds the capture."""
    name = store.encode()
    digest = hashlib.sha256(_DOMAIN + struct.pack("<I", len(name)) + name + capture_id.encode()).digest()
    return int.from_bytes(digest[:8], "big")


def first_rank(stores: Iterable[str], capture_id: str) -> str:
    """Return the name of the store that holds a capture. `stores` are one or more distinct names."""
    return min(stores, key=lambda store: (-score(store, capture_id), store.encode()))


def ranks(stores: Iterable[str], capture_id: str) -> list[str]:
    """Return the stores' names in the order in which clients ask them for a capture."""
    return sorted(stores, key=lambda store: (-score(store, capture_id), store.encode()))


def parse_stores(texts: Iterable[str]) -> tuple[StoreAddress, ...]:
    """Parse stores given as "host:port" or "name=host:port", in this order.

    A store without a name is named after its endpoint. This does not check that endpoints are host:port.

    Raises:
        ValueError: A name is malformed, or two stores share a name or an endpoint.
    """
    stores = tuple(_parse(text.strip()) for text in texts)
    for field, values in (("name", [item.name for item in stores]), ("endpoint", [item.endpoint for item in stores])):
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"two stores share the {field} {value!r}; give each store its own")
    return stores


def _parse(text: str) -> StoreAddress:
    name, equals, endpoint = text.rpartition("=")
    if not equals:
        return StoreAddress(text, text)
    if not is_valid_id(name):
        raise ValueError(
            f"{name!r} is not a valid store name: use 1 to 128 of a-z A-Z 0-9 . _ - and do not start with . or -, "
            "as in a=host:port"
        )
    return StoreAddress(name, endpoint)
