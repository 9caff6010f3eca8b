"""Page tokens: where a list goes on, bound to the store and to the filter that it was made with."""

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
    """Return the token of the page after the capture with this internal number.

    Args:
        store_id: Binds it to this store.
        request: The filter.
        scope: The tenant whose captures are listed; None: all.
        last: The number. It is hidden in the token, for it tells how many captures others have made.
    """
    mark = _mark(store_id, request, scope, pack_number(last))
    return base64.urlsafe_b64encode(_hide(store_id, mark, pack_number(last)) + mark).decode()


def read_token(store_id: bytes, request: store_pb2.ListCapturesRequest, scope: str | None) -> int | None:
    """Return the internal number after which the wanted page starts, or None for the first page.

    Raises:
        Failure: INVALID_FIELD: the token is not one of this store's, or goes with another filter.
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
        raise invalid(
            "page_token", "is not one of this store's, or goes with another filter; start from the first page"
        )
    return unpack_number(number)


def _hide(store_id: bytes, mark: bytes, number: bytes) -> bytes:
    """Return a number's bytes as nobody without the store's id can read them; done twice, as they were."""
    mask = hashlib.blake2b(mark, key=store_id, digest_size=_MARK_BYTES).digest()
    return bytes(a ^ b for a, b in zip(number, mask, strict=False))


def _mark(store_id: bytes, request: store_pb2.ListCapturesRequest, scope: str | None, number: bytes) -> bytes:
    states = ",".join(str(int(state)) for state in sorted(set(request.states)))
    whose = (ANY_TENANT if scope is None else scope).encode()
    text = b"\0".join((number, states.encode(), whose, request.prefix.encode()))
    return hashlib.blake2b(text, key=store_id, digest_size=_MARK_BYTES).digest()
