"""Captures of a generation in a real store: the manifest after each kind of end."""

from __future__ import annotations

import asyncio

import pytest

from inference_svc.engine.streams import Delta
from residuum.rpc.channels import open_aio_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from store_svc.captures.capture_names import CaptureName
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.inference.service_support import DEADLINE, LAYERS, ask, failure_of, running_service, spec, stuck_after
from tests.inference.taps_support import select
from tests.store.support import busy_writer

NO_ROWS = capture_pb2.CaptureSpec(layers=LAYERS, positions=select((1000, None)))
"""A capture that is complete as soon as it is sealed: in these tests no worker sends rows."""


@pytest.fixture
async def store(tmp_path):
    store = await asyncio.to_thread(Store, StoreSettings(listen="127.0.0.1:0", path=tmp_path / "store"))
    yield store
    await asyncio.to_thread(store.stop)


@pytest.fixture
async def real_store(store):
    return f"127.0.0.1:{store.port}"


@pytest.fixture
async def service(real_store):
    async with running_service(real_store) as running:
        yield running


@pytest.fixture
async def manifest(real_store):
    async with open_aio_channel(real_store) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)

        async def get(capture_id):
            request = store_pb2.GetCaptureRequest(capture_id=capture_id)
            request.wait.FromSeconds(int(DEADLINE))
            return (await stub.GetCapture(request, timeout=2 * DEADLINE)).manifest

        yield get


async def test_a_request_that_ends_normally_is_complete(service, manifest):
    await service.events(ask(spec("r", NO_ROWS), num_sequences=2))
    sealed = await manifest("r")
    assert sealed.state == capture_pb2.CAPTURE_STATE_COMPLETE
    assert [list(item.generated_token_ids) for item in sealed.sequences] == [[1, 2, 3]] * 2
    assert list(sealed.description.prompt_token_ids) == [5, 6, 7]


async def test_the_engine_generates_while_the_store_commits_the_capture(service, store, manifest):
    """But the caller gets nothing before the capture is open."""
    with busy_writer(store):
        events = asyncio.create_task(service.events(ask(spec("r", NO_ROWS))))
        await service.engine.until(lambda: "r#0" in service.engine.closed)
        assert not events.done()
        assert store._catalog.state_of(CaptureName("", "r")) is None
    await events
    sealed = await manifest("r")
    assert sealed.state == capture_pb2.CAPTURE_STATE_COMPLETE
    assert [list(item.generated_token_ids) for item in sealed.sequences] == [[1, 2, 3]]


async def test_a_dropped_stream_is_aborted(service, manifest):
    service.engine.script = stuck_after(Delta("x", [1]))
    stream = service.stub.Generate(ask(spec("r", NO_ROWS)))
    for _ in range(2):
        await stream.read()
    stream.cancel()
    sealed = await manifest("r")
    assert sealed.state == capture_pb2.CAPTURE_STATE_ABORTED
    assert list(sealed.sequences[0].generated_token_ids) == [1]


async def test_a_failed_request_is_incomplete_with_a_reason(service, manifest):
    async def script(call):
        yield Delta("x", [1])
        raise RuntimeError("out of luck")

    service.engine.script = script
    await failure_of(service.events(ask(spec("r", NO_ROWS))))
    sealed = await manifest("r")
    assert sealed.state == capture_pb2.CAPTURE_STATE_INCOMPLETE
    assert sealed.incomplete_reason == capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
    assert sealed.incomplete_detail == "The engine failed; see its log."


async def test_an_id_of_an_existing_capture_is_refused(real_store, manifest):
    """A new run of the service does not remember IDs of an earlier run, but the store does."""
    async with running_service(real_store) as first:
        await first.events(ask(spec("r", NO_ROWS)))
        await manifest("r")  # sealed: before that, an equal OpenCapture counts as a retry of the first one
    async with running_service(real_store) as second:
        failure = await failure_of(second.events(ask(spec("r", NO_ROWS))))
        assert (failure.reason_name, failure.metadata["capture_id"]) == ("CAPTURE_EXISTS", "r")
        assert not second.engine.calls


async def test_a_prompt_that_is_too_long_to_be_kept_is_refused_before_it_is_computed(service):
    capture = capture_pb2.CaptureSpec(keep_prompt=True)
    capture.MergeFrom(NO_ROWS)
    asked = ask(spec("r", capture))
    asked.text = "x" * 1_100_000
    failure = await failure_of(service.events(asked))
    assert (failure.reason_name, failure.metadata) == ("INVALID_FIELD", {"field": "capture.keep_prompt"})
    assert "too long to be kept" in failure.message
    assert not service.engine.calls
    asked.text = "x" * 1_000_000
    await service.events(asked)
