"""Page tokens: where the next page of a list starts. A token is bound to its store and to the list's filter."""

from __future__ import annotations

import base64
import binascii
import hashlib

from residuum.v1 import store_pb2
from residuum.wire.tokens import ANY_TENANT
from store_svc.checks import invalid
from store_svc.database.keys import pack_number, unpack_number

_MARK_BYTES = 8


def make_token(store_id: bytes, request: store_pb2.ListCapturesRequest, scope: str | None, last: int) -> str:
    """Return the token of the page that starts after the capture numbered `last`.

    Args:
        store_id: The store's own ID, which binds the token to this store.
        request: The list request with the filter.
        scope: The tenant whose captures are listed; None for all.
        last: The capture's internal number. The token encrypts it, because it reveals how many captures other tenants
            have made.
    """
    mark = _mark(store_id, request, scope, pack_number(last))
    return base64.urlsafe_b64encode(_hide(store_id, mark, pack_number(last)) + mark).decode()


def read_token(store_id: bytes, request: store_pb2.ListCapturesRequest, scope: str | None) -> int | None:
    """Return the internal number after which the requested page starts, or None for the first page.

    Raises:
        Failure: INVALID_FIELD if the token comes from another store or belongs to another filter.
    """
    if not request.page_token:
        return None
    try:
        data = base64.b64decode(request.page_token.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    hidden, mark = data[:-_MARK_BYTES], data[-_MARK_BYTES:]
    number = _hide(store_id, mark, hidden)
    if len(hidden) != _MARK_BYTES or mark != _mark(store_id, request, scope, number):
        raise invalid("page_token", "comes from another store, or belongs to another filter; start from the first page")
    return unpack_number(number)


def _hide(store_id: bytes, mark: bytes, number: bytes) -> bytes:
    """Encrypt a number's bytes with the store's ID as the key. Applied twice, it returns the original bytes."""
    mask = hashlib.blake2b(mark, key=store_id, digest_size=_MARK_BYTES).digest()
    return bytes(a ^ b for a, b in zip(number, mask, strict=False))


def _mark(store_id: bytes, request: store_pb2.ListCapturesRequest, scope: str | None, number: bytes) -> bytes:
    states = ",".join(str(int(state)) for state in sorted(set(request.states)))
    whose = (ANY_TENANT if scope is None else scope).encode()
    parts = [number, states.encode(), whose, request.prefix.encode()]
    if request.where:  # older stores made tokens without this part
        parts.append(request.where.encode())
    text = b"\0".join(parts)
    return hashlib.blake2b(text, key=store_id, digest_size=_MARK_BYTES).digest()
