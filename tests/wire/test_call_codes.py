"""The status code of an asyncio call's span, for every kind of end."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import grpc.aio
import pytest

from residuum.rpc import tracing
from residuum.v1 import inference_pb2, inference_pb2_grpc

DEADLINE = 20.0
Code = grpc.StatusCode


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self):
        self.waits = asyncio.Event()
        """Set when a call has come that is not answered."""

    async def GetModelInfo(self, request, context):
        if request.check_store:
            self.waits.set()
            await asyncio.Event().wait()
        return inference_pb2.GetModelInfoResponse()

    async def Abort(self, request, context):
        await context.abort(Code.NOT_FOUND, "scripted")

    async def Generate(self, request, context):
        yield inference_pb2.GenerateResponse()
        if request.request_id == "bad":
            await context.abort(Code.DATA_LOSS, "scripted")
        if request.request_id == "endless":
            await asyncio.Event().wait()

    async def PutVectors(self, request_iterator, context):
        async for _ in request_iterator:
            pass
        return inference_pb2.PutVectorsResponse()


async def answered(stub):
    await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())


async def refused(stub):
    await stub.Abort(inference_pb2.AbortRequest())


async def late(stub):
    await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(check_store=True), timeout=0.2)


async def given_up(stub):
    async def wait():
        await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(check_store=True))

    task = asyncio.ensure_future(wait())
    await stub.waits.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def streamed(stub):
    async for _ in stub.Generate(inference_pb2.GenerateRequest()):
        pass


async def broken_off(stub):
    async for _ in stub.Generate(inference_pb2.GenerateRequest(request_id="bad")):
        pass


async def left(stub):
    call = stub.Generate(inference_pb2.GenerateRequest(request_id="endless"))
    await call.read()
    call.cancel()


async def dropped(stub):
    call = stub.Generate(inference_pb2.GenerateRequest(request_id="endless"))
    await call.read()
    del call
    gc.collect()


async def streaming(stub):
    await stub.PutVectors(iter([inference_pb2.PutVectorsRequest()] * 3))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (answered, Code.OK),
        (refused, Code.NOT_FOUND),
        (late, Code.DEADLINE_EXCEEDED),
        (given_up, Code.CANCELLED),
        (streamed, Code.OK),
        (broken_off, Code.DATA_LOSS),
        (left, Code.CANCELLED),
        (dropped, Code.CANCELLED),
        (streaming, Code.OK),
    ],
)
async def test_the_span_of_a_call_ends_once_with_its_code(monkeypatch, call, code):
    codes = []
    ended = asyncio.Event()
    monkeypatch.setattr(tracing, "_started", lambda _method: (None, []))
    monkeypatch.setattr(tracing, "end_span", lambda _made, found: (codes.append(found), ended.set()))
    server, servicer = grpc.aio.server(), Servicer()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        interceptors = tracing.aio_client_interceptors()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", interceptors=interceptors) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            stub.waits = servicer.waits
            with suppress(grpc.aio.AioRpcError):
                await call(stub)
            await asyncio.wait_for(ended.wait(), DEADLINE)
    finally:
        await server.stop(0)
    assert codes == [code]
