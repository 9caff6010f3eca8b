from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from inference_svc.shipping.figures import figures_path, read_figures
from inference_svc.shipping.protocol import MAX_BODY_BYTES, Done, ExtentReady, Hello, Leaving, LossReport, MessageReader
from inference_svc.shipping.ring import EXTENT_ALIGNMENT, Extent
from inference_svc.shipping.worker import dispatcher
from inference_svc.shipping.worker import producer as producer_module
from inference_svc.shipping.worker.producer import Filled, ProducerClosedError, RingProducer
from residuum.v1 import capture_pb2, store_pb2, tensor_pb2
from tests.shipping.support import DEADLINE, make_header
from tests.waiting import wait_for

HEADER = make_header([0, 1])
NBYTES = 2048
"""The size of the rows that HEADER describes."""
PAGE = 4096


class FakeShipper:
    """The shipper's side of the control socket, played by the test."""

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
            wait_for(lambda: producer.stats().connected_shippers == before + 1)
        return shippers[-1]

    yield connect
    for shipper in shippers:
        shipper.close()


def publish(producer, *capture_ids):
    for capture_id in capture_ids:
        producer.publish(producer.acquire(NBYTES, block=False), capture_id, [HEADER])


def open_files():
    """The process's memfds and Unix sockets, which are all that a producer opens.

    Other descriptors do not count: gRPC closes idle connections of earlier tests at any moment.
    """
    gc.collect()  # the mapping has its own descriptor, which closes with the last view
    opened = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, as the one that listed the folder is
            target = str(descriptor.readlink())
            if target.startswith("/memfd:") or (target.startswith("socket:") and is_unix(int(descriptor.name))):
                opened.add((descriptor.name, target))
    return opened


def is_unix(descriptor):
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family == socket.AF_UNIX


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


def test_an_extent_goes_to_the_shipper_and_comes_back(start_producer, connect):
    producer = start_producer(ring_bytes=5000)
    publish(producer, "a")
    shipper = connect()
    assert shipper.hello == Hello(8192)
    assert producer.ring_bytes == producer.memory.nbytes == 8192
    message = shipper.receive()
    assert message == ExtentReady(message.ticket, 0, "a", (HEADER,))
    stats = producer.stats()
    assert (stats.ring_bytes, stats.bytes_used) == (8192, NBYTES)
    shipper.send(Done(message.ticket))
    assert producer.drain(DEADLINE)
    stats = producer.stats()
    assert (stats.bytes_used, stats.published, stats.freed) == (0, 1, 1)


def test_an_extent_with_several_headers_has_one_ticket(start_producer, connect):
    producer = start_producer()
    headers = [make_header([number], layers=1 + number) for number in range(3)]
    extent = producer.acquire(6 * 256 + 100, block=False)  # more than they need
    producer.publish(extent, "a", headers)
    shipper = connect()
    message = shipper.receive()
    assert message == ExtentReady(message.ticket, extent.offset, "a", tuple(headers))
    shipper.send(Done(message.ticket))
    assert producer.drain(DEADLINE)
    assert (producer.stats().published, producer.stats().freed, producer.stats().bytes_used) == (1, 1, 0)


def test_acquire_without_waiting_returns_none_when_no_run_is_long_enough(start_producer):
    producer = start_producer(ring_bytes=PAGE)
    extents = [producer.acquire(size, block=False) for size in (1000, 1000, 1024, 1)]
    assert extents == [(0, 1000), (1024, 1000), (2048, 1024), (3072, 1)]
    assert producer.stats().bytes_used == 3072 + EXTENT_ALIGNMENT
    producer.release(extents[0])
    producer.release(extents[2])
    assert producer.stats().bytes_used == 1024 + EXTENT_ALIGNMENT
    assert producer.acquire(1025, block=False) is None  # there is enough room, but not contiguous
    producer.release(extents[1])
    assert producer.acquire(3072, block=False) == Extent(0, 3072)
    assert producer.stats().waits == 0


def test_writes_to_an_extent_stay_within_it(start_producer):
    producer = start_producer(ring_bytes=PAGE)
    first, second = (producer.acquire(300, block=False) for _ in range(2))
    producer.view(first)[:] = 1
    producer.view(second)[:] = 2
    assert producer.view(first).nbytes == 300
    assert (set(producer.view(first).tolist()), set(producer.view(second).tolist())) == ({1}, {2})
    assert np.shares_memory(producer.view(second), producer.memory)


@pytest.mark.parametrize("nbytes", [0, -1, PAGE + 1])
def test_a_size_that_can_never_be_allocated_is_refused(start_producer, nbytes):
    producer = start_producer(ring_bytes=PAGE)
    with pytest.raises(ValueError, match="cannot be allocated"):
        producer.acquire(nbytes, block=True)


