# ruff: noqa: N818 - the names say what happened, as in httpx; every one of them is a ResiduumError
"""What can go wrong, as exceptions. Each says in its message what to do, and carries the facts as attributes.

    ResiduumError                       reason, metadata, request_id, capture_id
    ├── InvalidRequest (ValueError)     the request cannot be meant so; nothing was done
    │   ├── UnknownLayer
    │   ├── UnknownSite
    │   ├── UnknownOperation
    │   ├── UnknownModel
    │   ├── EmptyPrompt
    │   ├── PromptTooLong
    │   ├── BadCredentials              a token or a TLS file cannot be used, or not with this endpoint
    │   └── BadVector                   NaN, wrong length, wrong dtype, wrong digest
    ├── NotFound (LookupError)
    │   ├── UnknownRequest              never registered, used up, or lapsed
    │   └── UnknownCapture
    ├── AlreadyExists
    │   ├── RequestExists               the id is taken
    │   └── CaptureExists
    ├── MissingVectors                  the server lacks vectors, even after they were sent again
    ├── NotUpdatable                    the request was not started with updatable=True
    ├── CaptureNotComplete              .manifest
    │   ├── OpenCapture                 rows are still coming
    │   ├── IncompleteCapture           rows are missing for good; .missing says which
    │   └── AbortedCapture              the request was stopped
    ├── CaptureEnded                    the capture takes no more
    ├── DamagedCapture                  rows do not match their checksum, or the store's word
    ├── NoStore                         the server captures nothing
    ├── ResourceExhausted
    │   ├── StoreFull
    │   ├── LimitReached
    │   └── QuotaExceeded               your tenant has as much as it may have
    ├── Unauthenticated                 the service asks for a token, or does not know this one, or it has expired
    ├── PermissionDenied                the token does not have the right; .right
    ├── Unavailable                     try again later
    │   ├── Unreachable (ConnectionError)   nothing answers at the endpoint; .endpoint
    │   ├── StoreUnreachable            the inference service cannot reach its store
    │   ├── NotServing                  loading or stopping
    │   └── EngineDead
    ├── DeadlineExceeded (TimeoutError)
    ├── RequestAborted                  somebody called abort
    ├── CallerStalled                   the stream was not read for too long, and the service ended it
    ├── BatchFailed                     some prompts of generate_many; .replies, .errors
    ├── ClientClosed
    └── ServerFault                     a fault of the server, or an answer that breaks the contract

    EmptyCaptureWarning (UserWarning)   activations with 0 positions: not an error, but hardly meant
    SilentStoreWarning (UserWarning)    with allow_partial=True: a store could not be asked, and was left out

A failure of a reason that this version does not know is mapped by its gRPC code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residuum.values.manifest import Manifest, RowSet
    from residuum.values.replies import Reply


class ResiduumError(Exception):
    """The root of all exceptions of this package.

    Attributes:
        reason: The cause in the contract's words, such as "UNKNOWN_LAYER"; empty if there is none.
        metadata: Whatever in the message is dynamic, for programs.
    """

    def __init__(self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = dict(metadata or {})

    def __reduce__(self) -> tuple[Callable[..., ResiduumError], tuple[object, ...]]:
        # BaseException would call the class with the message alone, and some of these need more to be made.
        return _unpickled, (type(self), self.args, self.__dict__.copy())

    @property
    def request_id(self) -> str | None:
        """The request that failed, if it is known; it is also the name of its capture."""
        return self.metadata.get("request_id") or self.metadata.get("capture_id")

    @property
    def capture_id(self) -> str | None:
        """The capture that is concerned, if it is known."""
        return self.metadata.get("capture_id") or self.metadata.get("request_id")


def _unpickled(kind: type[ResiduumError], arguments: tuple[object, ...], facts: dict[str, object]) -> ResiduumError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(facts)
    return error


class InvalidRequest(ResiduumError, ValueError):
    """The request cannot be meant so. Found here or by the server; nothing was done."""


class UnknownLayer(InvalidRequest):
    """The model, or the capture, has no such layer."""


class UnknownSite(InvalidRequest):
    """There is no such capture site, or the server was not started with it."""


class UnknownOperation(InvalidRequest):
    """The server knows no such steering operation."""


class UnknownModel(InvalidRequest):
    """The server serves another model than the one that was named."""


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""


class PromptTooLong(InvalidRequest):
    """Prompt and tokens to generate do not fit the model's context."""


class BadVector(InvalidRequest):
    """A steering vector cannot be used: NaN, an infinity, zero, a wrong length, dtype or digest."""

    @property
    def digest(self) -> str | None:
        """The digest of the vector, hexadecimal, if the server named it."""
        return self.metadata.get("digest")


class BadCredentials(InvalidRequest):
    """A token or a file of TLS cannot be used, or not with this endpoint. Nothing was sent."""


