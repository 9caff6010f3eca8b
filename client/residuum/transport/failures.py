"""Maps gRPC's errors to this package's exceptions, by the contract's reason or else by the gRPC code."""

from __future__ import annotations

import re

import grpc
import grpc.aio

from residuum import exceptions as exc
from residuum.protocol.failures import EXCEPTIONS
from residuum.protocol.generation.events import ReplyBuilder
from residuum.rpc.errors import failure_from_rpc_error, with_site_names

_BY_CODE: dict[grpc.StatusCode, type[exc.ResiduumError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: exc.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: exc.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: exc.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: exc.AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: exc.ResourceExhausted,
    grpc.StatusCode.DATA_LOSS: exc.DamagedCapture,
    grpc.StatusCode.CANCELLED: exc.RequestAborted,
    grpc.StatusCode.UNAUTHENTICATED: exc.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: exc.PermissionDenied,
}
"""The exception for a failure whose reason is unknown or absent. Any other code is a ServerFault."""

_TLS_FAILURES = {
    "certificate has expired": "The certificate of {endpoint} has expired. The service's operator must renew it.",
    "certificate is not yet valid": (
        "The certificate of {endpoint} is not valid yet. Check the clocks of both machines."
    ),
    "Hostname Verification Check failed": (
        "The certificate of {endpoint} is for another name. Use the name in the certificate as the endpoint's host, or "
        "give that name: TLS(..., server_name='NAME')."
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "No CA that this client trusts has signed the certificate of {endpoint} ({cause}). If this is the right "
        "service, name its CA: tls=TLS(ca='ca.pem')."
    ),
    "WRONG_VERSION_NUMBER": (
        "{endpoint} does not speak TLS. Connect without (tls=False), or start the service with --tls-cert and "
        "--tls-key."
    ),
    "Getting metadata from plugin failed": (
        "There is no token for {endpoint}, because its file cannot be read any more. Restore the file."
    ),
}
"""Texts in gRPC's errors when a connection cannot be secured, the most specific first, and our messages for them."""

_CLOSED_WORDS = ("Socket closed", "Connection reset", "Broken pipe")
_CLOSED = (
    " It accepts connections and closes them. It may require TLS (tls=TLS(ca='ca.pem')), or a client certificate that "
    "it trusts (TLS(..., cert='client.pem', key='client.key'))."
)


_NO_ANSWER = (
    "Nothing answers at {endpoint}, or the connection broke ({details}). Check that the service is running there, and "
    "that its port is reachable from here.{hint} `residuum doctor` checks each step."
)
_WENT_AWAY = (
    "The service at {endpoint} has answered before, but does not answer now ({details}): it was stopped or crashed, or "
    "the network failed. Its log may say why. Try again when it is running. `residuum doctor` checks each step."
)
_LOST_REPLY = (
    "The service at {endpoint} went away during the reply ({details}): it was stopped or crashed, or the network "
    "failed. The request has ended. Its capture, if any, keeps the rows that the store has. The service's log may say "
    "why. Try again when the service is running. `residuum doctor` checks each step."
)


def from_rpc_error(
    error: grpc.RpcError, endpoint: str, *, has_answered: bool = False, **facts: str
) -> exc.ResiduumError:
    """Return the exception for a failed call.

    Args:
        error: The error of a sync or an asyncio channel.
        endpoint: The endpoint of the call.
        has_answered: Whether the endpoint has answered before. If so, the connection's settings are right.
        facts: Further metadata for the exception, such as the request_id. The server's metadata takes precedence.
    """
    failure = _from_rpc_error(error, endpoint, _WENT_AWAY if has_answered else _NO_ANSWER)
    failure.metadata = {**facts, **failure.metadata}
    return failure


def from_generation_error(
    error: grpc.RpcError, endpoint: str, builder: ReplyBuilder, *, has_answered: bool = False
) -> exc.ResiduumError:
    """Return the exception for a failed generation. `builder` has the events that arrived."""
    failure = from_rpc_error(error, endpoint, has_answered=has_answered, **_facts(builder))
    if builder.is_started and isinstance(failure, exc.Unreachable):
        details = _cause(error.details() or "")
        lost = exc.Unreachable(_LOST_REPLY.format(endpoint=endpoint, details=details), endpoint=endpoint)
        lost.metadata = failure.metadata
        return lost
    if isinstance(failure, exc.RequestAborted) and not failure.reason:
        return stream_closed(builder)
    return failure


_LOST_ANSWER = "Internal error from Core"
"""What grpc.aio reports, in place of the answer, if the service ends a call that still sends."""

_UNKNOWN_CALL = grpc.StatusCode.UNIMPLEMENTED.name


def is_unknown_call(failure: exc.ResiduumError) -> bool:
    """Tell whether a call failed because the service does not offer it."""
    return isinstance(failure, exc.ServerFault) and failure.metadata.get("code") == _UNKNOWN_CALL


def stream_closed(builder: ReplyBuilder) -> exc.RequestAborted:
    """Return the exception for reading a stream after it was closed early."""
    return exc.RequestAborted(
        "The stream was closed before its end, which stopped the request.", metadata=_facts(builder)
    )


def _facts(builder: ReplyBuilder) -> dict[str, str]:
    return {"request_id": builder.request_id} if builder.is_started else {}


def _from_rpc_error(error: grpc.RpcError, endpoint: str, unreachable: str) -> exc.ResiduumError:
    failure = failure_from_rpc_error(error)
    if failure is not None and failure.reason_name in EXCEPTIONS:
        # WRONG_LENGTH is about a vector, or about an encoder, which it then names.
        kind = exc.BadSAE if "encoder" in failure.metadata else EXCEPTIONS[failure.reason_name]
        return kind(_in_python(failure.message), reason=failure.reason_name, metadata=failure.metadata)
    return _from_code(error.code(), error.details() or "", endpoint, unreachable)


def _in_python(message: str) -> str:
    """Return a server's message with this package's names: resid_post for SITE_RESID_POST, if_exists='replace'."""
    return with_site_names(message.replace("Set if_exists to REPLACE", "Set if_exists='replace'"))


def _unreachable(details: str, endpoint: str, unreachable: str) -> exc.Unreachable:
    """Return the exception for a connection that failed. gRPC reports the cause only in its text."""
    for words, message in _TLS_FAILURES.items():
        if words in details:
            cause = details.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2]
            return exc.Unreachable(message.format(endpoint=endpoint, cause=cause), endpoint=endpoint, is_refusal=True)
    hint = _CLOSED if any(words in details for words in _CLOSED_WORDS) else ""
    return exc.Unreachable(unreachable.format(endpoint=endpoint, details=_cause(details), hint=hint), endpoint=endpoint)