def test_an_extent_is_given_back_or_published_once(start_producer):
    producer = start_producer()
    released, published = producer.acquire(NBYTES, block=False), producer.acquire(NBYTES, block=False)
    producer.release(released)
    producer.publish(published, "a", [HEADER])
    for extent in (released, published):
        with pytest.raises(ValueError, match="not acquired"):
            producer.release(extent)
        with pytest.raises(ValueError, match="not acquired"):
            producer.publish(extent, "a", [HEADER])
    assert producer.stats().bytes_used == NBYTES


def test_acquire_waits_until_an_extent_is_given_back(start_producer, connect):
    producer = start_producer(ring_bytes=PAGE)
    publish(producer, "a", "a")
    shipper = connect()
    tickets = [shipper.receive().ticket for _ in range(2)]
    thread, result = in_thread(lambda: producer.acquire(PAGE, block=True))
    wait_for(lambda: producer.stats().waits)
    shipper.send(Done(tickets[1]))
    wait_for(lambda: producer.stats().freed)
    assert thread.is_alive()  # only half of the room is free
    shipper.send(Done(tickets[0]))
    thread.join(DEADLINE)
    assert result == [Extent(0, PAGE)]
    assert producer.stats().seconds_waited > 0


def test_a_wait_counts_while_it_goes_on(start_producer, control_path):
    """It may last as long as the store is away. The alert about a model that waits must not wait for its end."""
    producer = start_producer(ring_bytes=PAGE)
    extent = producer.acquire(PAGE, block=False)
    thread, result = in_thread(lambda: producer.acquire(PAGE, block=True))
    wait_for(lambda: producer.stats().seconds_waited > 0)
    wait_for(lambda: read_figures(figures_path(control_path)).get("seconds_waited", 0) > 0, "the scraped figures")
    assert thread.is_alive()
    before = producer.stats().seconds_waited
    producer.release(extent)
    thread.join(DEADLINE)
    assert result == [extent]
    after = producer.stats().seconds_waited
    assert after >= before
    assert producer.stats().seconds_waited == after  # it has ended


def test_releasing_wakes_a_waiting_acquire(start_producer, monkeypatch):
    monkeypatch.setattr(dispatcher, "_TICK_SECONDS", 2 * DEADLINE)  # the next tick must not be the reason
    producer = start_producer(ring_bytes=PAGE)
    extent = producer.acquire(1, block=False)
    thread, result = in_thread(lambda: producer.acquire(PAGE, block=True))
    wait_for(lambda: producer.stats().waits)
    producer.release(extent)
    thread.join(DEADLINE)
    assert result == [Extent(0, PAGE)]


def test_closing_wakes_a_waiting_acquire(start_producer, monkeypatch):
    monkeypatch.setattr(dispatcher, "_TICK_SECONDS", 2 * DEADLINE)  # as above
    producer = start_producer(ring_bytes=PAGE)
    publish(producer, "a", "a")
    thread, result = in_thread(lambda: producer.acquire(1, block=True))
    wait_for(lambda: producer.stats().waits)
    producer.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert isinstance(result[0], ProducerClosedError)


def test_a_closed_producer_refuses_calls_and_leaves_no_descriptors(start_producer, control_path):
    producer = start_producer()
    extent = producer.acquire(NBYTES, block=False)
    producer.close()
    producer.close()
    assert not control_path.exists()
    with pytest.raises(ProducerClosedError):
        producer.publish(extent, "a", [HEADER])
    with pytest.raises(ProducerClosedError):
        producer.acquire(NBYTES, block=False)
    with pytest.raises(ProducerClosedError):
        producer.report_loss("a", store_pb2.RowLoss())


def test_closing_an_unstarted_producer_leaves_no_descriptor(control_path):
    before = open_files()
    RingProducer(control_path, ring_bytes=1).close()
    assert open_files() == before


