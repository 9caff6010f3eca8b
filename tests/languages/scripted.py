"""Scripted versions of both services, without TLS, to send chunks that a real store never sends."""

from __future__ import annotations

import threading
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
from grpc_reflection.v1alpha import reflection

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import (
    capture_pb2,
    inference_pb2,
    inference_pb2_grpc,
    placement_pb2,
    store_pb2,
    store_pb2_grpc,
    tensor_pb2,
)
from residuum.wire.rows.frames import checksum

CAPTURE_ID = "req-scripted"
LAYERS, PROMPT_TOKENS = 3, 2
PATIENCE_SECONDS = 60


def chunk(layers, positions, payload, *, encoding, dtype=tensor_pb2.DATA_TYPE_BFLOAT16, width, crc=None):
    header = capture_pb2.ChunkHeader(
        site=capture_pb2.SITE_RESID_POST,
        layers=layers,
        positions=positions,
        dtype=dtype,
        width=width,
        encoding=encoding,
    )
    return capture_pb2.Chunk(header=header, crc32c=checksum(payload) if crc is None else crc, payload=payload)


@dataclass
class Script:
    """The answers of the services."""

    width: int
    positions: int
    """How many rows count at each of the captured layers."""
    chunks: list
    holds: bool = True
    """Whether the store has the capture."""
    state: int = capture_pb2.CAPTURE_STATE_COMPLETE
    asked: list[str] = field(default_factory=list)
    """The `authorization` of calls to the inference service."""
    endless: bool = False
    """Whether the generation ends only when it is cancelled."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the generation was cancelled."""

    def manifest(self) -> capture_pb2.CaptureManifest:
        captured = [LAYERS // 2, LAYERS - 1]
        runs = [capture_pb2.RowRange(first=0, last=self.positions - 1)]
        return capture_pb2.CaptureManifest(
            description=capture_pb2.CaptureDescription(
                capture_id=CAPTURE_ID, hidden_size=self.width, prompt_token_ids=[1] * PROMPT_TOKENS, num_sequences=1
            ),
            state=self.state,
            incomplete_detail="" if self.state == capture_pb2.CAPTURE_STATE_COMPLETE else "the engine died",
            present=[capture_pb2.RowSet(site=capture_pb2.SITE_RESID_POST, layers=captured, positions=runs)],
        )


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, script: Script) -> None:
        self._script = script
        self.stores: list[placement_pb2.StoreAddress] = []

    def GetModelInfo(self, request, context):
        self._script.asked.append(dict(context.invocation_metadata()).get("authorization", ""))
        return inference_pb2.GetModelInfoResponse(num_layers=LAYERS, hidden_size=self._script.width, stores=self.stores)

    def RegisterRequest(self, request, context):
        return inference_pb2.RegisterRequestResponse(request_id=CAPTURE_ID)

    def Generate(self, request, context):
        holder = self.stores[-1]
        handle = inference_pb2.CaptureHandle(capture_id=CAPTURE_ID, store_endpoint=holder.endpoint, store=holder.name)
        yield inference_pb2.GenerateResponse(started={"request_id": CAPTURE_ID, "capture": handle})
        yield inference_pb2.GenerateResponse(delta={"text": " so", "token_ids": [7]})
        if self._script.endless:
            context.add_callback(self._script.cancelled.set)
            self._script.cancelled.wait(PATIENCE_SECONDS)
        yield inference_pb2.GenerateResponse(delta={"text": " it is", "token_ids": [8, 9]})
        yield inference_pb2.GenerateResponse(finished={})


class Store(store_pb2_grpc.StoreServiceServicer):
    def __init__(self, script: Script, *, holds: bool) -> None:
        self._script, self._holds = script, holds

    def GetCapture(self, request, context):
        self._check(context)
        return store_pb2.GetCaptureResponse(manifest=self._script.manifest())

    def ReadChunks(self, request, context):
        self._check(context)
        yield store_pb2.ReadChunksResponse(manifest=capture_pb2.CaptureManifest())
        for item in self._script.chunks:
            yield store_pb2.ReadChunksResponse(chunk=item)
        yield store_pb2.ReadChunksResponse(manifest=self._script.manifest())

    def _check(self, context):
        if not self._holds:
            failure = Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, "There is no such capture.", capture_id=CAPTURE_ID)
            context.abort_with_status(failure.to_status())


@contextmanager
def serving(script: Script, names=("holder",)):
    """Serve, and yield the endpoint. If there are several stores, the last one has the capture, if any has it."""
    servers = []

    def listen(add, servicer, service):
        server = grpc.server(futures.ThreadPoolExecutor(8))
        add(servicer, server)
        reflection.enable_server_reflection((service, reflection.SERVICE_NAME), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    inference = Inference(script)
    for name in names:
        holds = script.holds and name == names[-1]
        endpoint = listen(
            store_pb2_grpc.add_StoreServiceServicer_to_server,
            Store(script, holds=holds),
            "residuum.v1.StoreService",
        )
        inference.stores.append(placement_pb2.StoreAddress(name=name, endpoint=endpoint))
    try:
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        yield listen(add, inference, "residuum.v1.InferenceService")
    finally:
        for server in servers:
            server.stop(0).wait()


def every_pattern(dtype: str) -> np.ndarray:
    """Every 16-bit element as an unsigned integer, without signalling NaNs."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exponent, quiet = {"bfloat16": (0x7F80, 0x40), "float16": (0x7C00, 0x200)}[dtype]
    signalling = ((bits & exponent) == exponent) & ((bits & quiet) == 0) & ((bits & (quiet - 1)) != 0)
    bits[signalling] |= quiet
    return bits
