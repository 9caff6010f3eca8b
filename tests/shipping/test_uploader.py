"""The stream to a store that fails on purpose. Everything runs in one process."""

from __future__ import annotations

import threading

import pytest

from inference_svc.shipping.shipper import uploader as uploader_module
from inference_svc.shipping.shipper.control import ControlClient
from inference_svc.shipping.shipper.outbox import Outbox
from inference_svc.shipping.shipper.uploader import Uploader
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, errors_pb2, store_pb2
from svc_common.backoff import Backoff
from tests.shipping.support import DEADLINE, EndOfStream, Work
from tests.waiting import wait_for


@pytest.fixture
def start_uploader(control_path, monkeypatch):
    monkeypatch.setattr(uploader_module, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(uploader_module, "_LONGEST_DELAY_SECONDS", 0.05)
    started = []

    def start(endpoint, max_unacked_bytes=64 << 20):
        outbox = Outbox(max_unacked_bytes)
        uploader = Uploader(endpoint, outbox)
        client = ControlClient(control_path, lambda _, parcels: outbox.put(parcels))
        uploader.start()
        client.start()
        started.append((outbox, uploader, client))
        return uploader, outbox

    yield start
    for outbox, uploader, client in started:
        client.close()
        outbox.abandon()
        uploader.abandon()
        assert uploader.wait(DEADLINE)


@pytest.fixture
def work(start_producer):
    return Work(start_producer(ring_bytes=256 << 10))  # eight of `publish_some`


def publish_some(work, count=8, **size):
    for number in range(count):
        work.publish(f"capture-{number % 2}", range(number * 32, number * 32 + 32), **size)


def abort(context, reason):
    context.abort_with_status(Failure(reason, "scripted").to_status())


def test_everything_arrives_and_the_ring_is_used_again(work, start_store, start_uploader):
    store = start_store()
    start_uploader(store.endpoint)
    publish_some(work, count=50)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert (store.streams, store.repeats) == (1, 0)
    assert work.producer.stats().freed == 50


def test_large_extents_travel_in_several_frames(start_producer, start_store, start_uploader):
    work = Work(start_producer(ring_bytes=10 << 20))
    store = start_store()
    start_uploader(store.endpoint)
    publish_some(work, count=3, layers=36, width=1024)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert store.messages == 9


def test_losses_arrive(work, start_store, start_uploader):
    store = start_store()
    start_uploader(store.endpoint)
    loss = store_pb2.RowLoss(layers=[0, 1], positions=[5], reason=capture_pb2.INCOMPLETE_REASON_OVERFLOW, detail="full")
    work.producer.report_loss("capture", loss)
    assert work.producer.drain(DEADLINE)
    assert store.losses == [("capture", loss)]


@pytest.mark.parametrize(
    "reason",
    [Reason.ERROR_REASON_NOT_SERVING, Reason.ERROR_REASON_STORE_FULL, Reason.ERROR_REASON_INTERNAL],
    ids=errors_pb2.ErrorReason.Name,
)
def test_a_stream_that_ends_is_opened_again_and_nothing_is_missing(work, start_store, start_uploader, reason):
    failures = iter(range(5))

    def fail_each_third(store, request, context):
        if request.number == 3 and next(failures, None) is not None:
            abort(context, reason)

    store = start_store(fail_each_third)
    start_uploader(store.endpoint)
    publish_some(work, count=20)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert store.streams == 6


def test_acks_that_were_lost_cost_only_repeats(work, start_store, start_uploader):
    def first_stream_keeps_but_fails(store, request, context):
        if store.streams == 1:
            store.keep(request, context.peer())
            abort(context, Reason.ERROR_REASON_NOT_SERVING)

    store = start_store(first_stream_keeps_but_fails)
    start_uploader(store.endpoint)
    publish_some(work)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert store.repeats == 4 * 32


def test_a_store_that_starts_late_or_again_is_found(work, start_store, start_uploader):
    store = start_store()
    start_uploader(store.endpoint)
    publish_some(work, count=4)
    assert work.producer.drain(DEADLINE)
    store.stop()
    for number in range(8):
        work.publish("late", range(number * 32, number * 32 + 32))
    again = start_store(port=store.port)
    assert work.producer.drain(DEADLINE)
    assert {**store.rows, **again.rows} == work.expected


def test_a_silent_store_is_given_up_and_tried_again(work, start_store, start_uploader):
    released = threading.Event()

    def first_stream_is_silent(store, request, context):
        if store.streams == 1:
            released.wait(DEADLINE)

    store = start_store(first_stream_is_silent)
    uploader, outbox = start_uploader(store.endpoint)
    publish_some(work, count=4)
    wait_for(lambda: outbox.seconds_without_ack() > 0.1)
    uploader.restart_stream("test")
    assert work.producer.drain(DEADLINE)
    released.set()
    assert store.rows == work.expected
    assert store.streams == 2


def test_no_more_than_the_limit_is_under_way(work, start_store, start_uploader):
    gate = threading.Event()
    store = start_store(lambda *_: gate.wait(DEADLINE) and None)
    extent_bytes = 4 * 32 * 64 * 4
    _, outbox = start_uploader(store.endpoint, max_unacked_bytes=3 * extent_bytes)
    publish_some(work, count=8)
    wait_for(lambda: (len(outbox._in_flight), len(outbox._sources)) == (3, 5))
    assert outbox._unacked_bytes == 3 * extent_bytes
    gate.set()
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected


@pytest.mark.parametrize(
    "reason", [Reason.ERROR_REASON_UNKNOWN_CAPTURE, Reason.ERROR_REASON_CAPTURE_ENDED], ids=errors_pb2.ErrorReason.Name
)
def test_rows_of_unknown_captures_free_their_extent_silently(work, start_store, start_uploader, reason):
    store = start_store(lambda store, request, context: reason if request.capture_id == "capture-0" else None)
    uploader, _ = start_uploader(store.endpoint)
    publish_some(work)
    assert work.producer.drain(DEADLINE)
    assert store.losses == []
    assert {capture for capture, _, _ in store.rows} == {"capture-1"}
    assert uploader.num_rejected == 4
    assert store.streams == 1


def test_a_frame_damaged_once_is_sent_again(work, start_store, start_uploader):
    damaged = iter([Reason.ERROR_REASON_CHECKSUM_MISMATCH])
    store = start_store(lambda *_: next(damaged, None))
    start_uploader(store.endpoint)
    publish_some(work)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert store.losses == []


@pytest.mark.parametrize(
    ("reason", "sendings"),
    [(Reason.ERROR_REASON_CHECKSUM_MISMATCH, 2), (Reason.ERROR_REASON_INVALID_FIELD, 1)],
    ids=["checksum", "invalid"],
)
def test_rows_that_cannot_be_written_are_reported_lost(work, start_store, start_uploader, reason, sendings):
    refused = []

    def refuse_one_capture(store, request, context):
        if request.capture_id == "capture-0" and request.HasField("chunk"):
            refused.append(request.chunk.header)
            return reason
        return None

    store = start_store(refuse_one_capture)
    start_uploader(store.endpoint)
    publish_some(work, count=2)
    assert work.producer.drain(DEADLINE)
    assert len(refused) == sendings
    ((capture_id, loss),) = store.losses
    assert capture_id == "capture-0"
    assert loss.reason == capture_pb2.INCOMPLETE_REASON_WRITE_FAILED
    assert (loss.sites, loss.layers, loss.positions) == ([refused[0].site], refused[0].layers, refused[0].positions)
    assert "scripted" in loss.detail
    assert {capture for capture, _, _ in store.rows} == {"capture-1"}


def test_one_unreadable_message_costs_only_its_own_rows(work, start_store, start_uploader):
    def cannot_read(store, request, context):
        if request.HasField("chunk") and 64 in request.chunk.header.positions:
            abort(context, Reason.ERROR_REASON_INVALID_FIELD)

    store = start_store(cannot_read)
    start_uploader(store.endpoint)
    publish_some(work)
    assert work.producer.drain(DEADLINE)
    ((capture_id, loss),) = store.losses
    assert (capture_id, list(loss.positions)) == ("capture-0", list(range(64, 96)))
    assert store.rows == {key: row for key, row in work.expected.items() if key[2] not in range(64, 96)}


def test_a_stream_that_the_store_ends_politely_is_opened_again_after_a_delay(
    work, start_store, start_uploader, monkeypatch
):
    delays = []
    monkeypatch.setattr(Backoff, "next_delay", lambda self: delays.append(0.01) or 0.01)

    def say_goodbye_twice(store, request, context):
        if store.streams <= 2:
            raise EndOfStream

    store = start_store(say_goodbye_twice)
    start_uploader(store.endpoint)
    publish_some(work)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert (store.streams, len(delays)) == (3, 2)
