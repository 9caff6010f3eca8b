from __future__ import annotations

import gc
import os
import socket
import threading
from collections import Counter
from pathlib import Path

import pytest

from inference_svc.shipping.producer import ProducerClosedError, RingProducer
from inference_svc.shipping.protocol import Done, Hello, Leaving, LossReport, MessageReader, SlotReady
from residuum.v1 import store_pb2
from tests.shipping.support import DEADLINE, make_header, wait_until

HEADER = make_header([0, 1])


class FakeShipper:
    """A shipper's end of the control socket, played by hand."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE)
        self.socket.connect(str(path))
        self.reader = MessageReader()
        data, self.descriptors, _, _ = socket.recv_fds(self.socket, 65536, 1)
        self.messages = list(self.reader.feed(data))
        self.hello = self.receive()

    def receive(self):
        while not self.messages:
            data = self.socket.recv(65536)
            assert data, "the producer closed the connection"
            self.messages += self.reader.feed(data)
        return self.messages.pop(0)

    def send(self, *messages):
        self.socket.sendall(b"".join(message.encode() for message in messages))

    def close(self):
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.socket.close()


@pytest.fixture
def connect(control_path):
    shippers = []

    def connect(producer=None):
        before = producer.stats().connected_shippers if producer else 0
        shippers.append(FakeShipper(control_path))
        if producer:
            wait_until(lambda: producer.stats().connected_shippers == before + 1)
        return shippers[-1]

    yield connect
    for shipper in shippers:
        shipper.close()


def publish(producer, *capture_ids):
    for capture_id in capture_ids:
        producer.publish(producer.acquire(block=False), capture_id, HEADER)


def open_files():
    gc.collect()  # the mapping, which has a descriptor of its own, goes with the last view of it
    return len(list(Path("/proc/self/fd").iterdir()))


def in_thread(function):
    result = []

    def run():
        try:
            result.append(function())
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def test_a_slot_goes_to_the_shipper_and_comes_back(start_producer, connect):
    producer = start_producer(num_slots=2, slot_bytes=5000)
    publish(producer, "a")
    shipper = connect()
    assert shipper.hello == Hello(2, 5000, 8192)
    message = shipper.receive()
    assert message == SlotReady(message.ticket, 0, "a", HEADER)
    assert producer.stats().slots_used == 1
    shipper.send(Done(message.ticket))
    assert producer.drain(DEADLINE)
    stats = producer.stats()
    assert (stats.slots_used, stats.published, stats.freed) == (0, 1, 1)


def test_acquire_without_waiting_returns_none_when_full(start_producer):
    producer = start_producer(num_slots=2)
    assert [producer.acquire(block=False) for _ in range(3)] == [0, 1, None]
    assert producer.fill == 1
    producer.release(1)
    assert producer.fill == 0.5
    assert producer.acquire(block=False) == 1


def test_acquire_waits_until_a_slot_is_given_back(start_producer, connect):
    producer = start_producer(num_slots=1)
    publish(producer, "a")
    shipper = connect()
    ticket = shipper.receive().ticket
    thread, result = in_thread(lambda: producer.acquire(block=True))
    wait_until(lambda: producer.stats().waits)
    assert thread.is_alive()
    shipper.send(Done(ticket))
    thread.join(DEADLINE)
    assert result == [0]
    assert producer.stats().seconds_waited > 0


def test_closing_wakes_a_waiting_acquire(start_producer):
    producer = start_producer(num_slots=1)
    publish(producer, "a")
    thread, result = in_thread(lambda: producer.acquire(block=True))
    wait_until(lambda: producer.stats().waits)
    producer.close()
    thread.join(2)  # it looks around by itself every 5 s: that is not what should wake it
    assert not thread.is_alive()
    assert isinstance(result[0], ProducerClosedError)


def test_a_closed_producer_takes_nothing_and_leaves_nothing(start_producer, control_path):
    producer = start_producer()
    producer.close()
    producer.close()
    assert not control_path.exists()
    with pytest.raises(ProducerClosedError):
        producer.publish(0, "a", HEADER)
    with pytest.raises(ProducerClosedError):
        producer.report_loss("a", store_pb2.RowLoss())


def test_closing_what_was_never_started_leaves_no_descriptor(control_path):
    before = open_files()
    RingProducer(control_path, num_slots=1, slot_bytes=1).close()
    assert open_files() == before


def test_drain_waits_for_slots_and_losses(start_producer, connect):
    producer = start_producer()
    loss = store_pb2.RowLoss(layers=[1], positions=[7])
    publish(producer, "a")
    producer.report_loss("a", loss)
    shipper = connect()
    slot, report = shipper.receive(), shipper.receive()
    assert report == LossReport(report.ticket, "a", loss)
    shipper.send(Done(slot.ticket))
    wait_until(lambda: producer.stats().freed)
    assert not producer.drain(0)
    shipper.send(Done(report.ticket))
    assert producer.drain(DEADLINE)


@pytest.mark.parametrize("header", [make_header([0], width=300), make_header([])], ids=["too-large", "empty"])
def test_what_does_not_fit_a_slot_is_refused_at_once(start_producer, header):
    producer = start_producer(slot_bytes=4096)
    index = producer.acquire(block=False)
    with pytest.raises(ValueError, match="do not fit"):
        producer.publish(index, "a", header)
    assert producer.stats().published == 0


def test_a_lost_shippers_slots_go_to_the_next_one_in_order(start_producer, connect):
    producer = start_producer()
    publish(producer, "a", "b", "a")
    first = connect()
    messages = [first.receive() for _ in range(3)]
    first.send(Done(messages[1].ticket))
    wait_until(lambda: producer.stats().freed)
    first.close()
    second = connect()
    assert [second.receive() for _ in range(2)] == [messages[0], messages[2]]


def test_a_lost_shippers_slots_go_to_one_that_is_there(start_producer, connect):
    producer = start_producer(num_slots=32)
    first, second = connect(producer), connect(producer)
    captures = [f"capture-{number}" for number in range(32)]
    publish(producer, *captures)
    seen = set()
    first.close()
    while len(seen) < 32:
        seen.add(second.receive().capture_id)


def test_a_capture_stays_with_one_shipper_and_both_have_work(start_producer, connect):
    producer = start_producer(num_slots=128)
    shippers = [connect(producer), connect(producer)]
    publish(producer, *[f"capture-{number % 32}" for number in range(128)])
    seen = [Counter(), Counter()]
    for shipper, captures in zip(shippers, seen, strict=True):
        shipper.socket.settimeout(0.2)
        try:
            while True:
                captures[shipper.receive().capture_id] += 1
        except TimeoutError:
            pass
    assert not seen[0].keys() & seen[1].keys()
    assert set((seen[0] + seen[1]).values()) == {4}
    assert len(seen[0] + seen[1]) == 32
    assert seen[0]
    assert seen[1]


def test_a_leaving_shipper_keeps_what_it_has_and_gets_no_more(start_producer, connect):
    producer = start_producer()
    publish(producer, "a")
    shipper = connect()
    ticket = shipper.receive().ticket
    shipper.send(Leaving(), Done(ticket))
    wait_until(lambda: producer.stats().freed)
    publish(producer, "b")
    other = connect()
    assert other.receive().capture_id == "b"
    shipper.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        shipper.socket.recv(1)


def test_what_comes_back_goes_out_before_what_is_newer(start_producer, connect):
    producer = start_producer()
    publish(producer, "a", "b")
    leaving = connect(producer)
    leaving.send(Leaving())
    wait_until(lambda: producer.stats().connected_shippers == 0)
    publish(producer, "c")
    leaving.close()
    other = connect(producer)
    assert [other.receive().capture_id for _ in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize("data", [b"\xff" * 64, Done(99).encode(), Hello(1, 1, 1).encode()])
def test_a_peer_that_talks_nonsense_is_dropped_alone(start_producer, connect, data):
    producer = start_producer()
    publish(producer, "a")
    bad = connect()
    bad.receive()
    bad.socket.sendall(data)
    assert bad.socket.recv(1) == b""
    good = connect()
    good.send(Done(good.receive().ticket))
    assert producer.drain(DEADLINE)


def test_a_late_done_cannot_free_a_slot_that_was_filled_again(start_producer, connect):
    producer = start_producer(num_slots=1)
    publish(producer, "a")
    shipper = connect()
    ticket = shipper.receive().ticket
    shipper.send(Done(ticket))
    assert producer.drain(DEADLINE)
    publish(producer, "b")
    assert shipper.receive().index == 0
    shipper.send(Done(ticket))
    assert shipper.socket.recv(1) == b""
    assert producer.stats().freed == 1


def test_a_path_that_cannot_be_listened_on_is_named(tmp_path):
    path = tmp_path / ("x" * 120)
    before = open_files()
    with pytest.raises(OSError, match="cannot listen for shippers"):
        RingProducer(path, num_slots=1, slot_bytes=1)
    assert open_files() == before


def test_a_worker_takes_over_the_path_of_one_that_died(control_path, start_producer, connect):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(control_path))
    dead.close()
    producer = start_producer()
    publish(producer, "a")
    assert connect().receive().capture_id == "a"
