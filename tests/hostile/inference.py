"""Attacks on the inference service. Each returns a short description of its outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from residuum.rpc.channels import open_aio_channel
from residuum.v1 import inference_pb2, inference_pb2_grpc, steering_pb2
from residuum.wire.limits import MAX_VECTORS_PER_CALL
from tests.hostile.http2 import Peer, ping_flood, rapid_reset
from tests.inference.service_support import JOY, ask, spec

MIB = 1 << 20
STUCK = 9
"""The token on which the scripted engine hangs."""

Stub = inference_pb2_grpc.InferenceServiceStub
REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


async def check(stub: Stub) -> None:
    """Check that a good request is served."""
    events = [event async for event in stub.Generate(ask(ids=(5, 6)), timeout=60)]
    assert events[-1].HasField("finished")


async def idle_streams(stub: Stub, count: int) -> str:
    """Generations that never produce a token."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_aio_channel(_endpoint(stub))) for _ in range(10)]
        calls = [Stub(channels[at % 10]).Generate(ask(ids=(STUCK,))) for at in range(count)]
        events = await asyncio.gather(*(call.read() for call in calls))
        assert all(event.HasField("started") for event in events)
        await check(stub)
        for call in calls:
            call.cancel()
    return f"{count} generations waited at once"


async def busy_streams(stub: Stub, count: int) -> str:
    """Many concurrent generations, repeatedly."""
    for _ in range(5):
        await asyncio.gather(*(check(stub) for _ in range(count)))
    return f"5 times {count} generations"


async def registrations(stub: Stub, count: int) -> str:
    """Registrations of the largest specs, which are never used."""
    operations = []
    for at in range(250):
        operation = steering_pb2.SteeringOperation(add=steering_pb2.Add(digest=at.to_bytes(32, "big"), scale=1.0))
        operation.layers.all = True
        operations.append(operation)
    request = inference_pb2.RegisterRequestRequest(spec=spec(operations=operations))
    return await _until_refused(lambda _: stub.RegisterRequest(request, timeout=60), count, "registrations")


async def vectors(stub: Stub, count: int) -> str:
    """An endless stream of vectors of any length."""
    long = inference_pb2.PutVectorsRequest(vector=JOY)
    long.vector.values = bytes(3 * MIB)
    short = inference_pb2.PutVectorsRequest(vector=JOY)
    for messages in ([long] * 20, [short] * (MAX_VECTORS_PER_CALL + 1)):
        await _until_refused(lambda _, sent=messages: stub.PutVectors(iter(sent), timeout=60), count, "")
    return f"{count} calls of 60 MiB of vectors, and {count} of {MAX_VECTORS_PER_CALL + 1}"


async def long_texts(stub: Stub, count: int) -> str:
    """Texts of 4 MiB."""
    request = ask()
    request.text = "x" * (4 * MIB - 1000)
    return await _until_refused(lambda _: _all(stub.Generate(request, timeout=60)), count, "texts of 4 MiB")


async def silent_calls(stub: Stub, count: int) -> str:
    """Calls without a message, and calls with nearly a whole message."""
    port = int(_endpoint(stub).rpartition(":")[2])

    def attack() -> int:
        peers = [Peer(port) for _ in range(count)]
        for peer in peers:
            peer.begin_message(peer.call("/residuum.v1.InferenceService/Generate"), 4 * MIB - 1, MIB)
        for peer in peers:
            peer.close()
        return len(peers)

    return f"{await asyncio.to_thread(attack)} calls were left unfinished"


async def abuse(stub: Stub, count: int) -> str:
    """Resets and pings as fast as possible."""
    port = int(_endpoint(stub).rpartition(":")[2])
    resets = await asyncio.to_thread(rapid_reset, port, count)
    pings = await asyncio.to_thread(ping_flood, port, count)
    return f"{resets} resets and {pings} pings before the service disconnected"


async def rows_to_unembed(stub: Stub, count: int) -> str:
    """Large calls of Unembed, all at once."""
    request = inference_pb2.UnembedRequest(rows=bytes(2 * MIB), num_top=0)
    calls = [stub.Unembed(request, timeout=120) for _ in range(count)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    # CANCELLED: so many messages do not all arrive within the seconds that the service waits for a first message.
    allowed = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
    assert {error.code() for error in refused} <= allowed, {error.code() for error in refused}
    assert len(refused) < count
    return f"{count} calls of 2 MiB, {len(refused)} of them refused"


async def _until_refused(call: Callable[[int], Awaitable[object]], count: int, what: str) -> str:
    accepted = 0
    for at in range(count):
        try:
            await call(at)
            accepted += 1
        except grpc.aio.AioRpcError as error:
            assert error.code() in REFUSED, error  # noqa: PT017 - some are accepted, and the others are refused like this
    return f"{accepted} of {count} {what} were accepted"


async def _all(events: object) -> list[object]:
    return [event async for event in events]


def _endpoint(stub: Stub) -> str:
    return stub.endpoint


ATTACKS: dict[str, Callable[[Stub], Awaitable[str]]] = {
    "1000 idle streams": lambda stub: idle_streams(stub, 1000),
    "200 busy streams": lambda stub: busy_streams(stub, 200),
    "registrations": lambda stub: registrations(stub, 1000),
    "vectors": lambda stub: vectors(stub, 5),
    "long texts": lambda stub: long_texts(stub, 20),
    "rows to unembed": lambda stub: rows_to_unembed(stub, 32),
    "silent calls": lambda stub: silent_calls(stub, 64),
    "HTTP/2 abuse": lambda stub: abuse(stub, 5000),
}
"""The attacks by name. Each takes a stub with its `endpoint`."""
