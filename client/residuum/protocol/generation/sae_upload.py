"""Builds the requests that send encoders: of sparse autoencoders, and maps of lenses. No I/O: both clients use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from residuum.exceptions import BadSAE, InvalidRequest, ResiduumError
from residuum.v1 import inference_pb2
from residuum.values.replies.uploads import PutSAEResult
from residuum.values.tensors.lens import LensMap
from residuum.values.tensors.sae import SAE

Encoder = SAE | LensMap
"""What PutSAE takes. A map of a lens is an encoder without activation."""

_PIECE_BYTES = 1 << 20
"""Bytes of an encoder in one message."""

_SLOWEST_BYTES_PER_SECOND = 1e6
"""An upload may take longer than other calls: as long as this speed needs."""

_REFUSALS = frozenset({"DIGEST_MISMATCH", "WRONG_LENGTH", "BAD_VALUES"})


class SAELedger:
    """The digests of encoders that the server had at last notice."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._lock = threading.Lock()

    def knows(self, sae: Encoder) -> bool:
        """Return whether the server had an encoder at last notice."""
        with self._lock:
            return sae.digest in self._known

    def add(self, sae: Encoder) -> None:
        """Remember that the server has an encoder."""
        with self._lock:
            self._known.add(sae.digest)

    def forget(self, sae: Encoder | None) -> None:
        """Forget an encoder, because the server may lack it."""
        with self._lock:
            self._known.difference_update([] if sae is None else [sae.digest])


def find_requests(sae: Encoder) -> Iterator[inference_pb2.PutSAERequest]:
    """Yield the message that asks whether the server has an encoder."""
    yield inference_pb2.PutSAERequest(header=sae.header)


def put_requests(sae: Encoder) -> Iterator[inference_pb2.PutSAERequest]:
    """Yield the messages that send an encoder."""
    yield inference_pb2.PutSAERequest(header=sae.header)
    for part in sae.parts():
        for first in range(0, len(part), _PIECE_BYTES):
            yield inference_pb2.PutSAERequest(data=bytes(part[first : first + _PIECE_BYTES]))


def extra_seconds(sae: Encoder) -> float:
    """Return how much longer than other calls an upload may take."""
    return sae.shape.nbytes / _SLOWEST_BYTES_PER_SECOND


def put_result(sae: SAE, answer: inference_pb2.PutSAEResponse) -> PutSAEResult:
    """Return what `put_sae` did."""
    return PutSAEResult(sae.digest.hex(), not answer.existed, answer.num_bytes, answer.free_bytes)


def refusal(failure: ResiduumError, sae: Encoder) -> ResiduumError:
    """Return the failure of an upload as a BadSAE, or of a lens as an InvalidRequest, if the encoder is to blame."""
    if failure.reason not in _REFUSALS:
        return failure
    if isinstance(sae, SAE):
        return BadSAE(str(failure), reason=failure.reason, metadata=failure.metadata)
    return InvalidRequest(f"A map of the lens was refused. {failure}", reason=failure.reason, metadata=failure.metadata)


def check_sae(sae: object) -> SAE:
    """Return a sparse autoencoder.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(sae, SAE):
        raise TypeError(f"sae must be a residuum.SAE, not {type(sae).__name__}; residuum.sae.load reads one.")
    return sae
