"""The compared ways. Each moves the same bytes to another process and reads them back."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bench.memory import provide_memory
from bench.processes import RunFailedError
from bench.store.captures import Shape, differs
from bench.store.lane import Lane
from bench.store.peers import ACK, LENGTH, receive, send
from inference_svc.shipping.framing import cut, payload_bytes
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.rows.frames import checksum

_FLIGHT_BATCH_BYTES = 1 << 20


class Way(Protocol):
    """One way to move bytes. Each round calls `put` first."""

    name: str

    def put(self, number: int) -> float:
        """Move all bytes to the other process in a round; return the seconds."""

    def get(self) -> float:
        """Read all bytes back as numpy arrays; return the seconds."""

    def clear(self) -> None:
        """Free the space for the next round."""


class _Stored:
    """Base class of the two ways that end in the store."""

    def __init__(self, lane: Lane, shape: Shape, num_captures: int, source: npt.NDArray[np.uint8]) -> None:
        self._lane = lane
        self._shape = shape
        self._num_captures = num_captures
        self._source = source
        self._captures: Sequence[str] = ()

    def _begin(self, name: str, number: int) -> None:
        self._captures = [f"{name}-{number}-{index}" for index in range(self._num_captures)]
        self._lane.open(self._captures, self._shape)

    def clear(self) -> None:
        """See `Way`."""
        self._lane.delete(self._captures)


class Shipped(_Stored):
    """From a ring through shippers into a committed transaction, and back through the client."""

    name = "residuum"

    def __init__(
        self, lane: Lane, shape: Shape, num_captures: int, source: npt.NDArray[np.uint8], name: str = "residuum"
    ) -> None:
        super().__init__(lane, shape, num_captures, source)
        self.name = name

    def put(self, number: int) -> float:
        """See `Way`. Ends when the last row is acknowledged, which means committed."""
        self._begin("shipped", number)
        self._fed = self._lane.feed(self._captures, self._shape)
        self._lane.seal(self._captures, self._shape)
        return self._fed.ended - self._fed.started

    def get(self) -> float:
        """See `Way`: `client.activations` of all captures."""
        provide_memory(self._shape.num_bytes * self._num_captures)  # for the arrays that are returned
        started = time.perf_counter()
        found = self._lane.client.activations(self._captures)
        seconds = time.perf_counter() - started
        (block,) = found[0].blocks().values()
        if differs(block.values, self._source, self._fed.offsets):
            raise RunFailedError("the rows that were read differ from those in the ring")
        return seconds


class Plain(_Stored):
    """Calls a store through the generated stubs, with ordinary messages."""

    def __init__(self, name: str, lane: Lane, shape: Shape, num_captures: int, source: npt.NDArray[np.uint8]) -> None:
        super().__init__(lane, shape, num_captures, source)
        self.name = name

    def put(self, number: int) -> float:
        """See `Way`. Sends chunks of the shipper's size, all in one stream."""
        self._begin("plain", number)
        started = time.perf_counter()
        sent = 0

        def messages() -> Iterator[store_pb2.AppendChunksRequest]:
            nonlocal sent
            for message in self._messages():
                sent = message.number
                yield message

        for answer in self._lane.stub.AppendChunks(messages()):
            committed = answer.committed_through
            if answer.rejections:
                raise RunFailedError(f"the store rejected a message: {answer.rejections[0].error.message}")
            seconds = time.perf_counter() - started  # excludes the sync at the end of the stream
        if committed != sent:
            raise RunFailedError(f"{committed} of {sent} messages were committed")
        self._lane.seal(self._captures, self._shape)
        return seconds

    def get(self) -> float:
        """See `Way`. Parses and checks the chunks, and copies them into one array, like the client."""
        provide_memory(self._shape.num_bytes)  # for the array of a capture
        started = time.perf_counter()
        for capture_id in self._captures:
            self._read(capture_id)
        return time.perf_counter() - started

    def _messages(self) -> Iterator[store_pb2.AppendChunksRequest]:
        number, at = 0, 0
        for header in self._shape.headers():
            size = payload_bytes(header)
            for capture_id in self._captures:
                at = at if at + size <= len(self._source) else 0
                rows = self._source[at : at + size].data
                at += size
                for piece in cut(header, rows):
                    number += 1
                    payload = bytes(piece.payload)
                    yield store_pb2.AppendChunksRequest(
                        number=number,
                        capture_id=capture_id,
                        chunk=capture_pb2.Chunk(header=piece.header, crc32c=checksum(payload), payload=payload),
                    )

    def _read(self, capture_id: str) -> npt.NDArray[Any]:
        shape = self._shape
        values: npt.NDArray[Any] | None = None
        rows = 0
        for answer in self._lane.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=capture_id)):
            if not answer.HasField("chunk"):
                continue
            header, payload = answer.chunk.header, answer.chunk.payload
            if checksum(payload) != answer.chunk.crc32c:
                raise RunFailedError("a chunk is damaged")
            dtype = numpy_dtype(header.dtype)
            if values is None:
                values = np.empty((shape.layers, shape.positions, shape.hidden), dtype)
            layers, positions = header.layers, header.positions
            block = np.frombuffer(payload, dtype).reshape(len(layers), len(positions), header.width)
            values[layers[0] : layers[-1] + 1, positions[0] : positions[-1] + 1] = block
            rows += len(layers) * len(positions)
        if values is None or rows != shape.num_rows:
            raise RunFailedError(f"{rows} rows came instead of {shape.num_rows}")
        return values