_CAUSE = re.compile(
    r"failed to connect to all addresses; last error: \w+: \S+: (?:Failed to connect to remote host: )?(?P<host>.+)"
    r"|errors resolving \S+: \[field:hostname lookup error:address lookup failed for \S+: (?P<name>.+)\]"
)
"""gRPC's texts about a host that does not accept a connection, and about a name without an address."""


def _cause(details: str) -> str:
    """Return gRPC's text about a failed connection with the cause alone, such as "Connection refused"."""
    match = _CAUSE.fullmatch(details)
    return (match["host"] or match["name"]) if match else details


def _from_code(code: grpc.StatusCode, details: str, endpoint: str, unreachable: str) -> exc.ResiduumError:
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unreachable(details, endpoint, unreachable)
    metadata = {"endpoint": endpoint}
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return exc.DeadlineExceeded(
            f"{endpoint} did not answer in time. Give a longer timeout, or none with timeout=None. If no service runs "
            "there, no timeout is long enough: check with `residuum doctor`.",
            metadata=metadata,
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return exc.ServerFault(
            f"{endpoint} does not offer this call ({details}). Check that it is the right service, and not an older "
            "version.",
            metadata={**metadata, "code": _UNKNOWN_CALL},
        )
    if code is grpc.StatusCode.INTERNAL and details == _LOST_ANSWER:
        return exc.ServerFault(
            f"{endpoint} ended the call while the client was sending, and gRPC lost its answer. The service's log has "
            "it. Try once more.",
            metadata=metadata,
        )
    kind = _BY_CODE.get(code, exc.ServerFault)
    return kind(f"{endpoint} answered {code.name}: {details}", metadata=metadata)
