"""A capture's full name: its tenant and its ID. Two tenants may use the same ID for different captures."""

from __future__ import annotations

from typing import NamedTuple

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_ID_LENGTH
from residuum.wire.tokens import ANY_TENANT
from svc_common.security.tokens_file import Caller


class CaptureName(NamedTuple):
    """The name of a capture within a store."""

    tenant: str
    """The owner; empty for the default tenant."""
    capture_id: str
    """The capture's ID."""


def name_of(described: capture_pb2.CaptureDescription | store_pb2.CaptureSummary) -> CaptureName:
    """Return the name of a capture."""
    return CaptureName(described.tenant, described.capture_id)


def written_tenant(caller: Caller, tenant: str) -> str | None:
    """Return the tenant that a writer writes for: the one it names, else its own; None if it may not act for it."""
    tenant = tenant or caller.own_tenant
    return tenant if caller.acts_for(tenant) else None


def resolve_name(caller: Caller, request: _NamesCapture) -> CaptureName:
    """Return the name of the capture that a request is about.

    Raises:
        Failure: UNKNOWN_CAPTURE if the capture belongs to a tenant that the caller may not act for. A caller cannot
            tell another tenant's capture from one that does not exist.
    """
    tenant = request.tenant if request.HasField("tenant") else caller.own_tenant
    if not caller.acts_for(tenant):
        raise unknown_capture(request.capture_id)
    return CaptureName(tenant, request.capture_id)


def resolve_names(
    caller: Caller, request: store_pb2.ReadCapturesRequest | store_pb2.DeleteCapturesRequest
) -> list[CaptureName | None]:
    """Return the name of each capture of a request; None for all if the caller may not act for their tenant."""
    tenant = request.tenant if request.HasField("tenant") else caller.own_tenant
    if not caller.acts_for(tenant):
        return [None] * len(request.capture_ids)
    return [CaptureName(tenant, capture_id) for capture_id in request.capture_ids]


def resolve_scope(caller: Caller, request: store_pb2.ListCapturesRequest | store_pb2.SearchRequest) -> str | None:
    """Return the tenant whose captures a request lists or searches; None for all tenants.

    Raises:
        Failure: PERMISSION_DENIED if the request names a tenant that the caller may not act for.
    """
    if request.HasField("tenant"):
        if not caller.acts_for(request.tenant):
            raise foreign_tenant(request.tenant)
        return request.tenant
    return None if caller.is_admin else caller.own_tenant


def unknown_capture(capture_id: str) -> Failure:
    """Return the Failure for a capture that does not exist."""
    shown = capture_id[:MAX_ID_LENGTH]  # the caller chose the text, so bound the answer's size
    message = (
        f"The store holds no capture {shown!r}. It was never opened, was deleted, or has expired. Check the ID and the "
        "tenant, or list captures (residuum ls)."
    )
    return Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, message, capture_id=shown)


def capture_exists(capture_id: str, state: capture_pb2.CaptureState.ValueType, detail: str = "") -> Failure:
    """Return the Failure for a capture ID that is taken. `detail` says why it stays taken, and what to do."""
    name = capture_pb2.CaptureState.Name(state).removeprefix("CAPTURE_STATE_")
    advice = detail or "Choose another ID, delete the capture first (residuum rm), or set if_exists."
    message = f"The store already holds a capture {capture_id!r} (state {name}). {advice}"
    return Failure(Reason.ERROR_REASON_CAPTURE_EXISTS, message, capture_id=capture_id, state=name)


def foreign_tenant(tenant: str) -> Failure:
    """Return the Failure for a token that may not act for a tenant. It does not reveal whether the tenant exists."""
    shown = tenant[:MAX_ID_LENGTH]
    message = (
        f"The token may not act for the tenant {shown!r}. Use a token of that tenant, or one of tenant {ANY_TENANT!r}."
    )
    return Failure(Reason.ERROR_REASON_PERMISSION_DENIED, message, right="", method="")


_NamesCapture = (
    store_pb2.GetCaptureRequest
    | store_pb2.ReadChunksRequest
    | store_pb2.DeleteCaptureRequest
    | store_pb2.LabelCaptureRequest
)
