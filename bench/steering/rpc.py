"""Part `rpc`: the cost of sending vectors to a server and naming them in requests, the first time and later."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import residuum
from bench.output import table
from bench.processes import Helper, RunFailedError
from residuum.protocol.generation import vector_upload
from residuum.protocol.requests import plan_spec
from residuum.v1 import inference_pb2, tensor_pb2
from residuum.wire.digests import digest_of_bytes

LAYERS = 28


@dataclass(frozen=True)
class RpcJob:
    """What to measure."""

    hidden: tuple[int, ...] = (2560, 4096)
    vectors: tuple[int, ...] = (0, 1, 8, 64)
    """Numbers of vectors in a request."""
    repeats: int = 50


class Sample(NamedTuple):
    """One call, or one operation of a client without a call."""

    seconds: float
    bytes_sent: int


def measure(job: RpcJob) -> dict[str, Any]:
    """Measure, and return the part of the result."""
    costs = [cost for hidden in job.hidden for cost in without_a_server(hidden, job)]
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        log = Path(scratch, "server.log")
        server = Helper("bench.steering.rpc_server", [str(LAYERS), *map(str, job.hidden)], log)
        try:
            for hidden, port in zip(job.hidden, server.first, strict=True):
                costs += with_a_server(hidden, job, f"127.0.0.1:{port}")
        finally:
            server.stop()
    return {"parameters": {**asdict(job), "layers": LAYERS}, "costs": costs}


def without_a_server(hidden: int, job: RpcJob) -> Iterator[dict[str, Any]]:
    """Yield the costs within a client: hashing a vector, and building a request."""
    made = _arrays(hidden, 0)

    def digest(array: npt.NDArray[np.float32], hash_of: Callable[[bytes], object]) -> Sample:
        values = array.tobytes()
        return _timed(lambda: hash_of(values), 0)

    for what, hash_of in (
        ("SHA-256 alone", lambda values: hashlib.sha256(values).digest()),
        ("digest", lambda values: digest_of_bytes(tensor_pb2.DATA_TYPE_FLOAT32, values)),
    ):
        arrays = [next(made) for _ in range(job.repeats)]
        yield _cost(
            what, hidden, 1, [digest(array, hash_of) for array in arrays], [digest(array, hash_of) for array in arrays]
        )
    arrays = [next(made) for _ in range(job.repeats)]
    hashed = [vectors[0] for vectors in _hashed(made, 1, job.repeats)]
    yield _cost(
        "Vector with its digest", hidden, 1,
        [_timed(partial(_vector_digest, array), 0) for array in arrays],
        [_timed(partial(getattr, vector, "digest"), 0) for vector in hashed],
    )  # fmt: skip
    for count in job.vectors:
        requests = [[residuum.Vector.from_array(next(made)) for _ in range(count)] for _ in range(job.repeats)]
        first, later = ([_build(vectors) for vectors in requests] for _ in range(2))
        yield _cost("building a request", hidden, count, first, later)


def with_a_server(hidden: int, job: RpcJob, endpoint: str) -> Iterator[dict[str, Any]]:
    """Yield the costs of the calls."""
    made = _arrays(hidden, 1)
    for count in job.vectors:
        requests = _hashed(made, count, job.repeats)
        with residuum.Client(endpoint) as client, residuum.Client(endpoint) as another:
            if not count:
                samples = [_register(client, []) for _ in range(2 * job.repeats)]
                yield _cost("RegisterRequest", hidden, 0, samples[: job.repeats], samples[job.repeats :])
                continue
            client.find_missing_vectors(requests[0])  # connects
            another.find_missing_vectors(requests[0])
            missing = [_find(client, vectors, missing=count) for vectors in requests]
            sent = [_put(client, vectors, sent=count) for vectors in requests]
            there = [_find(client, vectors, missing=0) for vectors in requests]
            yield _cost("FindMissingVectors", hidden, count, missing, there)
            for who, later in (
                ("another", [_put(another, vectors, sent=0) for vectors in requests]),
                ("the same", [_put(client, vectors, sent=0, asks=False) for vectors in requests]),
            ):
                yield _cost(f"put_vectors, later by {who} client", hidden, count, sent, later)
        fresh = _hashed(made, count, job.repeats)
        with residuum.Client(endpoint) as client:
            _register(client, [])  # connects
            first = [_register(client, vectors) for vectors in fresh]
            later = [_register(client, vectors, missing=0) for vectors in fresh]
            yield _cost("RegisterRequest", hidden, count, first, later)


def _arrays(hidden: int, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield random arrays, all different."""
    source = np.random.default_rng(seed)
    while True:
        yield source.standard_normal(hidden).astype(np.float32)


