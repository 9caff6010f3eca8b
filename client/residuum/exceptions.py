# ruff: noqa: N818 - the names say what happened, as in httpx; all of them are ResiduumErrors
"""The exceptions of this package. Each message says what to do, and attributes hold the facts.

    ResiduumError                       reason, metadata, request_id, capture_id
    ├── InvalidRequest (ValueError)     the request is invalid; nothing was done
    │   ├── UnknownLayer
    │   ├── UnknownSite
    │   ├── UnknownOperation
    │   ├── UnknownModel
    │   ├── EmptyPrompt
    │   ├── PromptTooLong
    │   ├── BadCredentials              a token or TLS file cannot be used, or not with this endpoint
    │   ├── BadVector                   NaN, wrong length, wrong dtype, wrong digest
    │   └── BadSAE                      a sparse autoencoder cannot be used, or has no such feature
    ├── NotFound (LookupError)
    │   ├── UnknownRequest              never registered, already used, or expired
    │   └── UnknownCapture
    ├── AlreadyExists
    │   ├── RequestExists               the ID is taken
    │   └── CaptureExists
    ├── MissingVectors                  the server lacks vectors, even after sending them again
    ├── MissingSAE                      the server lacks a sparse autoencoder, even after sending it again
    ├── NotUpdatable                    the request was not started with updatable=True
    ├── CaptureNotComplete              .manifest
    │   ├── OpenCapture                 rows are still coming
    │   ├── IncompleteCapture           rows are missing and will not arrive; .missing says which
    │   │   └── StoreFullCapture        because the store was full; also a StoreFull
    │   └── AbortedCapture              the request was aborted
    ├── CaptureEnded                    the capture accepts no more rows
    ├── DamagedCapture                  rows do not match their checksum, or differ from the manifest
    ├── NoTokenTexts                    the texts of the tokens are not known
    ├── NoMessageSpans                  the prompt is not a conversation, or the positions of its messages are not known
    ├── NoStore                         the server has no store, so it captures nothing
    ├── ResourceExhausted
    │   ├── StoreFull
    │   ├── LimitReached
    │   └── QuotaExceeded               your tenant has reached its limit
    ├── Unauthenticated                 the service requires a token, does not know this one, or it has expired
    ├── PermissionDenied                the token lacks the right; .right
    ├── Unavailable                     try again later
    │   ├── Unreachable (ConnectionError)   nothing answers at the endpoint; .endpoint
    │   ├── StoreUnreachable            the inference service cannot reach its store
    │   ├── NotServing                  loading or stopping
    │   ├── ArchiveUnreachable          the rows are only in an archive, which does not answer
    │   └── EngineDead
    ├── DeadlineExceeded (TimeoutError)
    ├── RequestAborted                  a client called abort
    ├── CallerStalled                   the stream was not read for too long, and the service ended it
    ├── BatchFailed                     some prompts of generate_many failed; .replies, .errors
    ├── ExtractStopped                  a prompt of an extraction failed; .done
    ├── ClientClosed
    └── ServerFault                     a bug of the server, or an answer that breaks the contract

    BatchInterrupted (KeyboardInterrupt)        Ctrl-C in generate_many; .replies, .errors
    BatchCancelled                              the cause of the CancelledError, if its task is cancelled

    EmptyCaptureWarning (UserWarning)   a result without rows: no error, but probably unintended
    OutageWarning (UserWarning)         a batch waits for a service, or one of `residuum.serve` has ended
    LeftOutWarning (UserWarning)        captures that match a filter are not complete, and were left out
    SilentStoreWarning (UserWarning)    with allow_partial=True: a store did not answer and was left out

A failure whose reason this version does not know is mapped by its gRPC code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from residuum.values.captures.manifest import Manifest
    from residuum.values.captures.manifest_records import RowSet
    from residuum.values.replies.generation import Reply

_Error = TypeVar("_Error", bound=BaseException)


class ResiduumError(Exception):
    """The base class of all exceptions of this package.

    Attributes:
        reason: The contract's reason, such as "UNKNOWN_LAYER"; empty if there is none.
        metadata: The message's variable parts, for programs.
    """

    def __init__(self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = dict(metadata or {})

    def __reduce__(self) -> tuple[Callable[..., ResiduumError], tuple[object, ...]]:
        # BaseException would call the class with only the message, but some constructors take more arguments.
        return unpickled, (type(self), self.args, self.__dict__.copy())

    @property
    def request_id(self) -> str | None:
        """The ID of the failed request, if known. Its capture has the same ID."""
        return self.metadata.get("request_id") or self.metadata.get("capture_id")

    @property
    def capture_id(self) -> str | None:
        """The ID of the capture, if known."""
        return self.metadata.get("capture_id") or self.metadata.get("request_id")


def unpickled(kind: type[_Error], arguments: tuple[object, ...], facts: dict[str, object]) -> _Error:
    """Return the exception of a pickle, without calling its class."""
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(facts)
    return error


class InvalidRequest(ResiduumError, ValueError):
    """The request is invalid. The client or the server found it, and nothing was done."""


class UnknownLayer(InvalidRequest):
    """The model or the capture does not have this layer."""


class UnknownSite(InvalidRequest):
    """The capture site does not exist, or the server was not started with it."""


class UnknownOperation(InvalidRequest):
    """The server does not know this steering operation."""


class UnknownModel(InvalidRequest):
    """The server has no model or LoRA adapter of the name in the request."""


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""


class PromptTooLong(InvalidRequest):
    """The prompt and the tokens to generate do not fit into the model's context."""


