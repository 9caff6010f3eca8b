"""Ended calls of an asyncio server leave nothing in memory for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2, inference_pb2_grpc
from svc_common.logs import get_logger
from svc_common.rpc.serving import SERVING, AioErrorInterceptor
from svc_common.rpc.stall_timeouts import AioStallInterceptor
from svc_common.security.access import Access
from svc_common.security.authentication import AioAccessInterceptor

CALLS = 20
DEADLINE = 20.0
OF_A_CALL = ("RPCState", "_ServicerContext", "_MessageReceiver")
"""gRPC's objects of a call. While they exist, gRPC's core keeps the call."""


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    async def GetModelInfo(self, request, context):
        return inference_pb2.GetModelInfoResponse()

    async def Generate(self, request, context):
        for _ in range(3):
            yield inference_pb2.GenerateResponse()
        if request.request_id == "bad":
            raise Failure(Reason.ERROR_REASON_INVALID_FIELD, "scripted", field="request_id")
        if request.request_id == "endless":
            await asyncio.Event().wait()

    async def PutVectors(self, request_iterator, context):
        async for request in request_iterator:
            if request.vector.digest == b"bad":
                raise Failure(Reason.ERROR_REASON_INVALID_FIELD, "scripted", field="vector")
        return inference_pb2.PutVectorsResponse()


@asynccontextmanager
async def serving():
    log = get_logger("test")
    interceptors = [
        AioErrorInterceptor(log),
        AioAccessInterceptor(Access(None, [])),
        AioStallInterceptor(log, 20, 20),
    ]
    server = grpc.aio.server(interceptors=interceptors)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def unary(channel):
    await inference_pb2_grpc.InferenceServiceStub(channel).GetModelInfo(inference_pb2.GetModelInfoRequest())


async def streamed(channel, name="good"):
    request = inference_pb2.GenerateRequest(request_id=name)
    async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
        pass


async def broken_off(channel):
    with suppress(grpc.aio.AioRpcError):
        await streamed(channel, "bad")


async def left(channel):
    request = inference_pb2.GenerateRequest(request_id="endless")
    stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
    await stream.read()
    stream.cancel()


async def streaming(channel, digest=b"good"):
    request = inference_pb2.PutVectorsRequest()
    request.vector.digest = digest
    await inference_pb2_grpc.InferenceServiceStub(channel).PutVectors(iter([request] * 3))


async def refused(channel):
    with suppress(grpc.aio.AioRpcError):
        await streaming(channel, b"bad")


async def of_others(channel):
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


def in_memory():
    return sum(type(item).__name__ in OF_A_CALL for item in gc.get_objects())


async def until_few_are_left(earlier):
    """Wait until the last calls have ended. Other tests may keep an exception, and with it `earlier` objects."""
    while in_memory() - earlier >= CALLS:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("call", [unary, streamed, broken_off, left, streaming, refused, of_others])
async def test_a_call_that_has_ended_leaves_memory_without_a_collection(call):
    async with serving() as channel:
        await call(channel)
        gc.collect()
        earlier = in_memory()
        gc.disable()
        try:
            for _ in range(CALLS):
                await call(channel)
            await asyncio.wait_for(until_few_are_left(earlier), DEADLINE)
        finally:
            gc.enable()