def _hashed(made: Iterator[npt.NDArray[np.float32]], count: int, repeats: int) -> list[list[residuum.Vector]]:
    """Return the vectors of each repetition with known digests, because hashing is measured separately."""
    requests = [[residuum.Vector.from_array(next(made)) for _ in range(count)] for _ in range(repeats)]
    for vectors in requests:
        _build(vectors)
    return requests


def _vector_digest(array: npt.NDArray[np.float32]) -> bytes:
    return residuum.Vector.from_array(array).digest


def _timed(do: Callable[[], object], bytes_sent: int) -> Sample:
    started = time.perf_counter()
    do()
    return Sample(time.perf_counter() - started, bytes_sent)


def _steering(vectors: Sequence[residuum.Vector]) -> list[residuum.Add]:
    return [residuum.Add(vector, layer=index % LAYERS) for index, vector in enumerate(vectors)]


def _build(vectors: Sequence[residuum.Vector]) -> Sample:
    """Build a request with an operation for each vector."""
    return _timed(lambda: plan_spec(None, _steering(vectors), None, None), 0)


def _find(client: residuum.Client, vectors: Sequence[residuum.Vector], *, missing: int) -> Sample:
    found: list[residuum.Vector] = []
    sample = _timed(lambda: found.extend(client.find_missing_vectors(vectors)), find_bytes(vectors))
    _expect(len(found), missing, "missing vectors")
    return sample


def _put(client: residuum.Client, vectors: Sequence[residuum.Vector], *, sent: int, asks: bool = True) -> Sample:
    """Put vectors. A client that does not know whether the server has them asks first."""
    done: list[int] = []
    size = (find_bytes(vectors) if asks else 0) + (put_bytes(vectors) if sent else 0)
    sample = _timed(lambda: done.append(client.put_vectors(vectors).sent), size)
    _expect(done[0], sent, "vectors sent")
    return sample


def _register(client: residuum.Client, vectors: Sequence[residuum.Vector], *, missing: int | None = None) -> Sample:
    """Register a request, which also sends missing vectors, and drop it after the clock has stopped."""
    operations = _steering(vectors)
    spec = plan_spec(None, operations, None, None).spec
    size = inference_pb2.RegisterRequestRequest(spec=spec).ByteSize()
    if missing is None and vectors:
        size += put_bytes(vectors)
    registered: list[str] = []
    sample = _timed(lambda: registered.append(client.register(steer=operations).request_id), size)
    client.abort(registered[0])
    return sample


def find_bytes(vectors: Sequence[residuum.Vector]) -> int:
    """Return the bytes of the messages that ask for missing vectors."""
    return sum(message.ByteSize() for message in vector_upload.find_requests(vectors))


def put_bytes(vectors: Sequence[residuum.Vector]) -> int:
    """Return the bytes of the messages that carry vectors."""
    return sum(message.ByteSize() for message in vector_upload.put_requests(vectors))


def _expect(seen: int, wanted: int, what: str) -> None:
    if seen != wanted:
        raise RunFailedError(f"{seen} {what} instead of {wanted}, so the measurement is invalid")


def _cost(what: str, hidden: int, vectors: int, first: Sequence[Sample], later: Sequence[Sample]) -> dict[str, Any]:
    """Return medians of all repetitions, with new vectors and with vectors that server and client know.

    Bytes are those of the messages sent, without gRPC's framing.
    """
    both = {"first": first, "later": later}
    return {
        "what": what,
        "hidden": hidden,
        "vectors": vectors,
        **{f"{when}_us": _median_us(samples) for when, samples in both.items()},
        **{f"{when}_bytes": round(statistics.median(item.bytes_sent for item in some)) for when, some in both.items()},
        **{f"{when}_samples_us": [round(item.seconds * 1e6, 2) for item in some] for when, some in both.items()},
    }


def _median_us(samples: Sequence[Sample]) -> float:
    return round(statistics.median(sample.seconds for sample in samples) * 1e6, 2)


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table."""
    head = ["what", "hidden", "vectors", "first, us", "later, us", "first, bytes", "later, bytes"]
    names = ("what", "hidden", "vectors", "first_us", "later_us", "first_bytes", "later_bytes")
    rows = [
        [f"{cost[name]:.1f}" if isinstance(cost[name], float) else str(cost[name]) for name in names]
        for cost in part["costs"]
    ]
    yield table(head, rows)
