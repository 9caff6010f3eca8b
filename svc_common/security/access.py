"""Access control: one table with the right that each method of both services requires, and the current caller."""

from __future__ import annotations

import contextvars
import datetime
from collections.abc import Collection, Iterable
from pathlib import Path

from google.protobuf import descriptor_pool

from residuum.rpc.bearer import HEADER, SCHEME
from residuum.rpc.errors import Failure, Reason
from svc_common.security.tokens_file import ANYBODY, Caller, Limits, Right, TokenFile

_INFERENCE = "/residuum.v1.InferenceService/"
_STORE = "/residuum.v1.StoreService/"

RIGHTS: dict[str, Right | None] = {
    _INFERENCE + "GetModelInfo": None,
    _INFERENCE + "RegisterRequest": Right.GENERATE,
    _INFERENCE + "FindMissingVectors": Right.GENERATE,
    _INFERENCE + "PutVectors": Right.GENERATE,
    _INFERENCE + "PutSAE": Right.GENERATE,
    _INFERENCE + "Generate": Right.GENERATE,
    _INFERENCE + "UpdateSteering": Right.GENERATE,
    _INFERENCE + "Abort": Right.GENERATE,
    _INFERENCE + "Unembed": Right.GENERATE,
    _STORE + "OpenCapture": Right.WRITE,
    _STORE + "OpenCaptures": Right.WRITE,
    _STORE + "AppendChunks": Right.WRITE,
    _STORE + "SealCapture": Right.WRITE,
    _STORE + "SealCaptures": Right.WRITE,
    _STORE + "RenewLease": Right.WRITE,
    _STORE + "GetCapture": Right.READ,
    _STORE + "ListCaptures": Right.READ,
    _STORE + "ReadChunks": Right.READ,
    _STORE + "ReadCaptures": Right.READ,
    _STORE + "Search": Right.READ,
    # Callers that create captures may delete them; callers that only read them may not.
    _STORE + "DeleteCapture": Right.GENERATE,
    _STORE + "DeleteCaptures": Right.GENERATE,
    # For the same reason they may label them: they can set labels at registration, so they may also change them later.
    _STORE + "LabelCapture": Right.GENERATE,
    # Returns the caller's own tenant's statistics; admins get those of the whole store.
    _STORE + "GetStats": None,
    # Says nothing of any capture. The key of a memory, not the path of the socket, gives access to it.
    _STORE + "DescribeStore": None,
    # The schema is not secret, but only callers with a token may see it.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
}
"""The right that each method requires; None if any token suffices."""

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List", "/grpc.health.v1.Health/Watch"})
"""Methods that require no token: health checkers have none, and learn only whether the service is serving."""

_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("residuum_caller")


def current_caller() -> Caller:
    """Return the caller of the current call. Use it at the start of a handler, in the handler's thread or task.

    Raises:
        LookupError: The server lacks the interceptor of `svc_common.security.authentication`.
    """
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Set the caller of the call that is about to be handled in this thread or task.

    It is never reset: each call sets it before its handler runs. A reset would be a hazard: Python may close one call's
    generator in the middle of another call.
    """
    _caller.set(caller)


class Access:
    """Identifies the caller of each call and decides whether it may make the call."""

    def __init__(self, tokens: Path | None, services: Iterable[str]) -> None:
        """Read the tokens file.

        Args:
            tokens: The tokens file, see `svc_common.security.tokens_file`; None lets anyone call.
            services: The full names of the served services.

        Raises:
            TokensError: The file cannot be used.
            RuntimeError: A method of these services is missing from `RIGHTS`.
        """
        check_table(services, RIGHTS.keys() | OPEN)
        self._tokens = TokenFile(tokens) if tokens else None

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Return the caller of a call, after checking that it may make the call.

        Args:
            method: The method's full name, such as "/residuum.v1.StoreService/GetStats".
            metadata: The call's metadata.

        Raises:
            Failure: UNAUTHENTICATED without a valid token; PERMISSION_DENIED if the token lacks the right.
        """
        if self._tokens is None or method in OPEN:
            return ANYBODY
        caller = self._authenticate(self._tokens, metadata)
        if method not in RIGHTS or not caller.may(RIGHTS[method]):
            raise _denied(method, caller)
        return caller

    def limits_of(self, tenant: str) -> Limits:
        """Return a tenant's limits."""
        return self._tokens.table().limits_of(tenant) if self._tokens else Limits()

    def _authenticate(self, tokens: TokenFile, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        values = [value for key, value in metadata if key == HEADER]
        if not values:
            raise _unauthenticated(
                "This service requires a token. Pass yours to the client: token=..., RESIDUUM_TOKEN or --token-file."
            )
        value = values[0] if isinstance(values[0], str) else ""
        found = tokens.table().find(value.removeprefix(SCHEME)) if value.startswith(SCHEME) else None
        if len(values) > 1 or found is None:
            raise _unauthenticated(
                "This service does not know the token. Check that it is complete, is for this service, and is still in "
                "the service's tokens file."
            )
        caller, expires = found
        if expires is not None and expires <= datetime.datetime.now(datetime.timezone.utc):
            raise _unauthenticated(f"The token expired at {expires.isoformat()}. Ask the operator for a new one.")
        return caller


def check_table(services: Iterable[str], table: Collection[str]) -> None:
    """Check that every method of these services is in the table.

    Raises:
        RuntimeError: A method is missing.
    """
    for service in services:
        descriptor = descriptor_pool.Default().FindServiceByName(service)
        for method in descriptor.methods:
            name = f"/{service}/{method.name}"
            if name not in table:
                raise RuntimeError(f"{name} has no required right: add it to the table in svc_common.security.access")


def _unauthenticated(message: str) -> Failure:
    return Failure(Reason.ERROR_REASON_UNAUTHENTICATED, message)


def _denied(method: str, caller: Caller) -> Failure:
    right = RIGHTS.get(method)
    wanted = right.value if right else "none"
    name = method.rpartition("/")[2]
    rights = ", ".join(sorted(item.value for item in caller.rights))
    message = f"{name} requires the right {wanted!r}, but the token has: {rights}. Use a token with that right."
    return Failure(Reason.ERROR_REASON_PERMISSION_DENIED, message, right=wanted, method=name)
