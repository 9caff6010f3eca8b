from __future__ import annotations

import threading

import pytest

from inference_svc.shipping.framing import Piece
from inference_svc.shipping.shipper.outbox import Outbox
from inference_svc.shipping.shipper.parcels import Delivery, Parcel
from residuum.v1 import errors_pb2, store_pb2
from tests.shipping.support import DEADLINE, make_header

REASON = errors_pb2.ERROR_REASON_INVALID_FIELD


def parcel(name, size=10):
    piece = Piece(make_header([0]), memoryview(bytes(size)))
    return Parcel(name, piece, Delivery(size, lambda: None), size)


def ack(through, *rejected):
    response = store_pb2.AppendChunksResponse(committed_through=through)
    for number in rejected:
        response.rejections.add(number=number, error=errors_pb2.ItemError(reason=REASON))
    return response


def settled_names(outbox, response):
    return [settled.parcel.capture_id for settled in outbox.acknowledge(response)]


@pytest.fixture
def outbox():
    return Outbox(max_unacked_bytes=30)


def take_all(outbox, stream, count):
    return [(number, item.capture_id) for number, item in (outbox.take(stream) for _ in range(count))]


def blocked_take(outbox, stream):
    taken = []
    thread = threading.Thread(target=lambda: taken.append(outbox.take(stream)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), f"take did not wait but returned {taken}"
    return thread, taken


def test_numbers_ascend_from_one_and_acks_settle_in_order(outbox):
    outbox.put([parcel("a"), parcel("b"), parcel("c")])
    stream = outbox.start_stream()
    assert take_all(outbox, stream, 3) == [(1, "a"), (2, "b"), (3, "c")]
    assert settled_names(outbox, ack(2)) == ["a", "b"]
    assert settled_names(outbox, ack(2)) == []
    assert settled_names(outbox, ack(3)) == ["c"]


def test_a_new_stream_sends_what_was_not_acked_first_and_in_order(outbox):
    outbox.put([parcel("a"), parcel("b"), parcel("c"), parcel("d")])
    take_all(outbox, outbox.start_stream(), 3)
    outbox.acknowledge(ack(1))
    assert outbox.end_stream() == 2
    assert take_all(outbox, outbox.start_stream(), 3) == [(1, "b"), (2, "c"), (3, "d")]


def test_take_waits_for_room_and_an_ack_makes_room(outbox):
    outbox.put(parcel(name) for name in "abcd")
    stream = outbox.start_stream()
    take_all(outbox, stream, 3)
    thread, taken = blocked_take(outbox, stream)
    outbox.acknowledge(ack(1))
    thread.join(DEADLINE)
    assert taken[0][0] == 4


def test_one_parcel_may_always_be_under_way(outbox):
    outbox.put([parcel("large", size=1000)])
    assert outbox.take(outbox.start_stream())[0] == 1


def test_parcels_are_made_only_when_there_is_room(outbox):
    made = []

    def make():
        for name in "abcdefgh":
            made.append(name)
            yield parcel(name)

    outbox.put(make())
    assert made == []
    stream = outbox.start_stream()
    take_all(outbox, stream, 3)
    blocked_take(outbox, stream)
    assert made == ["a", "b", "c", "d"]  # only the parcel that waits for room has been made
    assert outbox.end_stream() == 3
    stream = outbox.start_stream()
    assert take_all(outbox, stream, 3) == [(1, "a"), (2, "b"), (3, "c")]
    assert len(made) == 4
    outbox.acknowledge(ack(3))
    assert take_all(outbox, stream, 3) == [(4, "d"), (5, "e"), (6, "f")]
    assert outbox.abandon() == 5


def test_an_empty_source_is_nothing_to_send(outbox):
    outbox.put([])
    outbox.put([parcel("a")])
    outbox.put(iter(()))
    outbox.close()
    stream = outbox.start_stream()
    assert take_all(outbox, stream, 1) == [(1, "a")]
    assert outbox.take(stream) is None


def test_an_ended_stream_releases_its_reader(outbox):
    old = outbox.start_stream()
    thread, taken = blocked_take(outbox, old)
    outbox.end_stream()
    outbox.put([parcel("a")])
    thread.join(DEADLINE)
    assert taken == [None]
    assert outbox.take(old) is None


def test_a_rejection_waits_for_the_ack_that_covers_it(outbox):
    outbox.put([parcel("a"), parcel("b")])
    take_all(outbox, outbox.start_stream(), 2)
    assert outbox.acknowledge(ack(0, 2)) == []
    first, second = outbox.acknowledge(ack(2))
    assert first.error is None
    assert second.error.reason == REASON


def test_rejections_of_an_old_stream_do_not_hit_the_new_one(outbox):
    outbox.put([parcel("a"), parcel("b")])
    take_all(outbox, outbox.start_stream(), 2)
    outbox.acknowledge(ack(0, 1))
    take_all(outbox, outbox.start_stream(), 2)
    assert [settled.error for settled in outbox.acknowledge(ack(2))] == [None, None]


def test_a_malformed_message_is_found_by_sending_one_by_one(outbox):
    outbox.put([parcel("a"), parcel("bad"), parcel("c")])
    take_all(outbox, outbox.start_stream(), 3)
    assert outbox.suspect() is None
    stream = outbox.start_stream()
    take_all(outbox, stream, 1)
    blocked_take(outbox, stream)
    outbox.acknowledge(ack(1))  # "a" was not the malformed one
    assert outbox.suspect() is None
    take_all(outbox, outbox.start_stream(), 1)
    assert outbox.suspect().capture_id == "bad"
    assert take_all(outbox, outbox.start_stream(), 1) == [(1, "c")]


def test_an_ack_ends_sending_one_by_one(outbox):
    outbox.put(parcel(name) for name in "abc")
    outbox.suspect()
    stream = outbox.start_stream()
    take_all(outbox, stream, 1)
    outbox.acknowledge(ack(1))
    assert take_all(outbox, stream, 2) == [(2, "b"), (3, "c")]


def test_closing_ends_a_stream_when_nothing_waits(outbox):
    outbox.put([parcel("a")])
    outbox.close()
    stream = outbox.start_stream()
    assert take_all(outbox, stream, 1) == [(1, "a")]
    assert outbox.take(stream) is None
    outbox.end_stream()
    assert outbox.wait_for_parcels()  # it was not acknowledged, so it needs another stream
    take_all(outbox, outbox.start_stream(), 1)
    outbox.acknowledge(ack(1))
    assert not outbox.wait_for_parcels()


def test_abandoning_counts_what_is_left(outbox):
    outbox.put([parcel("a"), parcel("b")])
    stream = outbox.start_stream()
    take_all(outbox, stream, 1)
    assert outbox.abandon() == 2
    assert outbox.take(stream) is None
    assert not outbox.wait_for_parcels()


def test_an_ack_is_owed_only_while_something_is_under_way(outbox):
    assert outbox.seconds_without_ack() == 0
    outbox.put([parcel("a")])
    outbox.take(outbox.start_stream())
    assert outbox.seconds_without_ack() > 0
    outbox.acknowledge(ack(1))
    assert outbox.seconds_without_ack() == 0
