"""Receives every extent of the rings, counts its rows, and frees it.

`RingSink` starts `python -m bench.capture.sinks.ring_consumer SITES LAYERS POSITIONS SOCKET...`. It is a separate
process, so that it and the engine's front end never wait for each other. It answers each line of JSON on standard input
with a line on standard output, and ends when standard input ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.processes import answer_lines
from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.protocol import Done, ExtentReady, LossReport, Message, MessageReader
from residuum.v1 import capture_pb2

_RECEIVE_BYTES = 1 << 16


class Tally:
    """Records which rows of one capture have arrived."""

    def __init__(self, sites: Sequence[int], layers: Sequence[int], num_positions: int) -> None:
        """Expect `num_positions` rows for each layer and site.

        Later positions do not count: the engine may compute a step too many.
        """
        self._places = {site: index for index, site in enumerate(sites)}
        self._rows = {layer: index for index, layer in enumerate(layers)}
        self._seen: npt.NDArray[np.bool_] = np.zeros((len(sites), len(layers), num_positions), dtype=np.bool_)
        self._row_bytes = 0

    def add(self, header: capture_pb2.ChunkHeader) -> None:
        """Count the rows that a header names."""
        positions = np.fromiter(header.positions, dtype=np.int64)
        layers = np.fromiter((self._rows[layer] for layer in header.layers), dtype=np.int64)
        self._row_bytes = payload_bytes(header) // (len(positions) * len(layers))
        seen = self._seen[self._places[header.site]]
        seen[np.ix_(layers, positions[positions < seen.shape[1]])] = True

    @property
    def rows(self) -> int:
        """The number of rows that have arrived, without duplicates."""
        return int(self._seen.sum())

    @property
    def num_bytes(self) -> int:
        """The size of those rows in bytes."""
        return self.rows * self._row_bytes

    @property
    def is_complete(self) -> bool:
        """Whether all rows have arrived."""
        return bool(self._seen.all())


class Consumer:
    """Consumes the rings, with a thread for each, and counts the rows."""

    def __init__(self, sites: Sequence[int], layers: Sequence[int], num_positions: int, paths: Sequence[str]) -> None:
        """Connect to the control sockets of some rings."""
        self._shape = sites, layers, num_positions
        self._tallies: dict[str, Tally] = {}
        self._lost: list[str] = []
        for path in paths:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(path)
            threading.Thread(target=self._consume, args=(connection,), daemon=True).start()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one line: {"begin": capture IDs} to start a count, or {"finish": true} to get it."""
        if "begin" in request:
            self._tallies = {capture_id: Tally(*self._shape) for capture_id in request["begin"]}
            return {}
        tallies = self._tallies
        return {
            "rows": sum(tally.rows for tally in tallies.values()),
            "num_bytes": sum(tally.num_bytes for tally in tallies.values()),
            "missing": [capture_id for capture_id, tally in tallies.items() if not tally.is_complete],
            "lost": self._lost,
        }

    def _consume(self, connection: socket.socket) -> None:
        reader = MessageReader()
        with connection:
            data, descriptors, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, 1)
            for descriptor in descriptors:
                os.close(descriptor)  # the ring's memory, which this process does not read
            while data:
                for message in reader.feed(data):
                    self._take(message, connection)
                data = connection.recv(_RECEIVE_BYTES)

    def _take(self, message: Message, connection: socket.socket) -> None:
        if isinstance(message, ExtentReady):
            self._count(message)
        elif isinstance(message, LossReport):
            self._lost.append(f"{message.capture_id}: {message.loss.detail}")
        else:
            return
        connection.sendall(Done(message.ticket).encode())

    def _count(self, message: ExtentReady) -> None:
        tally = self._tallies.get(message.capture_id)
        if tally is None or not all(self._expects(header) for header in message.headers):
            self._lost.append(f"{message.capture_id}: rows arrived that were not requested")
        else:
            for header in message.headers:
                tally.add(header)

    def _expects(self, header: capture_pb2.ChunkHeader) -> bool:
        sites, layers, _ = self._shape
        return header.site in sites and set(header.layers) <= set(layers)


def main() -> None:
    """Answer until standard input ends, which means that the parent process has ended."""
    sites, layers, num_positions, *paths = sys.argv[1:]
    consumer = Consumer(_numbers(sites), _numbers(layers), int(num_positions), paths)
    answer_lines({}, consumer.answer)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