class Flight:
    """Arrow Flight's do_put and do_get, from and to memory, without checksums and without a copy into one array."""

    name = "Flight"

    def __init__(self, port: int, size: int, source: npt.NDArray[np.uint8]) -> None:
        import pyarrow as pa
        from pyarrow import flight

        self._flight = flight
        self._client = flight.connect(f"grpc://127.0.0.1:{port}")
        self._size = size
        self._schema = pa.schema([("rows", pa.uint8())])
        self._batches = [
            pa.record_batch([pa.array(piece)], schema=self._schema)
            for piece in pieces(source, size, _FLIGHT_BATCH_BYTES)
        ]

    def put(self, number: int) -> float:
        """See `Way`. Ends when the server confirms that it has everything."""
        del number
        started = time.perf_counter()
        writer, reader = self._client.do_put(self._flight.FlightDescriptor.for_path("rows"), self._schema)
        with writer:
            for batch in self._batches:
                writer.write_batch(batch)
            writer.done_writing()
            answer = reader.read()
            seconds = time.perf_counter() - started
        if answer.to_pybytes() != ACK:
            raise RunFailedError("the Flight server did not receive everything")
        return seconds

    def get(self) -> float:
        """See `Way`. The arrays stay in the buffers that received them."""
        started = time.perf_counter()
        count = 0
        for chunk in self._client.do_get(self._flight.Ticket(b"rows")):
            count += chunk.data.column(0).to_numpy(zero_copy_only=True).nbytes
        seconds = time.perf_counter() - started
        if count != self._size:
            raise RunFailedError(f"the Flight server returned {count} of {self._size} bytes")
        return seconds

    def clear(self) -> None:
        """See `Way`. The server keeps only the first table."""


class Tcp:
    """A plain copy over TCP, from and to memory: the speed of the machine's loopback."""

    name = "TCP"

    def __init__(self, port: int, size: int, source: npt.NDArray[np.uint8]) -> None:
        self._address = ("127.0.0.1", port)
        self._size = size
        self._pieces = [piece.data for piece in pieces(source, size, len(source))]
        self._memory = np.zeros(size, dtype=np.uint8)

    def put(self, number: int) -> float:
        """See `Way`. Ends when the other end confirms that it has everything."""
        del number
        started = time.perf_counter()
        with socket.create_connection(self._address) as connection:
            connection.sendall(LENGTH.pack(self._size))
            for piece in self._pieces:
                send(connection, piece)
            receive(connection, memoryview(bytearray(len(ACK))))
            return time.perf_counter() - started

    def get(self) -> float:
        """See `Way`. Receives into one array."""
        started = time.perf_counter()
        with socket.create_connection(self._address) as connection:
            connection.sendall(LENGTH.pack(-self._size))
            receive(connection, self._memory.data)
            return time.perf_counter() - started

    def clear(self) -> None:
        """See `Way`. The other end overwrites its bytes."""


def pieces(source: npt.NDArray[np.uint8], size: int, most: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield `size` bytes from a source. A smaller source is repeated."""
    at = 0
    while size:
        count = min(size, most, len(source) - at)
        yield source[at : at + count]
        at = (at + count) % len(source)
        size -= count