class BadVector(InvalidRequest):
    """A steering vector cannot be used: it is zero or not finite, or its length, dtype or digest is wrong."""

    @property
    def digest(self) -> str | None:
        """The vector's digest in hexadecimal, if the server named it."""
        return self.metadata.get("digest")


class BadSAE(InvalidRequest):
    """A sparse autoencoder cannot be used, or does not have the feature that was named."""


class BadCredentials(InvalidRequest):
    """A token or a TLS file cannot be used, or not with this endpoint. Nothing was sent."""


class NotFound(ResiduumError, LookupError):
    """The server does not have what the request names."""


class UnknownRequest(NotFound):
    """The request or registration does not exist: it was never made, was already used, or has expired."""


class UnknownCapture(NotFound):
    """The store does not hold this capture."""


class AlreadyExists(ResiduumError):
    """The ID is taken."""


class RequestExists(AlreadyExists):
    """The request ID is registered with another spec, or its request is running."""


class CaptureExists(AlreadyExists):
    """The store holds a capture with this ID. To replace or skip it, use `if_exists` of `Client.generate`."""


class NotUpdatable(ResiduumError):
    """The request's steering cannot be changed: it was not started with `updatable=True`."""


class MissingSAE(ResiduumError):
    """The server lacks the sparse autoencoder that the capture names."""

    @property
    def digest(self) -> str | None:
        """The encoder's digest in hexadecimal, if the server named it."""
        return self.metadata.get("digest")


class MissingVectors(ResiduumError):
    """The server lacks vectors that the request names."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests that the server named, in hexadecimal; at most 64."""
        return tuple(part for part in self.metadata.get("digests", "").split(",") if part)


class CaptureNotComplete(ResiduumError):
    """Requested rows are missing. The client never returns a partial capture unless the caller allows it.

    Attributes:
        manifest: The capture's manifest, which says what is missing and why.
    """

    def __init__(self, message: str, manifest: Manifest, *, reason: str = "") -> None:
        super().__init__(message, reason=reason, metadata={"capture_id": manifest.capture_id})
        self.manifest = manifest

    @property
    def missing(self) -> tuple[RowSet, ...]:
        """The missing rows, as far as the store knows."""
        return self.manifest.missing


class OpenCapture(CaptureNotComplete):
    """The capture is still being written."""


class IncompleteCapture(CaptureNotComplete):
    """Rows are missing and will not arrive; the manifest says which and why."""


class AbortedCapture(CaptureNotComplete):
    """The request was aborted before it finished."""


class CaptureEnded(ResiduumError):
    """The capture has ended and accepts no more rows."""


class DamagedCapture(ResiduumError):
    """Rows do not match their checksum, or rows that the manifest lists are missing."""


class NoTokenTexts(ResiduumError):
    """The texts of the tokens are not known. The message says why. The token IDs are."""


class NoMessageSpans(ResiduumError):
    """The prompt is not a conversation, or the positions of its messages are not known. The message says why."""


class NoStore(ResiduumError):
    """The inference service has no store, so there are no captures to read."""


class ResourceExhausted(ResiduumError):
    """A limit of the server is reached."""


class StoreFull(ResourceExhausted):
    """The store is full: its disk, or the database's limit. Delete captures, or give the store more room."""


class StoreFullCapture(IncompleteCapture, StoreFull):
    """Rows are missing and will not arrive, because the store was full for longer than --full-timeout-seconds."""


class LimitReached(ResourceExhausted):
    """A limit of the server is reached; try again later, if `may_pass`."""

    @property
    def may_pass(self) -> bool:
        """Whether the call may pass later. If not, waiting does not help: the call exceeds the limit on its own.

        Always True for an older server, which does not tell.
        """
        return "needed" not in self.metadata


class QuotaExceeded(ResourceExhausted):
    """The tenant has reached its limit: delete captures, wait for running requests, or ask for a higher limit."""


class Unauthenticated(ResiduumError):
    """The service requires a token, does not know this one, or it has expired."""


class PermissionDenied(ResiduumError):
    """The token lacks the right that this call requires."""

    @property
    def right(self) -> str | None:
        """The missing right: "generate", "read", "write" or "admin"."""
        return self.metadata.get("right")