class NotFound(ResiduumError, LookupError):
    """The server knows nothing of this name."""


class UnknownRequest(NotFound):
    """There is no such request or registration: it never was, was used up, or has lapsed."""


class UnknownCapture(NotFound):
    """The store holds no such capture."""


class AlreadyExists(ResiduumError):
    """The name is taken."""


class RequestExists(AlreadyExists):
    """The request id is taken by another spec, or was used before."""


class CaptureExists(AlreadyExists):
    """The store holds another capture of this id."""


class NotUpdatable(ResiduumError):
    """The steering of the request cannot be changed: it was not started with `updatable=True`."""


class MissingVectors(ResiduumError):
    """The server lacks vectors that the request names."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests that the server named, hexadecimal; at most 64 of them."""
        return tuple(part for part in self.metadata.get("digests", "").split(",") if part)


class CaptureNotComplete(ResiduumError):
    """Rows that were asked for are not there. No capture is handed out as if it were whole.

    Attributes:
        manifest: What is known of the capture.
    """

    def __init__(self, message: str, manifest: Manifest, *, reason: str = "") -> None:
        super().__init__(message, reason=reason, metadata={"capture_id": manifest.capture_id})
        self.manifest = manifest

    @property
    def missing(self) -> tuple[RowSet, ...]:
        """The rows that are missing, as far as the store knows."""
        return self.manifest.missing


class OpenCapture(CaptureNotComplete):
    """The capture is still being written."""


class IncompleteCapture(CaptureNotComplete):
    """Rows are missing and will not come; the manifest says which and why."""


class AbortedCapture(CaptureNotComplete):
    """The request was stopped before it ended by itself."""


class CaptureEnded(ResiduumError):
    """The capture has ended and takes no more of this."""


class DamagedCapture(ResiduumError):
    """Rows do not match their checksum, or are not there although the store says so."""


class NoStore(ResiduumError):
    """The inference service names no store, so there are no captures to read."""


class ResourceExhausted(ResiduumError):
    """A limit of the server is reached."""


class StoreFull(ResourceExhausted):
    """The store has no room."""


class LimitReached(ResourceExhausted):
    """A limit of the server is reached; try again later."""


class QuotaExceeded(ResourceExhausted):
    """The tenant of the token has as much as it may have: delete captures, wait for running ones, or ask for more."""


class Unauthenticated(ResiduumError):
    """The service asks for a token, does not know this one, or it has expired."""


class PermissionDenied(ResiduumError):
    """The token does not have the right that this call takes."""

    @property
    def right(self) -> str | None:
        """The right that is missing: "generate", "read", "write" or "admin"."""
        return self.metadata.get("right")


class Unavailable(ResiduumError):
    """The service does not serve at the moment; try again."""


class Unreachable(Unavailable, ConnectionError):
    """Nothing answers at the endpoint, or the connection broke.

    Attributes:
        endpoint: Where it was tried, host:port.
    """

    def __init__(self, message: str, *, endpoint: str) -> None:
        super().__init__(message, reason="", metadata={"endpoint": endpoint})
        self.endpoint = endpoint


class StoreUnreachable(Unavailable):
    """A capture was asked for and the inference service cannot reach its store."""


class NotServing(Unavailable):
    """The server is loading or stopping."""


class EngineDead(Unavailable):
    """The engine has died; the process is about to end."""


class DeadlineExceeded(ResiduumError, TimeoutError):
    """The answer did not come in time."""


class RequestAborted(ResiduumError):
    """The request was stopped by an abort."""


class CallerStalled(ResiduumError):
    """Nothing of the stream was read for longer than the service waits (--stall-seconds): it ended the request."""


class BatchFailed(ResiduumError):
    """Some prompts of a batch failed; the others went on.

    Attributes:
        replies: One entry for each prompt, in order; None where it failed.
        errors: The exception of each prompt that failed, by its index.
    """

    def __init__(self, replies: Sequence[Reply | None], errors: Mapping[int, ResiduumError]) -> None:
        index, first = next(iter(sorted(errors.items())))
        super().__init__(
            f"{len(errors)} of {len(replies)} prompts failed; the first is number {index}: {first} "
            "The replies of the others are in .replies of this exception, its causes in .errors.",
            reason=first.reason,
            metadata=first.metadata,
        )
        self.replies = list(replies)
        self.errors = dict(errors)


class ClientClosed(ResiduumError, RuntimeError):
    """The client was closed; make another."""


class ServerFault(ResiduumError):
    """A fault of the server, or an answer that breaks the contract."""


class EmptyCaptureWarning(UserWarning):
    """Activations come back with 0 positions: none of the request's positions is among those asked for."""


class SilentStoreWarning(UserWarning):
    """A store could not be asked, and the answer is without what it has."""
