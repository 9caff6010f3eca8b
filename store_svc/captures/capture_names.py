"""What a capture is called: its tenant, and the id within it. Two tenants may use the same id, and never meet."""

from __future__ import annotations

from typing import NamedTuple

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_ID_LENGTH
from residuum.wire.tokens import ANY_TENANT
from svc_common.tokens_file import Caller


class CaptureName(NamedTuple):
    """The name of a capture within a store."""

    tenant: str
    """Whom it belongs to; empty: the default tenant."""
    capture_id: str
    """Its id."""


def name_of(described: capture_pb2.CaptureDescription | store_pb2.CaptureSummary) -> CaptureName:
    """Return the name of a capture."""
    return CaptureName(described.tenant, described.capture_id)


def written_tenant(caller: Caller, tenant: str) -> str | None:
    """Return the tenant that a writer means: the one it names, or else its own. None: it does not act for that one."""
    tenant = tenant or caller.own_tenant
    return tenant if caller.acts_for(tenant) else None


def resolve_name(caller: Caller, request: _NamesCapture) -> CaptureName:
    """Return the capture that a request is about.

    Raises:
        Failure: UNKNOWN_CAPTURE: it is another tenant's, and so does not exist for this caller.
    """
    tenant = request.tenant if request.HasField("tenant") else caller.own_tenant
    if not caller.acts_for(tenant):
        raise unknown_capture(request.capture_id)
    return CaptureName(tenant, request.capture_id)


def resolve_scope(caller: Caller, request: store_pb2.ListCapturesRequest) -> str | None:
    """Return whose captures a request is about; None: everybody's.

    Raises:
        Failure: PERMISSION_DENIED: another tenant's.
    """
    if request.HasField("tenant"):
        if not caller.acts_for(request.tenant):
            raise foreign_tenant(request.tenant)
        return request.tenant
    return None if caller.is_admin else caller.own_tenant


def unknown_capture(capture_id: str) -> Failure:
    """Return the Failure that says that there is no such capture."""
    shown = capture_id[:MAX_ID_LENGTH]  # whatever was asked for, an answer is short
    message = f"The store holds no capture {shown!r}: it was never opened, or it was deleted, or has expired."
    return Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, message, capture_id=shown)


def capture_exists(capture_id: str) -> Failure:
    """Return the Failure that says that an id is taken."""
    message = f"The store holds another capture {capture_id!r}, or one that has ended. Choose another id."
    return Failure(Reason.ERROR_REASON_CAPTURE_EXISTS, message, capture_id=capture_id)


def foreign_tenant(tenant: str) -> Failure:
    """Return the Failure that says that a token does not act for a tenant, whether or not there is one."""
    shown = tenant[:MAX_ID_LENGTH]
    message = f"The token does not act for the tenant {shown!r}; that takes one of that tenant, or of {ANY_TENANT!r}."
    return Failure(Reason.ERROR_REASON_PERMISSION_DENIED, message, right="", method="")


_NamesCapture = store_pb2.GetCaptureRequest | store_pb2.ReadChunksRequest | store_pb2.DeleteCaptureRequest
