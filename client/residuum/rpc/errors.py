"""The error catalogue: every reason why a call can fail, with its gRPC code, and how failures travel.

A handler raises `Failure`. An interceptor of `svc_common.rpc.serving` turns it into a `google.rpc.Status` with an
`ErrorInfo`, and the client gets the Failure back with `failure_from_rpc_error`. Any other exception becomes INTERNAL
with an incident number: the server logs its text and never sends it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from residuum.v1 import errors_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DOMAIN = "residuum.dev"
"""The `domain` of every ErrorInfo from these services."""

Reason = errors_pb2.ErrorReason

CODES: dict[errors_pb2.ErrorReason.ValueType, grpc.StatusCode] = {
    errors_pb2.ERROR_REASON_INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_UNKNOWN_LAYER: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_UNKNOWN_SITE: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_UNKNOWN_OPERATION: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_UNKNOWN_MODEL: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_EMPTY_PROMPT: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_DIGEST_MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_WRONG_LENGTH: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_WRONG_DTYPE: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_BAD_VALUES: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_MISSING_VECTORS: grpc.StatusCode.FAILED_PRECONDITION,
    errors_pb2.ERROR_REASON_REQUEST_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    errors_pb2.ERROR_REASON_UNKNOWN_REQUEST: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_CAPTURE_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    errors_pb2.ERROR_REASON_CAPTURE_ENDED: grpc.StatusCode.FAILED_PRECONDITION,
    errors_pb2.ERROR_REASON_STORE_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    errors_pb2.ERROR_REASON_CHECKSUM_MISMATCH: grpc.StatusCode.DATA_LOSS,
    errors_pb2.ERROR_REASON_STORE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_LIMIT_REACHED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_NOT_SERVING: grpc.StatusCode.UNAVAILABLE,
    errors_pb2.ERROR_REASON_ENGINE_DEAD: grpc.StatusCode.UNAVAILABLE,
    errors_pb2.ERROR_REASON_ABORTED: grpc.StatusCode.CANCELLED,
    errors_pb2.ERROR_REASON_INTERNAL: grpc.StatusCode.INTERNAL,
    errors_pb2.ERROR_REASON_NOT_UPDATABLE: grpc.StatusCode.FAILED_PRECONDITION,
    errors_pb2.ERROR_REASON_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    errors_pb2.ERROR_REASON_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    errors_pb2.ERROR_REASON_QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_CALLER_STALLED: grpc.StatusCode.CANCELLED,
    errors_pb2.ERROR_REASON_MISSING_SAE: grpc.StatusCode.FAILED_PRECONDITION,
    errors_pb2.ERROR_REASON_UNKNOWN_MEMORY: grpc.StatusCode.FAILED_PRECONDITION,
    errors_pb2.ERROR_REASON_ARCHIVE_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC code of every reason. errors.proto documents the same codes; a test compares the two."""

_PREFIX = "ERROR_REASON_"

_MESSAGE_BYTES = 1024
_DETAIL_BYTES = 4600
"""Size limit of a failure's message (counted twice) and metadata. A status must fit into the 8 KiB of headers that gRPC
peers accept; otherwise the caller does not get it. The status holds the message twice, once percent-encoded (three
bytes for one), and everything else in base64."""


class Failure(Exception):  # noqa: N818 - on the server it is the outcome of a call, not an error
    """A failure with a reason of the contract.

    Example:
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_LAYER,
            "Layer 31 does not exist: the model has layers 0 to 29. Choose among these.",
            layer=31,
        )
    """

    def __init__(self, reason: errors_pb2.ErrorReason.ValueType, message: str, **metadata: object) -> None:
        """Create a failure.

        Args:
            reason: The reason; it determines the gRPC code.
            message: What is wrong and what to do, for a person. It is truncated to 1 KiB.
            metadata: The message's variable parts, for programs. They are sent as text, at most about 4 KiB in total.
        """
        message = _cut(message, _MESSAGE_BYTES)
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = {}
        room = _DETAIL_BYTES - 2 * len(message.encode())
        for key, value in metadata.items():
            self.metadata[key] = _cut(str(value), room)
            room -= len(self.metadata[key].encode())

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return CODES[self.reason]

    @property
    def reason_name(self) -> str:
        """The reason as in ErrorInfo, such as "UNKNOWN_LAYER"."""
        return errors_pb2.ErrorReason.Name(self.reason).removeprefix(_PREFIX)

    @classmethod
    def of_item(cls, error: errors_pb2.ItemError) -> Failure | None:
        """Return the Failure that `to_item_error` made, or None if its reason is a newer server's."""
        if error.reason not in CODES:
            return None
        return cls(error.reason, error.message, **dict(error.metadata))

    def to_item_error(self) -> errors_pb2.ItemError:
        """Return the failure as the outcome of one item of a call. Message and metadata are as long as in a status."""
        return errors_pb2.ItemError(reason=self.reason, message=self.message, metadata=self.metadata)

    def to_status(self) -> grpc.Status:
        """Return the failure as a gRPC status: code, message, and the ErrorInfo in the trailing metadata."""
        info = error_details_pb2.ErrorInfo(reason=self.reason_name, domain=DOMAIN, metadata=self.metadata)
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        status.details.add().Pack(info)
        return rpc_status.to_status(status)


def _cut(text: str, size: int) -> str:
    """Return a text truncated to at most `size` bytes of UTF-8. A truncated text ends with an ellipsis."""
    data = text[: size + 1].encode("utf-8", "replace")
    if len(data) <= size:
        return data.decode()
    mark = "…".encode()
    return (data[: size - len(mark)] + mark).decode("utf-8", "ignore") if size >= len(mark) else ""


def with_site_names(message: str) -> str:
    """Return a message with the clients' names of sites: resid_post for SITE_RESID_POST."""
    return re.sub(r"\bSITE_([A-Z_]+)\b", lambda match: match[1].lower(), message)


def failure_from_rpc_error(error: grpc.RpcError) -> Failure | None:
    """Return the Failure that a server raised, or None if the error carries no reason that this version knows."""
    info = _error_info(error)
    if info is None:
        return None
    try:
        reason = errors_pb2.ErrorReason.Value(_PREFIX + info.reason)
    except ValueError:
        return None  # a newer server's reason; the caller falls back to the gRPC code
    return Failure(reason, error.details() or "", **dict(info.metadata))


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    status = _status_from_metadata(error)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _status_from_metadata(error: grpc.RpcError) -> status_pb2.Status | None:
    # rpc_status.from_call takes only a grpc.Call. An AioRpcError has the same metadata but is no Call.
    metadata: Mapping[str, object] = dict(cast("Iterable[tuple[str, object]]", error.trailing_metadata() or ()))
    data = metadata.get("grpc-status-details-bin")
    return status_pb2.Status.FromString(data) if isinstance(data, bytes) else None