class Unavailable(ResiduumError):
    """The service is not available at the moment; try again later."""


class Unreachable(Unavailable, ConnectionError):
    """Nothing answers at the endpoint, or the connection broke.

    Attributes:
        endpoint: The address, host:port.
        is_refusal: Whether one side refuses the connection, such as for a certificate, so that a retry cannot help.
    """

    def __init__(self, message: str, *, endpoint: str, is_refusal: bool = False) -> None:
        super().__init__(message, reason="", metadata={"endpoint": endpoint})
        self.endpoint = endpoint
        self.is_refusal = is_refusal


class StoreUnreachable(Unavailable):
    """The request asks for a capture, and the inference service cannot reach its store."""


class ArchiveUnreachable(Unavailable):
    """The archive that has the rows does not answer, or refuses the store, or the program that reads it directly."""


class NotServing(Unavailable):
    """The server is loading or stopping."""


class EngineDead(Unavailable):
    """The engine has died, and the service's process is about to end."""


class DeadlineExceeded(ResiduumError, TimeoutError):
    """The answer did not arrive in time."""


class RequestAborted(ResiduumError):
    """The request was aborted."""


class CallerStalled(ResiduumError):
    """The service ended the call: the client did not read the stream, or did not continue an upload, in time."""


class BatchFailed(ResiduumError):
    """Some prompts of a batch failed; the others were answered.

    Attributes:
        replies: One entry for each prompt, in order; None for a failed prompt.
        errors: The exception of each failed prompt, by the prompt's index.
    """

    def __init__(
        self, replies: Sequence[Reply | None], errors: Mapping[int, ResiduumError], *, can_skip: bool = False
    ) -> None:
        index, first = next(iter(sorted(errors.items())))
        advice = (
            " Correct them and run the same call again with if_exists='skip': it repeats only these prompts."
            if can_skip
            else ""
        )
        super().__init__(
            f"{len(errors)} of {len(replies)} prompts failed. The first failed prompt is number {index}: {first} "
            f"This exception has the other prompts' replies in .replies and all causes in .errors.{advice}",
            reason=first.reason,
            metadata=first.metadata,
        )
        self.replies = list(replies)
        self.errors = dict(errors)


class ExtractStopped(ResiduumError):
    """A prompt of `Client.extract` failed, and the job was to stop then. The shards before it are on the disk.

    Attributes:
        done: The number of prompts that are in shards.
    """

    def __init__(self, where: str, failure: Exception, done: int, total: int) -> None:
        text = str(failure)
        super().__init__(
            f"{text if text.startswith(where) else f'{where}: {text}'} The job has stopped, with {done} of {total} "
            "prompts on the disk. Correct the cause and run the same job again, or leave such prompts out with "
            "on_error='skip'.",
            reason=getattr(failure, "reason", ""),
            metadata=getattr(failure, "metadata", {}),
        )
        self.done = done


class BatchInterrupted(KeyboardInterrupt):
    """`Client.generate_many` was interrupted (Ctrl-C). It has stopped the prompts that were running.

    It is a KeyboardInterrupt, not a ResiduumError.

    Attributes:
        replies: One entry for each prompt, in order; None for a prompt that failed or had not ended.
        errors: The exception of each failed prompt, by the prompt's index.
    """

    def __init__(
        self, replies: Sequence[Reply | None], errors: Mapping[int, ResiduumError], *, can_skip: bool = False
    ) -> None:
        super().__init__(unfinished(replies, can_skip=can_skip))
        self.replies = list(replies)
        self.errors = dict(errors)

    def __reduce__(self) -> tuple[Callable[..., BatchInterrupted], tuple[object, ...]]:
        return unpickled, (type(self), self.args, self.__dict__.copy())  # as for ResiduumError


def unfinished(replies: Sequence[Reply | None], *, can_skip: bool = False) -> str:
    """Return the message of an interrupted batch."""
    done = sum(reply is not None for reply in replies)
    advice = " Run the same call again with if_exists='skip' to finish the rest." if can_skip else ""
    return (
        f"The batch was interrupted when {done} of {len(replies)} prompts were done. This exception has their replies "
        f"in .replies.{advice}"
    )


class ClientClosed(ResiduumError, RuntimeError):
    """The client is closed; create another."""


class ServerFault(ResiduumError):
    """The server has a bug, or its answer breaks the contract."""


class EmptyCaptureWarning(UserWarning):
    """The result has no rows: the captures have none of the selected positions."""


class OutageWarning(UserWarning):
    """A service does not answer, and a batch waits until it does; or a service of `residuum.serve` has ended."""


class LeftOutWarning(UserWarning):
    """Captures that match a filter are not complete, and were left out."""


class SilentStoreWarning(UserWarning):
    """A store did not answer, and the result lacks what it holds."""
