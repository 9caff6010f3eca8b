"""Who may make which call: one table for every method of both services, and the caller of the call that runs."""

from __future__ import annotations

import contextvars
import datetime
from collections.abc import Collection, Iterable
from pathlib import Path

from google.protobuf import descriptor_pool

from residuum.rpc.bearer import HEADER, SCHEME
from residuum.rpc.errors import Failure, Reason
from svc_common.tokens_file import ANYBODY, Caller, Limits, Right, TokenFile

_INFERENCE = "/residuum.v1.InferenceService/"
_STORE = "/residuum.v1.StoreService/"

RIGHTS: dict[str, Right | None] = {
    _INFERENCE + "GetModelInfo": None,
    _INFERENCE + "RegisterRequest": Right.GENERATE,
    _INFERENCE + "FindMissingVectors": Right.GENERATE,
    _INFERENCE + "PutVectors": Right.GENERATE,
    _INFERENCE + "Generate": Right.GENERATE,
    _INFERENCE + "UpdateSteering": Right.GENERATE,
    _INFERENCE + "Abort": Right.GENERATE,
    _STORE + "OpenCapture": Right.WRITE,
    _STORE + "AppendChunks": Right.WRITE,
    _STORE + "SealCapture": Right.WRITE,
    _STORE + "GetCapture": Right.READ,
    _STORE + "ListCaptures": Right.READ,
    _STORE + "ReadChunks": Right.READ,
    # Who may have captures made may have them deleted; who may only look at them may not.
    _STORE + "DeleteCapture": Right.GENERATE,
    # Tells callers of their own tenant, and admins of the whole store.
    _STORE + "GetStats": None,
    # The schema is no secret, but nobody's business who may not call at all.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
}
"""The right that each method takes; None: any token will do."""

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List", "/grpc.health.v1.Health/Watch"})
"""Methods that take no token: whoever watches over a service has none, and learns only whether it serves."""

_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("residuum_caller")


def current_caller() -> Caller:
    """Return who makes the call that is being handled. Ask at the start of the handler, in its own thread or task.

    Raises:
        LookupError: The server does not ask who calls: it lacks the interceptor of `svc_common.authentication`.
    """
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Say who makes the call that is about to be handled, in this thread or task.

    It is never taken back: each call says it anew before its handler runs. Taking it back would be a risk, since a
    generator that is a call may be closed in the middle of another one.
    """
    _caller.set(caller)


class Access:
    """Decides of each call whether it may be made, and by whom it is."""

    def __init__(self, tokens: Path | None, services: Iterable[str]) -> None:
        """Let those call who have a token of a file; None: anybody.

        Args:
            tokens: The tokens file; see `svc_common.tokens_file`.
            services: The full names of the services that are served.

        Raises:
            TokensError: The file cannot be used.
            RuntimeError: A method of these services is not in the table: nobody has decided who may call it.
        """
        check_table(services, RIGHTS.keys() | OPEN)
        self._tokens = TokenFile(tokens) if tokens else None

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Return who makes a call.

        Args:
            method: The method's full name, such as "/residuum.v1.StoreService/GetStats".
            metadata: What came with the call.

        Raises:
            Failure: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        if self._tokens is None or method in OPEN:
            return ANYBODY
        caller = self._authenticate(self._tokens, metadata)
        if method not in RIGHTS or not caller.may(RIGHTS[method]):
            raise _denied(method, caller)
        return caller

    def limits_of(self, tenant: str) -> Limits:
        """Return what a tenant may have."""
        return self._tokens.table().limits_of(tenant) if self._tokens else Limits()

    def _authenticate(self, tokens: TokenFile, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        values = [value for key, value in metadata if key == HEADER]
        if not values:
            raise _unauthenticated(
                "This service asks for a token. Give yours to the client: token=..., RESIDUUM_TOKEN or --token-file."
            )
        value = values[0] if isinstance(values[0], str) else ""
        found = tokens.table().find(value.removeprefix(SCHEME)) if value.startswith(SCHEME) else None
        if len(values) > 1 or found is None:
            raise _unauthenticated(
                "The token is not one that this service knows. Is it whole, for this service, and still in its file?"
            )
        caller, expires = found
        if expires is not None and expires <= datetime.datetime.now(datetime.timezone.utc):
            raise _unauthenticated(f"The token has expired ({expires.isoformat()}); ask for a new one.")
        return caller


def check_table(services: Iterable[str], table: Collection[str]) -> None:
    """Make sure that every method of some services is in a table.

    Raises:
        RuntimeError: One is not.
    """
    for service in services:
        descriptor = descriptor_pool.Default().FindServiceByName(service)
        for method in descriptor.methods:
            name = f"/{service}/{method.name}"
            if name not in table:
                raise RuntimeError(f"nobody has decided who may call {name}: it is not in svc_common.access")


def _unauthenticated(message: str) -> Failure:
    return Failure(Reason.ERROR_REASON_UNAUTHENTICATED, message)


def _denied(method: str, caller: Caller) -> Failure:
    right = RIGHTS.get(method)
    wanted = right.value if right else "none"
    name = method.rpartition("/")[2]
    rights = ", ".join(sorted(item.value for item in caller.rights))
    message = f"{name} takes the right {wanted!r}; the token has: {rights}."
    return Failure(Reason.ERROR_REASON_PERMISSION_DENIED, message, right=wanted, method=name)
