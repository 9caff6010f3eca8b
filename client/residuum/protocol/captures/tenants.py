"""Sets the tenant of requests about captures. Admins may name any tenant; other tokens have a tenant of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_text
from residuum.v1 import store_pb2
from residuum.values.replies.capture_summaries import CaptureSummary
from residuum.wire.tokens import is_valid_tenant

_Request = TypeVar("_Request")

_TENANT_REQUESTS = (
    store_pb2.GetCaptureRequest,
    store_pb2.ListCapturesRequest,
    store_pb2.ReadChunksRequest,
    store_pb2.ReadCapturesRequest,
    store_pb2.DeleteCaptureRequest,
    store_pb2.DeleteCapturesRequest,
    store_pb2.LabelCaptureRequest,
    store_pb2.SearchRequest,
)


def check_tenant(tenant: str | None) -> str | None:
    """Return the tenant after checking its name; None for None.

    Raises:
        InvalidRequest: The name is invalid.
        TypeError: It is no text.
    """
    if tenant is not None and not is_valid_tenant(check_text("tenant", tenant)):
        raise InvalidRequest(
            f"{tenant!r} is not a valid tenant name. Use 1 to 128 of a-z A-Z 0-9 . _ - and do not start with . or -",
            reason="INVALID_FIELD",
        )
    return tenant


def for_tenant(request: _Request, tenant: str | None) -> _Request:
    """Set the tenant of a request, if it is about captures. None means the token's own tenant. Return the request."""
    if tenant is not None and isinstance(request, _TENANT_REQUESTS):
        request.tenant = tenant
    return request


def tenant_of(found: Iterable[CaptureSummary], chosen: str | None) -> str | None:
    """Return the tenant to name in calls about captures that a filter has found; `chosen` if it has found none.

    Without a tenant, an ID names a capture of the token's own tenant. But an admin's lists have those of all tenants.

    Raises:
        InvalidRequest: They are of several tenants.
    """
    tenants = sorted({item.tenant for item in found})
    if len(tenants) > 1:
        names = ", ".join(map(repr, tenants))
        raise InvalidRequest(
            f"The filter selects captures of several tenants: {names}. Choose one: Client(..., "
            f"tenant={tenants[-1]!r}), or --tenant of the command.",
            reason="INVALID_FIELD",
            metadata={"field": "tenant"},
        )
    return tenants[0] if tenants else chosen