def test_drain_waits_for_extents_and_losses(start_producer, connect):
    producer = start_producer()
    loss = store_pb2.RowLoss(layers=[1], positions=[7])
    publish(producer, "a")
    producer.report_loss("a", loss)
    shipper = connect()
    ready, report = shipper.receive(), shipper.receive()
    assert report == LossReport(report.ticket, "a", loss)
    shipper.send(Done(ready.ticket))
    wait_for(lambda: producer.stats().freed)
    assert not producer.drain(0)
    shipper.send(Done(report.ticket))
    assert producer.drain(DEADLINE)


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([], "do not fit"),
        ([make_header([])], "describes no rows"),
        ([HEADER, make_header([])], "describes no rows"),
        ([make_header([0], width=129)], "do not fit"),
        ([make_header([0]), make_header([1, 2])], "do not fit"),
        ([HEADER, make_header([0], dtype=0)], "element type"),
    ],
    ids=["none", "empty", "second-empty", "too-large", "together-too-large", "no-dtype"],
)
def test_headers_that_do_not_fit_an_extent_are_refused_at_once(start_producer, headers, why):
    producer = start_producer()
    extent = producer.acquire(NBYTES, block=False)
    with pytest.raises(ValueError, match=why):
        producer.publish(extent, "a", headers)
    assert producer.stats().published == 0
    producer.publish(extent, "a", [HEADER])


