"""Page tokens: where a list goes on, bound to the store and to the filter that it was made with."""

from __future__ import annotations

import base64
import binascii
import hashlib

from residuum.v1 import store_pb2
from store_svc.checks import invalid
from store_svc.keys import pack_number, unpack_number

_MARK_BYTES = 8


def make_token(store_id: bytes, request: store_pb2.ListCapturesRequest, last: int) -> str:
    """Return the token of the page after the capture with this internal number."""
    return base64.urlsafe_b64encode(pack_number(last) + _mark(store_id, request, pack_number(last))).decode()


def read_token(store_id: bytes, request: store_pb2.ListCapturesRequest) -> int | None:
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
    number, mark = data[:-_MARK_BYTES], data[-_MARK_BYTES:]
    if len(number) != _MARK_BYTES or mark != _mark(store_id, request, number):
        raise invalid(
            "page_token", "is not one of this store's, or goes with another filter; start from the first page"
        )
    return unpack_number(number)


def _mark(store_id: bytes, request: store_pb2.ListCapturesRequest, number: bytes) -> bytes:
    states = ",".join(str(int(state)) for state in sorted(set(request.states)))
    text = b"\0".join((number, states.encode(), request.prefix.encode()))
    return hashlib.blake2b(text, key=store_id, digest_size=_MARK_BYTES).digest()
