"""Maps the reasons of the contract to this package's exceptions. No I/O: both clients use it."""

from __future__ import annotations

from residuum import exceptions as exc
from residuum.v1 import errors_pb2

_PREFIX = "ERROR_REASON_"

EXCEPTIONS: dict[str, type[exc.ResiduumError]] = {
    "INVALID_FIELD": exc.InvalidRequest,
    "UNKNOWN_LAYER": exc.UnknownLayer,
    "UNKNOWN_SITE": exc.UnknownSite,
    "UNKNOWN_OPERATION": exc.UnknownOperation,
    "UNKNOWN_MODEL": exc.UnknownModel,
    "EMPTY_PROMPT": exc.EmptyPrompt,
    "PROMPT_TOO_LONG": exc.PromptTooLong,
    "DIGEST_MISMATCH": exc.BadVector,
    "WRONG_LENGTH": exc.BadVector,
    "WRONG_DTYPE": exc.BadVector,
    "BAD_VALUES": exc.BadVector,
    "MISSING_VECTORS": exc.MissingVectors,
    "REQUEST_EXISTS": exc.RequestExists,
    "UNKNOWN_REQUEST": exc.UnknownRequest,
    "UNKNOWN_CAPTURE": exc.UnknownCapture,
    "CAPTURE_EXISTS": exc.CaptureExists,
    "CAPTURE_ENDED": exc.CaptureEnded,
    "STORE_UNREACHABLE": exc.StoreUnreachable,
    "CHECKSUM_MISMATCH": exc.DamagedCapture,
    "STORE_FULL": exc.StoreFull,
    "LIMIT_REACHED": exc.LimitReached,
    "NOT_SERVING": exc.NotServing,
    "ENGINE_DEAD": exc.EngineDead,
    "ABORTED": exc.RequestAborted,
    "INTERNAL": exc.ServerFault,
    "NOT_UPDATABLE": exc.NotUpdatable,
    "UNAUTHENTICATED": exc.Unauthenticated,
    "PERMISSION_DENIED": exc.PermissionDenied,
    "QUOTA_EXCEEDED": exc.QuotaExceeded,
    "CALLER_STALLED": exc.CallerStalled,
    "MISSING_SAE": exc.MissingSAE,
    "UNKNOWN_MEMORY": exc.ServerFault,  # only writers get it
    "ARCHIVE_UNREACHABLE": exc.ArchiveUnreachable,
}
"""The exception of every reason in errors.proto."""


def from_item_error(error: errors_pb2.ItemError, **metadata: str) -> exc.ResiduumError:
    """Return the exception for one failed item of a call that handles many.

    Args:
        error: The item's error.
        metadata: What the caller knows of the item. It replaces the server's values.
    """
    name = _reason_name(error.reason)
    return EXCEPTIONS.get(name, exc.InvalidRequest)(error.message, reason=name, metadata={**error.metadata, **metadata})


def _reason_name(reason: errors_pb2.ErrorReason.ValueType) -> str:
    if reason not in errors_pb2.ErrorReason.values():
        return ""  # the reason of a newer server
    return errors_pb2.ErrorReason.Name(reason).removeprefix(_PREFIX)