def test_more_headers_than_a_message_holds_are_refused(start_producer):
    producer = start_producer(ring_bytes=64 << 20)
    header = capture_pb2.ChunkHeader(dtype=HEADER.dtype, width=1, layers=[0], positions=range(1 << 16))
    extent = producer.acquire(64 << 20, block=False)
    with pytest.raises(ValueError, match="message"):
        producer.publish(extent, "a", [header] * (MAX_BODY_BYTES // header.ByteSize() + 1))
    producer.release(extent)


class Allotted(RuleBasedStateMachine):
    """Extents of any size, taken, released, published and acknowledged in any order."""

    extents = Bundle("extents")

    def __init__(self):
        super().__init__()
        self.folder = TemporaryDirectory()
        self.producer = RingProducer(Path(self.folder.name) / "ring", ring_bytes=PAGE)
        self.producer.start()
        self.shipper = FakeShipper(Path(self.folder.name) / "ring")
        self.taken = {}

    def teardown(self):
        self.shipper.close()
        self.producer.close()
        self.folder.cleanup()

    @rule(target=extents, nbytes=st.integers(1, PAGE))
    def acquire(self, nbytes):
        extent = self.producer.acquire(nbytes, block=False)
        if extent is None:
            assert self.longest_run() < nbytes
            return multiple()
        assert extent.nbytes == nbytes
        assert extent.offset % EXTENT_ALIGNMENT == 0
        assert 0 <= extent.offset <= PAGE - nbytes
        self.taken[extent] = None
        return extent

    @rule(extent=consumes(extents))
    def release(self, extent):
        self.producer.release(extent)
        del self.taken[extent]

    @rule(extent=consumes(extents), parts=st.integers(1, 3))
    def publish(self, extent, parts):
        header = capture_pb2.ChunkHeader(dtype=tensor_pb2.DATA_TYPE_BFLOAT16, width=1, layers=[0], positions=[0])
        if 2 * parts > extent.nbytes:
            with pytest.raises(ValueError, match="do not fit"):
                self.producer.publish(extent, "a", parts * [header])
            self.release(extent)
            return
        self.producer.publish(extent, "a", parts * [header])
        message = self.shipper.receive()
        assert (message.offset, len(message.headers)) == (extent.offset, parts)
        self.taken[extent] = message.ticket

    @precondition(lambda self: any(self.taken.values()))
    @rule(data=st.data())
    def acknowledge(self, data):
        extent = data.draw(st.sampled_from([extent for extent, ticket in self.taken.items() if ticket]))
        freed = self.producer.stats().freed
        self.shipper.send(Done(self.taken.pop(extent)))
        wait_for(lambda: self.producer.stats().freed > freed)

    @precondition(lambda self: all(self.taken.values()))
    @rule()
    def wait_for_everything(self):
        thread, result = in_thread(lambda: self.producer.acquire(PAGE, block=True))
        self.shipper.send(*map(Done, self.taken.values()))
        thread.join(DEADLINE)
        assert result == [Extent(0, PAGE)]
        self.producer.release(result[0])
        self.taken.clear()

    @invariant()
    def none_overlap(self):
        units = [unit for extent in self.taken for unit in self.units(extent)]
        assert len(units) == len(set(units))
        assert self.producer.stats().bytes_used == len(units) * EXTENT_ALIGNMENT

    def longest_run(self):
        taken = {unit for extent in self.taken for unit in self.units(extent)}
        bits = "".join("x" if unit in taken else "." for unit in range(PAGE // EXTENT_ALIGNMENT))
        return max(map(len, bits.split("x"))) * EXTENT_ALIGNMENT

    @staticmethod
    def units(extent):
        return range(extent.offset // EXTENT_ALIGNMENT, -(-(extent.offset + extent.nbytes) // EXTENT_ALIGNMENT))


Allotted.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
test_extents_in_any_order_never_overlap_and_all_come_back = Allotted.TestCase


def test_a_lost_shippers_extents_go_to_the_next_one_in_order(start_producer, connect):
    producer = start_producer()
    publish(producer, "a", "b", "a")
    first = connect()
    messages = [first.receive() for _ in range(3)]
    first.send(Done(messages[1].ticket))
    wait_for(lambda: producer.stats().freed)
    first.close()
    second = connect()
    assert [second.receive() for _ in range(2)] == [messages[0], messages[2]]


def test_a_lost_shipper_is_forgotten_although_a_new_process_still_has_its_connection(start_producer, connect):
    """Until a new process runs its own program, it has all descriptors of this process."""
    producer = start_producer()
    first, second = connect(producer), connect(producer)
    kept = producer._dispatcher._links[0].connection.fileno()
    with subprocess.Popen(["sleep", "60"], pass_fds=[kept]) as process:
        first.close()
        wait_for(lambda: producer.stats().connected_shippers == 1, "the end of the connection")
        publish(producer, "capture")
        second.send(Done(second.receive().ticket))
        assert producer.drain(DEADLINE)
        process.kill()


def test_a_lost_shippers_extents_go_to_a_connected_shipper(start_producer, connect):
    producer = start_producer()
    first, second = connect(producer), connect(producer)
    captures = [f"capture-{number}" for number in range(32)]
    publish(producer, *captures)
    seen = set()
    first.close()
    while len(seen) < 32:
        seen.add(second.receive().capture_id)


def test_a_capture_stays_with_one_shipper_and_captures_spread_over_shippers(start_producer, connect):
    producer = start_producer()
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


def test_captures_are_spread_evenly_over_shippers(start_producer, connect):
    producer = start_producer()
    shippers = [connect(producer) for _ in range(4)]
    publish(producer, *[f"capture-{number}" for number in range(32)])
    for shipper in shippers:
        assert len({shipper.receive().capture_id for _ in range(8)}) == 8


def test_a_capture_without_items_under_way_goes_to_the_shipper_with_the_fewest_bytes(start_producer, connect):
    producer = start_producer()
    first, second = connect(producer), connect(producer)
    publish(producer, "a", "b")
    ticket = second.receive().ticket if first.receive().capture_id == "a" else 0
    second.send(Done(ticket))
    wait_for(lambda: producer.stats().freed)
    publish(producer, "b", "c", "a")
    assert [second.receive().capture_id for _ in range(1)] == ["b"]
    assert sorted(first.receive().capture_id for _ in range(2)) == ["a", "c"]


def test_a_leaving_shipper_keeps_its_items_and_gets_no_more(start_producer, connect):
    producer = start_producer()
    publish(producer, "a")
    shipper = connect()
    ticket = shipper.receive().ticket
    shipper.send(Leaving(), Done(ticket))
    wait_for(lambda: producer.stats().freed)
    publish(producer, "b")
    other = connect()
    assert other.receive().capture_id == "b"
    shipper.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        shipper.socket.recv(1)


def test_returned_items_go_out_before_newer_ones(start_producer, connect):
    producer = start_producer()
    publish(producer, "a", "b")
    leaving = connect(producer)
    leaving.send(Leaving())
    wait_for(lambda: producer.stats().connected_shippers == 0)
    publish(producer, "c")
    leaving.close()
    other = connect(producer)
    assert [other.receive().capture_id for _ in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize("data", [b"\xff" * 64, Done(99).encode(), Hello(1).encode()])
def test_only_a_peer_with_invalid_messages_is_disconnected(start_producer, connect, data):
    producer = start_producer()
    publish(producer, "a")
    bad = connect()
    bad.receive()
    bad.socket.sendall(data)
    assert bad.socket.recv(1) == b""
    good = connect()
    good.send(Done(good.receive().ticket))
    assert producer.drain(DEADLINE)


def test_a_late_done_cannot_free_bytes_that_were_filled_again(start_producer, connect):
    producer = start_producer()
    publish(producer, "a")
    shipper = connect()
    ticket = shipper.receive().ticket
    shipper.send(Done(ticket))
    assert producer.drain(DEADLINE)
    publish(producer, "b")
    assert shipper.receive().offset == 0
    shipper.send(Done(ticket))
    assert shipper.socket.recv(1) == b""
    assert producer.stats().freed == 1


def test_a_path_that_cannot_be_listened_on_is_named(tmp_path):
    path = tmp_path / ("x" * 120)
    before = open_files()
    with pytest.raises(OSError, match="cannot listen for shippers"):
        RingProducer(path, ring_bytes=1)
    assert open_files() == before


def test_a_worker_takes_over_the_path_of_one_that_died(control_path, start_producer, connect):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(control_path))
    dead.close()
    producer = start_producer()
    publish(producer, "a")
    assert connect().receive().capture_id == "a"


def test_extents_are_published_together_or_not_at_all(start_producer, connect):
    producer = start_producer()
    shipper = connect(producer)
    extents = [producer.acquire(NBYTES, block=False) for _ in range(3)]
    headers = [HEADER.SerializeToString()]
    good = Filled(extents[0], "a", headers, NBYTES)
    for bad, why in (
        (Filled(extents[1], "b", [], NBYTES), "do not fit"),
        (Filled(extents[1], "b", headers, 0), "do not fit"),
        (Filled(extents[1], "b", headers, NBYTES + 1), "do not fit"),
        (Filled(Extent(1 << 20, NBYTES), "b", headers, NBYTES), "not acquired"),
    ):
        with pytest.raises(ValueError, match=why):
            producer.publish_all([good, bad])
    assert producer.stats().published == 0
    producer.publish_all(
        [good._replace(extent=extent, capture_id=name) for extent, name in zip(extents, "abc", strict=True)]
    )
    assert [shipper.receive().capture_id for _ in extents] == ["a", "b", "c"]
    assert producer.stats().published == 3


def test_the_thread_that_publishes_an_extent_sends_it(start_producer, connect):
    producer = start_producer()
    shipper = connect(producer)
    resume = threading.Event()
    producer._dispatcher._on_round = resume.wait
    producer._dispatcher.wake()
    try:
        publish(producer, "a", "b")
        assert [shipper.receive().capture_id for _ in range(2)] == ["a", "b"]
    finally:
        resume.set()


def test_messages_that_do_not_fit_the_socket_follow_in_order(start_producer, connect):
    producer = start_producer()
    shipper = connect(producer)
    losses = [store_pb2.RowLoss(layers=[number], positions=range(4096)) for number in range(200)]
    for loss in losses:
        producer.report_loss("a", loss)
    reports = [shipper.receive() for _ in losses]
    assert [report.loss for report in reports] == losses
    shipper.send(*[Done(report.ticket) for report in reports])
    assert producer.drain(DEADLINE)


def test_acknowledgements_may_wait_while_there_is_room_and_nobody_waits_for_them(start_producer):
    producer = start_producer(ring_bytes=4 * PAGE)
    assert producer._may_pause()
    extent = producer.acquire(4 * PAGE, block=False)
    assert not producer._may_pause()
    producer.release(extent)
    publish(producer, "a")
    assert producer._may_pause()
    thread, result = in_thread(lambda: producer.acquire(4 * PAGE, block=True))
    wait_for(lambda: producer.stats().waits)
    assert not producer._may_pause()
    producer.close()
    thread.join(DEADLINE)
    assert producer._may_pause()
    assert isinstance(result[0], ProducerClosedError)


def test_a_waiting_call_ends_a_pause(start_producer, connect, monkeypatch):
    monkeypatch.setattr(dispatcher, "_PAUSE_MS", 2 * DEADLINE * 1000)
    producer = start_producer()
    shipper = connect()
    publish(producer, "a")
    shipper.send(Done(shipper.receive().ticket))
    assert producer.drain(DEADLINE)


def test_a_call_that_does_not_wait_takes_the_room_of_acknowledgements_that_gather(start_producer, connect, monkeypatch):
    """Rows of a capture that sheds must not be lost because acknowledgements gather."""
    monkeypatch.setattr(dispatcher, "_PAUSE_MS", 2 * DEADLINE * 1000)
    monkeypatch.setattr(producer_module, "_ROUND_SECONDS", DEADLINE)
    producer = start_producer(ring_bytes=4 * PAGE)
    shipper = connect()
    publish(producer, "a")
    wait_for(lambda: producer._dispatcher.is_pausing, "a pause")
    shipper.send(Done(shipper.receive().ticket))
    assert producer.acquire(4 * PAGE, block=False)
    assert producer.stats().waits == 0


def test_a_call_that_does_not_wait_is_refused_at_once_if_no_acknowledgements_gather(start_producer, monkeypatch):
    monkeypatch.setattr(producer_module, "_ROUND_SECONDS", 2 * DEADLINE)
    producer = start_producer(ring_bytes=4 * PAGE)
    assert not producer._dispatcher.is_pausing
    assert producer.acquire(4 * PAGE, block=False)
    started = time.monotonic()
    assert producer.acquire(PAGE, block=False) is None
    assert time.monotonic() - started < DEADLINE
