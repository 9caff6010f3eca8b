"""The sink that ends at the ring: a consumer in this process takes each extent, counts its rows, and frees it."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np

from bench.capture.sinks import Arrived, RowsMissingError
from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.protocol import Done, ExtentReady, LossReport, Message, MessageReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from inference_svc.engine import ModelFacts
    from residuum.v1 import capture_pb2

_RECEIVE_BYTES = 1 << 16


class Tally:
    """Which rows of one capture have come."""

    def __init__(self, num_layers: int, num_positions: int) -> None:
        """Expect `num_positions` of each layer; later positions, which a step too many computed, do not count."""
        self._seen: npt.NDArray[np.bool_] = np.zeros((num_layers, num_positions), dtype=np.bool_)
        self._row_bytes = 0

    def add(self, header: capture_pb2.ChunkHeader) -> None:
        """Count the rows that a header names."""
        positions = np.fromiter(header.positions, dtype=np.int64)
        layers = np.fromiter(header.layers, dtype=np.int64)
        self._row_bytes = payload_bytes(header) // (len(positions) * len(layers))
        self._seen[np.ix_(layers, positions[positions < self._seen.shape[1]])] = True

    @property
    def arrived(self) -> Arrived:
        """What has come, each row counted once."""
        rows = int(self._seen.sum())
        return Arrived(rows, rows * self._row_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether everything has come."""
        return bool(self._seen.all())


class RingSink:
    """Consumers of the rings, a thread for each."""

    def __init__(self, facts: ModelFacts, rows_per_request: int) -> None:
        self._num_layers = facts.num_layers
        self._num_positions = rows_per_request
        self._tallies: dict[str, Tally] = {}
        self._lost: list[str] = []
        self._sockets = [_connect(path) for path in facts.control_paths]
        self._threads = [threading.Thread(target=self._consume, args=(item,), daemon=True) for item in self._sockets]

    async def start(self) -> None:
        """See `CaptureSink`."""
        for thread in self._threads:
            thread.start()

    async def begin(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """See `CaptureSink`."""
        self._tallies = {capture_id: Tally(self._num_layers, self._num_positions) for capture_id in prompts}

    async def finish(self, replies: Mapping[str, Sequence[int]]) -> Arrived:
        """See `CaptureSink`. The engine has been drained: every extent was counted before its Done."""
        missing = [capture_id for capture_id in replies if not self._tallies[capture_id].is_complete]
        if missing or self._lost:
            raise RowsMissingError(f"rows are missing of {missing}; lost: {self._lost or 'none'}")
        arrived = [tally.arrived for tally in self._tallies.values()]
        return Arrived(sum(item.rows for item in arrived), sum(item.num_bytes for item in arrived))

    async def stop(self) -> None:
        """See `CaptureSink`."""
        for item in self._sockets:
            item.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _consume(self, connection: socket.socket) -> None:
        reader = MessageReader()
        with connection:
            data, descriptors, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, 1)
            for descriptor in descriptors:
                os.close(descriptor)  # the ring's memory, which nobody reads here
            while data:
                for message in reader.feed(data):
                    self._take(message, connection)
                data = connection.recv(_RECEIVE_BYTES)

    def _take(self, message: Message, connection: socket.socket) -> None:
        if isinstance(message, ExtentReady):
            for header in message.headers:
                self._tallies[message.capture_id].add(header)
        elif isinstance(message, LossReport):
            self._lost.append(f"{message.capture_id}: {message.loss.detail}")
        else:
            return
        connection.sendall(Done(message.ticket).encode())


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection
