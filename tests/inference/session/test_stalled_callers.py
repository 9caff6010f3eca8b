"""Callers of Generate that stop reading: a real client on a real stream with a full window."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from inference_svc.engine.streams import Delta
from residuum.v1 import capture_pb2, inference_pb2_grpc
from svc_common.rpc.alarms import AioAlarm
from tests.inference.service_support import CAPTURE, DEADLINE, ask, failure_of, running_service, spec, stuck_after

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
"""A client whose window is 64 KiB. By default it grows to megabytes."""
STALL = 1.0
"""Enough time to read everything that is sent here, even on a busy machine."""
FULL = 200_000
"""Characters of one message: more than the client's window and the server's buffer."""


@asynccontextmanager
async def small_window(service):
    async with grpc.aio.insecure_channel(service.endpoint, options=SMALL_WINDOW) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def stalled_calls(service):
    labels = {"method": "Generate", "reason": "CALLER_STALLED"}
    return service.metrics.registry.get_sample_value("residuum_call_errors_total", labels) or 0


async def test_a_caller_that_stops_reading_loses_its_request_and_hears_why(store):
    async with running_service(store.endpoint, stall_seconds=STALL, max_requests=1) as service:
        service.engine.script = stuck_after(*[Delta("x" * FULL, [1])] * 5)
        async with small_window(service) as stub:
            stream = stub.Generate(ask(spec("r", CAPTURE)))
            assert (await stream.read()).HasField("started")
            await service.engine.until(lambda: service.engine.closed == ["r#0"])
            assert (await store.seal()).outcome == capture_pb2.CAPTURE_STATE_ABORTED
            assert service.registry.running == ()
            service.engine.script = stuck_after(Delta("y", [2], "length"))
            other = service.stub.Generate(ask())  # there is room again, although the first caller has not disconnected
            assert (await other.read()).HasField("started")
            assert stalled_calls(service) == 1
            read = 0
            while (event := await next_event(stream)) is not None:
                read += event.HasField("delta")
            failure = await failure_of(stream.read())
            assert failure.reason_name == "CALLER_STALLED"
            assert "--stall-seconds" in failure.message
            assert read < 5
            other.cancel()


async def next_event(stream):
    """Return the next event of a stream, or None if the stream failed."""
    try:
        return await stream.read()
    except grpc.aio.AioRpcError:
        return None


async def test_a_capture_with_unread_tokens_is_not_complete(store):
    async with running_service(store.endpoint, stall_seconds=STALL) as service:
        has_started = asyncio.Event()

        async def five_full(call):
            await has_started.wait()
            for _ in range(4):
                yield Delta("x" * FULL, [1])
                for _ in range(10):  # the service takes it out of its queue, where it would be merged with the next
                    await asyncio.sleep(0)
            yield Delta("x" * FULL, [1], "length")

        service.engine.script = five_full
        async with small_window(service) as stub:
            stream = stub.Generate(ask(spec("r", CAPTURE)))
            await stream.read()
            has_started.set()
            assert (await store.seal()).outcome == capture_pb2.CAPTURE_STATE_ABORTED
            assert stalled_calls(service) == 1
            stream.cancel()


async def test_a_caller_may_wait_for_tokens(store):
    async with running_service(store.endpoint, stall_seconds=STALL) as service:
        gates = {"slow": asyncio.Event()}

        async def script(call):
            if call.engine_id.startswith("slow"):
                await gates["slow"].wait()
                yield Delta("late", [1], "length")
                return
            for _ in range(5):
                yield Delta("x" * FULL, [1])
            await asyncio.Event().wait()

        service.engine.script = script
        slow = service.stub.Generate(ask(spec("slow")))
        assert (await slow.read()).HasField("started")
        async with small_window(service) as stub:
            for at in range(3):  # each one takes longer than the limit for unread data
                stalled = stub.Generate(ask(spec(f"stalled-{at}")))
                await stalled.read()
                await service.engine.until(lambda at=at: f"stalled-{at}#0" in service.engine.closed)
        gates["slow"].set()
        assert (await slow.read()).delta.text == "late"
        assert (await slow.read()).HasField("finished")


async def test_a_caller_that_leaves_while_it_is_waited_for_has_not_stalled(store):
    async with running_service(store.endpoint, stall_seconds=DEADLINE * 10) as service:
        service.engine.script = stuck_after(*[Delta("x" * FULL, [1])] * 5)
        async with small_window(service) as stub:
            stream = stub.Generate(ask(spec("r", CAPTURE)))
            await stream.read()
            stream.cancel()
            await service.engine.until(lambda: service.engine.closed == ["r#0"])
        assert (await store.seal()).outcome == capture_pb2.CAPTURE_STATE_ABORTED
        assert stalled_calls(service) == 0


@contextlib.contextmanager
def over(alarm, ring):
    wait = object()
    alarm.start(wait, ring)
    yield
    alarm.stop(wait)


async def test_an_alarm_rings_only_after_its_timeout():
    alarm, rung, early = AioAlarm(0.2), asyncio.Event(), []
    loop = asyncio.get_running_loop()
    for _ in range(100):
        with over(alarm, lambda: early.append("quick")):
            pass
    start = loop.time()
    with over(alarm, rung.set):
        await asyncio.wait_for(rung.wait(), DEADLINE)
    assert loop.time() - start >= 0.19  # the event loop's clock is coarse
    assert not early
    rung.clear()
    with over(alarm, rung.set):  # and again after a pause
        await asyncio.wait_for(rung.wait(), DEADLINE)


async def test_an_alarm_continues_after_a_failed_callback():
    alarm, rung = AioAlarm(0.05), asyncio.Event()

    def fail():
        raise RuntimeError("scripted")

    with over(alarm, fail), over(alarm, rung.set):
        await asyncio.wait_for(rung.wait(), DEADLINE)


@pytest.mark.parametrize("value", ["0", "-1"])
def test_the_timeout_must_be_positive(value):
    from pydantic import ValidationError

    from inference_svc.settings import InferenceSettings

    with pytest.raises(ValidationError, match="stall_seconds"):
        InferenceSettings(model="tiny", stall_seconds=value)
