"""Whose captures are meant: for admins, who may name any tenant. Everybody else's own is known by the token."""

from __future__ import annotations

from typing import TypeVar

from residuum.exceptions import InvalidRequest
from residuum.v1 import store_pb2
from residuum.wire.tokens import is_valid_tenant

_Request = TypeVar("_Request")

_NAMING = (
    store_pb2.GetCaptureRequest,
    store_pb2.ListCapturesRequest,
    store_pb2.ReadChunksRequest,
    store_pb2.ReadCapturesRequest,
    store_pb2.DeleteCaptureRequest,
    store_pb2.LabelCaptureRequest,
)


def check_tenant(tenant: str | None) -> str | None:
    """Return a tenant if it may be one, or None.

    Raises:
        InvalidRequest: It is no tenant's name.
    """
    if tenant is not None and not is_valid_tenant(tenant):
        raise InvalidRequest(f"{tenant!r} is no tenant's name.", reason="INVALID_FIELD")
    return tenant


def for_tenant(request: _Request, tenant: str | None) -> _Request:
    """Let a request be about a tenant's captures, if it is about captures; None: the caller's own."""
    if tenant is not None and isinstance(request, _NAMING):
        request.tenant = tenant
    return request
