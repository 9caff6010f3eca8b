"""Builds the requests that send vectors, and interprets their answers. No I/O: both clients use it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from residuum import exceptions as exc
from residuum.protocol.arguments import check_list
from residuum.protocol.failures import from_item_error
from residuum.protocol.requests import distinct, vectors_of
from residuum.v1 import inference_pb2
from residuum.values.probes.probe import Probe
from residuum.values.replies.uploads import PutResult
from residuum.values.steering.operations import Operation
from residuum.values.tensors.vector import Vector
from residuum.wire.limits import MAX_DIGESTS_PER_CALL, MAX_VECTORS_PER_CALL


class VectorLedger:
    """The digests of vectors that the server had at last notice. It may have dropped some; then it reports them."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._lock = threading.Lock()

    def unknown(self, vectors: Iterable[Vector]) -> list[Vector]:
        """Return the vectors that the server may lack, in order and without repeats."""
        with self._lock:
            return [vector for vector in distinct(vectors) if vector.digest not in self._known]

    def add(self, vectors: Iterable[Vector]) -> None:
        """Remember that the server has these vectors."""
        with self._lock:
            self._known.update(vector.digest for vector in vectors)

    def forget(self, vectors: Iterable[Vector]) -> None:
        """Forget these vectors, because the server lacks some of them."""
        with self._lock:
            self._known.difference_update(vector.digest for vector in vectors)


def find_requests(vectors: Sequence[Vector]) -> Iterator[inference_pb2.FindMissingVectorsRequest]:
    """Yield the requests that find missing vectors, each within the contract's limit."""
    for at in range(0, len(vectors), MAX_DIGESTS_PER_CALL):
        part = vectors[at : at + MAX_DIGESTS_PER_CALL]
        yield inference_pb2.FindMissingVectorsRequest(digests=[vector.digest for vector in part])


def put_calls(vectors: Sequence[Vector]) -> Iterator[Sequence[Vector]]:
    """Yield the vectors of each call, within the contract's limit."""
    for at in range(0, len(vectors), MAX_VECTORS_PER_CALL):
        yield vectors[at : at + MAX_VECTORS_PER_CALL]


def put_requests(vectors: Iterable[Vector]) -> Iterator[inference_pb2.PutVectorsRequest]:
    """Yield the messages that send vectors."""
    return (inference_pb2.PutVectorsRequest(vector=vector.message) for vector in vectors)


def only(vectors: Iterable[Vector], digests: Iterable[bytes]) -> list[Vector]:
    """Return the vectors with these digests."""
    wanted = set(digests)
    return [vector for vector in vectors if vector.digest in wanted]


def check_results(vectors: Sequence[Vector], response: inference_pb2.PutVectorsResponse) -> None:
    """Check that the server accepted the vectors that were sent.

    Raises:
        BadVector: The server refused a vector; the message names it and says why.
        ServerFault: The answer has another number of results than vectors were sent.
    """
    if len(response.results) != len(vectors):
        raise exc.ServerFault(f"The server answered for {len(response.results)} vectors, but {len(vectors)} were sent.")
    refused = [result for result in response.results if result.HasField("error")]
    if refused:
        error = from_item_error(refused[0].error, digest=refused[0].digest.hex())
        others = f" ({len(refused)} of {len(vectors)} vectors were refused.)" if len(refused) > 1 else ""
        raise type(error)(f"{error}{others}", reason=error.reason, metadata=error.metadata)


@contextmanager
def naming_owner(operations: Sequence[Operation], probes: Sequence[Probe] = ()) -> Iterator[None]:
    """Add to the error of a refused vector which operation or probe of a request it belongs to."""
    try:
        yield
    except exc.BadVector as error:
        owners = {vector.hexdigest: f"the probe {probe.name!r}" for probe in probes for vector in probe.vectors}
        for index, operation in enumerate(operations):
            name = f"steer[{index}] ({type(operation).__name__})"
            owners.update((vector.hexdigest, name) for vector in vectors_of([operation]))
        owner = owners.get(error.metadata.get("digest", ""))
        if owner is None:
            raise
        raise type(error)(f"{error} It belongs to {owner}.", reason=error.reason, metadata=error.metadata) from None


def put_result(given: Sequence[Vector], sent: Sequence[Vector]) -> PutResult:
    """Return what `put_vectors` did."""
    return PutResult(
        digests=tuple(vector.hexdigest for vector in given),
        sent=len(sent),
        bytes_sent=sum(vector.values.nbytes for vector in sent),
    )


def vector_list(vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> list[Vector]:
    """Return a user's vectors as a list. For a mapping, such as Directions, these are its values.

    Raises:
        TypeError: It is no list, or an item is not a Vector.
    """
    if isinstance(vectors, Mapping):
        vectors = vectors.values()
    items = [vectors] if isinstance(vectors, Vector) else check_list("vectors", vectors, "residuum.Vector")
    for item in items:
        if not isinstance(item, Vector):
            raise TypeError(
                f"vectors must be residuum.Vector, not {type(item).__name__}. Make one with Vector.from_array(array)."
            )
    return items
