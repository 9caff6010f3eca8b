"""Shared by the store's tests: small captures with values that depend only on their cells, and a plain client."""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest

from residuum.rpc.channels import open_channel
from residuum.rpc.errors import Failure, failure_from_rpc_error
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from residuum.wire.rows.frames import append_prefix, checksum, chunk_prefix
from store_svc.captures.lifecycle import Wait
from store_svc.database.db import Table, Txn
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.waiting import wait_for

ONE_AND_SEVERAL = pytest.mark.parametrize("shards", [1, 3], indirect=True, ids=["one shard", "three shards"])
"""Runs tests with databases of one file and of several."""

POST, PRE = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE
OPEN, COMPLETE = capture_pb2.CAPTURE_STATE_OPEN, capture_pb2.CAPTURE_STATE_COMPLETE
INCOMPLETE, ABORTED = capture_pb2.CAPTURE_STATE_INCOMPLETE, capture_pb2.CAPTURE_STATE_ABORTED
WIDTH = 4

Cell = tuple[int, int, int, int]
"""Sequence, site, layer, position."""


def describe(
    capture_id: str = "a",
    *,
    layers: Sequence[int] = (0, 1, 2),
    sites: Sequence[int] = (POST,),
    prompt: int = 4,
    sequences: int = 1,
    width: int = WIDTH,
    **spec: object,
) -> capture_pb2.CaptureDescription:
    description = capture_pb2.CaptureDescription(
        capture_id=capture_id,
        model="tiny",
        hidden_size=width,
        num_layers=max(layers) + 1,
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        spec=capture_pb2.CaptureSpec(sites=sites, encoding=capture_pb2.ENCODING_RAW, **spec),
        prompt_token_ids=range(prompt),
        num_sequences=sequences,
    )
    description.spec.layers.list.layers.extend(layers)
    return description


def stored_frames(txn: Txn) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the key and the value in FRAMES of each frame, in key order."""
    for key in txn.frame_keys():
        value = txn.get(Table.FRAMES, key)
        assert value is not None
        yield key, value


def whole_frames(txn: Txn) -> dict[bytes, bytes]:
    """Return the bytes of the whole Chunk of each frame, by key, in key order."""
    frames = {bytes(key): txn.frame(key) for key in txn.frame_keys()}
    return {key: frame.prefix + bytes(frame.payload) for key, frame in frames.items() if frame is not None}


def row(cell: Cell, width: int = WIDTH) -> np.ndarray:
    """Return the row of a cell, float32 [width]. Every cell's row is different."""
    sequence, site, layer, position = cell
    return (np.arange(width) + 10 * position + 10_000 * layer + 100_000 * site + 1_000_000 * sequence).astype("<f4")


def make_chunk(
    layers: Sequence[int],
    positions: Sequence[int],
    *,
    sequence: int = 0,
    site: int = POST,
    width: int = WIDTH,
    **header: object,
) -> bytes:
    rows = [[row((sequence, site, layer, position), width) for position in positions] for layer in layers]
    payload = np.array(rows).tobytes()
    fields = {"dtype": tensor_pb2.DATA_TYPE_FLOAT32, "width": width, "encoding": capture_pb2.ENCODING_RAW, **header}
    head = capture_pb2.ChunkHeader(sequence=sequence, site=site, layers=layers, positions=positions, **fields)
    return chunk_prefix(head, checksum(payload), len(payload)) + payload


def message(number: int, capture_id: str, chunk: bytes) -> bytes:
    return append_prefix(number, capture_id, len(chunk)) + chunk


def loss_message(number: int, capture_id: str, loss: store_pb2.RowLoss) -> bytes:
    return store_pb2.AppendChunksRequest(number=number, capture_id=capture_id, loss=loss).SerializeToString()


