"""A store that fails as scripted, shipper processes, and rows with known bytes."""

from __future__ import annotations

import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

import inference_svc
import residuum.v1
from residuum.rpc.channels import SERVER_OPTIONS
from residuum.v1 import capture_pb2, errors_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from residuum.wire.rows import frames
from tests import ports

DEADLINE = 20.0
ROOTS = (Path(inference_svc.__file__).parents[1], Path(next(iter(residuum.v1.__path__))).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, ROOTS))}


def make_header(positions, layers=4, width=64, dtype=tensor_pb2.DATA_TYPE_FLOAT32):
    return capture_pb2.ChunkHeader(
        site=capture_pb2.SITE_RESID_POST,
        layers=range(layers),
        positions=positions,
        dtype=dtype,
        width=width,
        encoding=capture_pb2.ENCODING_RAW,
    )


def make_rows(capture_id, header):
    """Rows that are different for each (capture, layer, position): float32 [layers][positions][width]."""
    seed = zlib.crc32(f"{capture_id} {list(header.positions)}".encode())
    shape = (len(header.layers), len(header.positions), header.width)
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


class Work:
    """Publishes rows and records them, to compare with what a store got."""

    def __init__(self, producer):
        self.producer = producer
        self.expected = {}

    def publish(self, capture_id, *positions, layers=4, width=64):
        """Publish one extent with a header for each of the `positions`."""
        headers = [make_header(some, layers, width) for some in positions]
        payload = b"".join(self.expect(capture_id, header) for header in headers)
        extent = self.producer.acquire(len(payload), block=True)
        self.producer.view(extent)[:] = np.frombuffer(payload, np.uint8)
        self.producer.publish(extent, capture_id, headers)

    def expect(self, capture_id, header):
        rows = make_rows(capture_id, header)
        for number, layer in enumerate(header.layers):
            for at, position in enumerate(header.positions):
                self.expected[capture_id, layer, position] = rows[number, at].tobytes()
        return rows.tobytes()


class EndOfStream(Exception):  # noqa: N818
    """Raised by a script to end the stream with the status OK."""


class ScriptedStore(store_pb2_grpc.StoreServiceServicer):
    """Keeps rows in a dictionary. protobuf itself parses the messages, not residuum's own parser.

    `script(store, request, context)` runs before each message is kept. It may abort or end the stream, wait, or return
    a reason to reject the message.
    """

    def __init__(self, script=None, port=0):
        self.script = script
        self.rows = {}
        self.losses = []
        self.streams = 0
        self.messages = 0
        self.repeats = 0
        self.peers = {}
        self.changed = threading.Condition()
        self.server = grpc.server(ThreadPoolExecutor(16), options=SERVER_OPTIONS)
        store_pb2_grpc.add_StoreServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port or ports.reserve()}")
        self.endpoint = f"127.0.0.1:{self.port}"
        self.server.start()

    def AppendChunks(self, request_iterator, context):
        with self.changed:
            self.streams += 1
        for request in request_iterator:
            with self.changed:
                self.messages += 1
                self.changed.notify_all()
            try:
                reason = self.script(self, request, context) if self.script else None
            except EndOfStream:
                return
            answer = store_pb2.AppendChunksResponse(committed_through=request.number)
            if reason:
                error = errors_pb2.ItemError(reason=reason, message="scripted")
                answer.rejections.add(number=request.number, error=error)
            else:
                self.keep(request, context.peer())
            yield answer

    def keep(self, request, peer):
        with self.changed:
            self.peers.setdefault(request.capture_id, []).append(peer)
            if request.HasField("loss"):
                self.losses.append((request.capture_id, request.loss))
            else:
                self.keep_rows(request.capture_id, request.chunk)
            self.changed.notify_all()

    def keep_rows(self, capture_id, chunk):
        assert frames.checksum(chunk.payload) == chunk.crc32c
        row_bytes = chunk.header.width * 4
        rows = iter(range(0, len(chunk.payload), row_bytes))
        for layer in chunk.header.layers:
            for position, at in zip(chunk.header.positions, rows, strict=False):
                row = chunk.payload[at : at + row_bytes]
                key = (capture_id, layer, position)
                self.repeats += key in self.rows
                assert self.rows.setdefault(key, row) == row, f"{key} came twice with different values"

    def wait_for(self, condition, deadline=DEADLINE):
        with self.changed:
            assert self.changed.wait_for(condition, deadline), (
                f"rows={len(self.rows)} losses={len(self.losses)} messages={self.messages} streams={self.streams}"
            )

    def stop(self):
        self.server.stop(0).wait()