def seal_request(
    capture_id: str = "a", generated: Sequence[int] = (2,), outcome: int = COMPLETE, **fields: object
) -> store_pb2.SealCaptureRequest:
    sequences = [
        capture_pb2.SequenceOutcome(generated_token_ids=range(count), finish_reason="stop") for count in generated
    ]
    return store_pb2.SealCaptureRequest(capture_id=capture_id, outcome=outcome, **{"sequences": sequences, **fields})


def wait_request(seconds: float, capture_id: str = "a") -> store_pb2.GetCaptureRequest:
    request = store_pb2.GetCaptureRequest(capture_id=capture_id)
    request.wait.FromMilliseconds(int(seconds * 1000))
    return request


def cells_of(row_sets: Iterable[capture_pb2.RowSet]) -> set[Cell]:
    """Return the cells that a manifest's row sets name. Fails if a cell is named twice."""
    cells = [
        (item.sequence, item.site, layer, position)
        for item in row_sets
        for layer in item.layers
        for run in item.positions
        for position in range(run.first, run.last + 1)
    ]
    assert len(cells) == len(set(cells))
    return set(cells)


def grid(layers: Iterable[int], positions: Iterable[int], sequence: int = 0, site: int = POST) -> set[Cell]:
    positions = list(positions)
    return {(sequence, site, layer, position) for layer in layers for position in positions}


class Rows:
    """Collects the rows of a ReadChunks call. Fails on a duplicate row or a wrong value."""

    def __init__(self) -> None:
        self.cells: set[Cell] = set()

    def take(self, chunk: capture_pb2.Chunk) -> None:
        header = chunk.header
        assert checksum(chunk.payload) == chunk.crc32c
        shape = (len(header.layers), len(header.positions), header.width)
        values = np.frombuffer(chunk.payload, dtype="<f4").reshape(shape)
        for at, layer in enumerate(header.layers):
            for to, position in enumerate(header.positions):
                cell = (header.sequence, header.site, layer, position)
                assert cell not in self.cells, f"{cell} was sent twice"
                np.testing.assert_array_equal(values[at, to], row(cell, header.width))
                self.cells.add(cell)


class Client:
    """A plain gRPC client of the store, with an append stream that takes serialised messages."""

    def __init__(self, port: int) -> None:
        self.target = f"127.0.0.1:{port}"
        self.channel = open_channel(self.target)
        self.stub = store_pb2_grpc.StoreServiceStub(self.channel)
        self.raw_append = self.channel.stream_stream(
            "/residuum.v1.StoreService/AppendChunks", None, store_pb2.AppendChunksResponse.FromString
        )

    def open(self, description: capture_pb2.CaptureDescription | None = None) -> None:
        self.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description or describe()))

    def append(self, chunks: Iterable[bytes], capture_id: str = "a") -> list[store_pb2.AppendChunksResponse]:
        """Append chunks in one stream; return the answers, after checking that they are cumulative."""
        messages = [message(number, capture_id, chunk) for number, chunk in enumerate(chunks, start=1)]
        return self.send(messages)

    def send(self, messages: Iterable[bytes]) -> list[store_pb2.AppendChunksResponse]:
        answers = list(self.raw_append(iter(messages), timeout=30))
        assert all(a.committed_through <= b.committed_through for a, b in pairwise(answers))
        assert all(a.synced_through <= b.synced_through for a, b in pairwise(answers))
        assert all(answer.synced_through <= answer.committed_through for answer in answers)
        return answers

    def seal(self, *args: object, **fields: object) -> capture_pb2.CaptureManifest:
        return self.stub.SealCapture(seal_request(*args, **fields)).manifest

    def get(self, capture_id: str = "a", wait: float = 0.0) -> capture_pb2.CaptureManifest:
        return self.stub.GetCapture(wait_request(wait, capture_id), timeout=60).manifest

    def read(self, capture_id: str = "a", **fields: object) -> tuple[set[Cell], capture_pb2.CaptureManifest]:
        """Read rows and check their values. Return the cells, each of which came once, and the last manifest."""
        request = store_pb2.ReadChunksRequest(capture_id=capture_id, **fields)
        answers = list(self.stub.ReadChunks(request, timeout=30))
        assert [answer.WhichOneof("content") for answer in (answers[0], answers[-1])] == ["manifest", "manifest"]
        rows = Rows()
        for answer in answers[1:-1]:
            rows.take(answer.chunk)
        return rows.cells, answers[-1].manifest

    def close(self) -> None:
        self.channel.close()


class OpenStream:
    """A writer stream that stays open and waits for acknowledgements."""

    def __init__(self, client: Client, seconds: float = 30) -> None:
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self._next = 1
        self.answers = client.raw_append(iter(self._messages.get, None), timeout=seconds)

    def send(self, chunk: bytes, capture_id: str = "a") -> int:
        """Send a chunk; return its number."""
        number, self._next = self._next, self._next + 1
        self._messages.put(message(number, capture_id, chunk))
        return number

    def until_acked(self, number: int) -> store_pb2.AppendChunksResponse:
        return next(answer for answer in self.answers if answer.committed_through >= number)

    def half_close(self) -> None:
        self._messages.put(None)

    def cancel(self) -> None:
        self.answers.cancel()
        self._messages.put(None)


def rejections(answers: Iterable[store_pb2.AppendChunksResponse]) -> dict[int, int]:
    """Return the reason of each rejected message."""
    return {item.number: item.error.reason for answer in answers for item in answer.rejections}


@contextmanager
def without_collections() -> Iterator[None]:
    """Free objects only when nothing refers to them, so not those of reference cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def failing_with(reason: int) -> Iterator[list[Failure]]:
    """Expect a call to fail with a reason."""
    caught: list[Failure] = []
    with pytest.raises(grpc.RpcError) as info:
        yield caught
    failure = failure_from_rpc_error(info.value)
    assert failure is not None, info.value
    assert failure.reason == reason, failure.message
    assert info.value.code() == failure.code
    caught.append(failure)


@contextmanager
def serving(
    path: Path, on_death: Callable[[], None] = lambda: None, **fields: object
) -> Iterator[tuple[Store, Client]]:
    """Run a store in this process."""
    settings = StoreSettings(listen="127.0.0.1:0", path=path, **{"grace_seconds": 1.0, **fields})
    store = Store(settings, on_death)
    client = Client(store.port)
    try:
        yield store, client
    finally:
        client.close()
        store.stop()


@contextmanager
def busy_writer(store: Store) -> Iterator[None]:
    """Let the writer be in the middle of a transaction until the context ends."""
    is_busy, ended = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        is_busy.set()
        assert ended.wait(30)

    blocking = store._writer.submit("other", wait)
    try:
        assert is_busy.wait(30)
        yield
    finally:
        ended.set()
        blocking.result(30)


def set_wait(store: Store, wait: Wait, seconds: float) -> None:
    """Change how long captures of a running store may wait for something."""
    waits = store._writer._options.waits
    assert isinstance(waits, dict)
    waits[wait] = seconds
    store._writer.submit("other", lambda _: None).result(30)  # the writer works out again how long it may sleep


def call_errors(store: Store) -> list[dict[str, str]]:
    """Return the method and the reason of each kind of failed call that a store has counted."""
    samples = [sample for metric in store._metrics.registry.collect() for sample in metric.samples]
    return [sample.labels for sample in samples if sample.name == "residuum_call_errors_total" and sample.value]


class Process:
    """A store in its own process."""

    def __init__(self, path: Path, *flags: str) -> None:
        port_file = path.with_name("port")
        port_file.unlink(missing_ok=True)
        self.log_path = path.with_name("log")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "store_svc", "--listen", "127.0.0.1:0", "--path", str(path)),
                    *("--port-file", str(port_file), *flags),
                ],
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        wait_for(lambda: port_file.exists() or self.process.poll() is not None, self.log_path.read_text)
        assert port_file.exists(), self.log_path.read_text()
        self.client = Client(int(port_file.read_text()))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=30)
        self.client.close()
        return status
