"""Copies that the engine's thread starts itself, without a GPU: they are done when the test says so."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.shipping.ring import Extent
from inference_svc.taps.blocks import BlockPool, PoolExhaustedError
from inference_svc.taps.gpu import direct_copies, driver, host_copies
from inference_svc.taps.gpu.direct_copies import GATHER_STEPS, DirectCopies
from inference_svc.taps.ring_writer import ModelRows, RingWriter
from residuum.v1 import tensor_pb2
from tests.inference.taps.gpu.copies_without_gpu import queue_lines
from tests.inference.taps_support import CPU, capture
from tests.waiting import wait_for

WIDTH, LAYERS = 4, (0, 1, 2)
POSITION_BYTES = len(LAYERS) * WIDTH * 4


class Device:
    """A device that does its copies in their order, when `run` or a wait says so."""

    def __init__(self):
        self.work = deque()
        self.log = []
        self.queued = self.queued_bytes = self.most_queued = self.most_bytes = 0

    def event(self):
        event = SimpleNamespace(is_done=True)

        def record(_stream):
            event.is_done = False
            self.work.append(lambda: setattr(event, "is_done", True))

        def synchronize():
            while not event.is_done:
                self.run()

        event.record, event.synchronize, event.query = record, synchronize, lambda: event.is_done
        return event

    def stream(self, _device):
        return SimpleNamespace(cuda_stream=0, wait_stream=lambda stream: self.log.append(f"after {stream}"))

    def queue_lines(self, lines, stream):
        self.log.append("copy")
        self.queued += 1
        self.queued_bytes += lines.nbytes
        self.most_bytes = max(self.most_bytes, self.queued_bytes)
        self.most_queued = max(self.most_queued, self.queued)
        self.work.append(lambda: self._copy(lines, stream))

    def _copy(self, lines, stream):
        queue_lines(lines, stream)
        self.queued -= 1
        self.queued_bytes -= lines.nbytes

    def run(self):
        """Do the next work."""
        if self.work:
            self.work.popleft()()


class Ring:
    """A ring of so many bytes, whose extents come back when `acknowledge` says so."""

    def __init__(self, nbytes):
        self.free, self.memory = nbytes, np.full(1 << 18, 0xEE, dtype=np.uint8)
        self.published, self.losses = [], []
        self.acknowledges = True  # at once, when somebody waits for room
        self.waiting = 0
        self._published_bytes = deque()
        self._at = 0
        self._changed = threading.Condition()

    def acquire(self, nbytes, block, capture_id, *, at_once):
        assert block or at_once, "no step waits, not even for acknowledgements that have come"
        with self._changed:
            if block and self.acknowledges:
                self.acknowledge(len(self._published_bytes))
                assert self.free >= nbytes, "a thread that waits for room has published all copies"
            if block:
                self.waiting += 1
                self._changed.wait_for(lambda: self.free >= nbytes)
                self.waiting -= 1
            if self.free < nbytes:
                return None
            self.free -= nbytes
            extent, self._at = Extent(self._at, nbytes), self._at + nbytes
            return extent

    def publish_all(self, filled):
        for extent, capture_id, _, nbytes in filled:
            rows = self.memory[extent.offset :][:nbytes].view(np.float32).reshape(len(LAYERS), -1, WIDTH)
            self.published.append((capture_id, rows.copy()))
            self._published_bytes.append(nbytes)

    def acknowledge(self, count):
        with self._changed:
            for _ in range(min(count, len(self._published_bytes))):
                self.free += self._published_bytes.popleft()
            self._changed.notify_all()

    def report_loss(self, capture_id, loss):
        self.losses.append((capture_id, list(loss.positions)))


class Copies:
    """Direct copies from a pool to a ring, each with room for so many positions."""

    def __init__(self, device, ring_positions, pool_positions):
        self.device, self.ring = device, Ring(ring_positions * POSITION_BYTES)
        self.pool = BlockPool(pool_positions * len(LAYERS), WIDTH, torch.float32, CPU, 1 << 20)
        writer = RingWriter(self.ring, ModelRows(WIDTH, tensor_pb2.DATA_TYPE_FLOAT32))
        self.room = threading.Lock()
        self.direct = DirectCopies(self.pool, writer, self.ring.memory.ctypes.data, self.room)
        self.pool.before_waiting = self.direct.wait
        self.sent, self.serial = [], 0

    def start(self, *sizes, name="a", sheds=False, gathers=False):
        """Start to copy blocks of so many positions, with a number of its own in each row."""
        blocks = [self.block(size, name=name, sheds=sheds) for size in sizes]
        for block in blocks:
            block.may_gather = gathers
        self.direct.start(blocks)

    def block(self, size, *, name="a", sheds=False):
        """A block that the model has filled."""
        block = self.pool.take(capture(name, LAYERS, sheds=sheds), size, min_capacity=size)
        block.positions.extend(range(self.serial, self.serial + size))
        self.serial += size
        rows = self.pool.rows(block)
        rows[:] = torch.rand(rows.shape)
        self.sent.append((name, list(block.positions), rows.clone().numpy()))
        return block

    def finish(self):
        """Let the thread and the store do all that is left, and check the result."""
        self.direct.step(may_be_last=True)
        for _ in range(1000):
            if not self.direct.is_empty:
                self.device.run()
                self.direct._go_on()
                self.ring.acknowledge(1)
        self.check()

    def check(self):
        """Assert that all rows have left that are not reported as lost, those of a capture in their order."""
        assert self.direct.is_empty
        assert self.pool.free_rows == len(self.pool.memory)
        for name in {name for name, *_ in self.sent}:
            found = [rows for other, rows in self.ring.published if other == name]
            wanted = [rows for other, at, rows in self.sent if other == name and (name, at) not in self.ring.losses]
            assert len(found) == len(wanted)
            assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))


@contextmanager
def running(ring_positions=1 << 10, pool_positions=1 << 10, *, piece_positions=32):
    """Copies whose thread does not run: it calls `_go_on`."""
    device = Device()
    cuda = SimpleNamespace(Event=device.event, Stream=device.stream, current_stream=lambda _: "model")
    with (
        mock.patch.object(direct_copies, "torch", SimpleNamespace(cuda=cuda)),
        mock.patch.multiple(driver, torch=SimpleNamespace(cuda=cuda), _current_handle=None),
        mock.patch.object(DirectCopies, "_run"),
        mock.patch.object(host_copies, "queue_lines", device.queue_lines),
        mock.patch.object(host_copies, "PIECE_BYTES", piece_positions * POSITION_BYTES),
    ):
        yield Copies(device, ring_positions, pool_positions)


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
happenings = st.one_of(
    st.tuples(st.just("start"), sizes, st.sampled_from(["a", "b", "sheds"]), st.booleans()),
    st.tuples(st.just("run"), st.integers(1, 20)),
    st.tuples(st.just("acknowledge"), st.integers(1, 5)),
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.sampled_from(["wait", "_go_on"])),
)


@settings(max_examples=300, deadline=None)
@given(
    ring=st.integers(6, 40), pool=st.integers(60, 90), piece=st.integers(1, 20), most=st.integers(1, 20), data=st.data()
)
def test_rows_leave_as_they_were_and_in_their_order(ring, pool, piece, most, data):
    """In any order of events, with any room."""
    with running(ring, pool, piece_positions=piece) as copies, mock.patch.object(host_copies, "MOST_COPIES", most):
        for what, *how in data.draw(st.lists(happenings, max_size=60)):
            match what:
                case "start":
                    copies.start(*how[0], name=how[1], sheds=how[1] == "sheds", gathers=how[2])
                case "run":
                    for _ in range(how[0]):
                        copies.device.run()
                case "step":
                    copies.direct.step(may_be_last=how[0])
                case "acknowledge":
                    copies.ring.acknowledge(how[0])
                case _:
                    getattr(copies.direct, what)()
            assert copies.device.most_bytes <= max(piece, 6) * POSITION_BYTES
        copies.finish()
        assert all(name == "sheds" for name, _ in copies.ring.losses)


def test_copies_begin_after_the_model_has_filled_the_blocks():
    with running() as copies:
        copies.start(1, 2)
        copies.start(1)
        assert copies.device.log == ["after model", "copy", "copy", "after model", "copy"]
        copies.finish()


def test_blocks_that_may_gather_leave_together_after_a_few_steps():
    with running() as copies:
        for size in (1, 2):
            copies.start(size, gathers=True)
            copies.direct.step()
        for _ in range(GATHER_STEPS - 3):
            copies.direct.step()
        assert copies.device.log == []
        copies.direct.step()
        assert copies.device.log == ["after model", "copy", "copy"]
        copies.direct.step()
        assert not copies.ring.published
        for _ in range(3):
            copies.device.run()
        copies.direct.step()
        assert [rows.shape[1] for _, rows in copies.ring.published] == [1, 2]
        copies.start(3, gathers=True)
        for _ in range(GATHER_STEPS - 1):
            copies.direct.step()
        assert copies.device.log == ["after model", "copy", "copy"], "the steps count from the first block on"
        copies.finish()


def test_a_block_that_must_not_gather_takes_those_along_that_do():
    with running() as copies:
        copies.start(1, 2, gathers=True)
        assert copies.device.log == []
        copies.start(1)
        assert copies.device.log == ["after model", "copy", "copy", "copy"]
        copies.finish()


def test_a_block_that_is_not_full_leaves_at_once():
    """Its reply has ended."""
    with running() as copies:
        block = copies.block(3)
        block.may_gather, block.limit = True, 4
        copies.direct.start([block])
        assert copies.device.log == ["after model", "copy"]
        copies.finish()


def test_so_many_bytes_do_not_gather_any_longer(monkeypatch):
    monkeypatch.setattr(direct_copies, "GATHER_BYTES", 6 * POSITION_BYTES)
    with running() as copies:
        copies.start(5, gathers=True)
        assert copies.device.log == []
        copies.start(1, gathers=True)
        assert copies.device.log == ["after model", "copy", "copy"]
        copies.start(5, gathers=True)
        assert copies.device.queued == 2, "only blocks that wait are counted"
        copies.finish()


@pytest.mark.parametrize("way", ["the last step", "a late step", "a flush", "a pool without room"])
def test_blocks_that_gather_leave_when_nothing_more_comes(way):
    with running(pool_positions=8) as copies:
        copies.start(4, 4, gathers=True)
        match way:
            case "the last step":
                copies.direct.step(may_be_last=True)
                assert copies.direct._hurries.is_set(), "the thread does the rest"
                copies.direct._go_on()
            case "a late step":
                copies.direct._go_on()  # as the thread does after LATE_SECONDS
            case "a flush":
                copies.direct.flush(0.01)
            case _:
                copies.block(4)
                assert len(copies.ring.published) == 2
                copies.sent.pop()
                return
        assert copies.device.queued == 2
        copies.finish()


def test_hurried_blocks_leave_with_the_next_step():
    with running() as copies:
        copies.start(1, gathers=True)
        copies.direct.hurry()
        copies.start(1, gathers=True)
        copies.direct.step()
        assert copies.device.queued == 2
        copies.finish()


def test_rows_that_may_be_shed_do_not_gather():
    """The ring has room for them one after the other, but not for all at once."""
    with running(ring_positions=4) as copies:
        for _ in range(4):
            copies.start(4, name="sheds", sheds=True, gathers=True)
            copies.device.run()
            copies.device.run()
            copies.direct.step()
            copies.ring.acknowledge(1)
        assert not copies.ring.losses
        copies.finish()


def test_blocks_without_room_are_tried_again_in_each_step_also_if_they_gathered():
    with running(ring_positions=4) as copies:
        copies.start(4, 4, gathers=True)
        copies.direct._go_on()  # as the thread does
        copies.device.run()
        copies.device.run()
        copies.direct.step()
        copies.ring.acknowledge(1)
        copies.direct.step()
        assert copies.device.queued == 1
        copies.finish()


def test_blocks_of_two_streams_wait_for_both():
    with running() as copies:
        for stream in ("first", "second"):
            with mock.patch.object(driver.torch.cuda, "current_stream", lambda _, stream=stream: stream):
                copies.start(1, gathers=True)
        copies.start(1)
        assert copies.device.log == ["after first", "after second", "after model", *["copy"] * 3]
        copies.finish()


def test_a_step_that_needs_blocks_waits_while_the_thread_starts_them(monkeypatch):
    with running(pool_positions=4) as copies:
        copies.start(4, gathers=True)
        starting, goes_on, acquire = threading.Event(), threading.Event(), copies.ring.acquire

        def slowly(*arguments, **options):
            starting.set()
            assert goes_on.wait(60)
            return acquire(*arguments, **options)

        monkeypatch.setattr(copies.ring, "acquire", slowly)
        thread = threading.Thread(target=copies.direct._go_on, daemon=True)
        thread.start()
        assert starting.wait(60)
        held, tried = copies.direct._starting, threading.Event()

        class Noted:
            """The lock that the thread holds. It notes that the step wants it, too."""

            def __enter__(self):
                tried.set()
                held.acquire()

            def __exit__(self, *error):
                held.release()

        monkeypatch.setattr(copies.direct, "_starting", Noted())
        found = []
        step = threading.Thread(target=lambda: found.append(copies.direct.wait()), daemon=True)
        step.start()
        assert tried.wait(60)
        goes_on.set()
        thread.join(60)
        step.join(60)
        assert found == [True]
        copies.finish()


def test_a_step_publishes_what_is_done_and_waits_for_nothing():
    with running() as copies:
        copies.start(1, 2)
        copies.start(3)
        copies.direct.step()
        assert not copies.ring.published
        for _ in range(3):
            copies.device.run()
        copies.direct.step()
        assert [rows.shape[1] for _, rows in copies.ring.published] == [1, 2]
        assert not copies.direct.is_empty
        copies.finish()


def test_blocks_without_room_are_started_by_a_later_step():
    with running(ring_positions=6) as copies:
        copies.start(4, 4, 1)
        assert copies.device.queued == 1, "the last block is small enough, but must not overtake the one before it"
        copies.device.run()
        copies.device.run()
        copies.direct.step()
        assert copies.device.queued == 0
        copies.ring.acknowledge(1)
        copies.direct.step()
        assert copies.device.queued == 2
        copies.finish()


def test_rows_are_shed_only_if_their_policy_says_so_and_do_not_wait_behind_others():
    with running(ring_positions=6) as copies:
        copies.start(4, 4)
        copies.start(3, 1, name="sheds", sheds=True)
        assert not copies.ring.losses
        copies.direct.step()
        assert copies.ring.losses == [("sheds", [8, 9, 10])], "there was no room in the next step either"
        copies.finish()


def test_small_blocks_that_may_be_shed_do_not_overtake_earlier_ones_of_their_capture():
    with running(ring_positions=6) as copies:
        copies.start(4, 4, 1, name="sheds", sheds=True)
        assert copies.device.queued == 1
        copies.device.run()
        copies.device.run()
        copies.direct.step()
        assert copies.ring.losses == [("sheds", [4, 5, 6, 7])]
        copies.finish()


def test_a_limit_of_copies_holds_back_copies_but_loses_none(monkeypatch):
    monkeypatch.setattr(host_copies, "MOST_COPIES", 3)
    with running() as copies:
        copies.start(*[1] * 10)
        copies.start(1, 1, name="sheds", sheds=True)
        assert copies.device.most_queued == 3
        copies.finish()
        assert copies.device.most_queued == 3
        assert not copies.ring.losses


def test_a_pool_without_room_gets_back_only_as_many_blocks_as_it_needs():
    with running(pool_positions=12) as copies:
        for _ in range(4):
            copies.start(4)
        assert len(copies.ring.published) == 1
        copies.finish()


def test_a_pool_that_is_too_small_is_an_error():
    with running(pool_positions=4) as copies:
        copies.start(4)
        with pytest.raises(PoolExhaustedError):
            copies.block(5)


def test_the_thread_does_what_a_step_would():
    with running(ring_positions=4) as copies:
        copies.start(4, 3)
        copies.direct._go_on()
        assert not copies.ring.published
        copies.device.run()
        copies.device.run()
        copies.direct._go_on()
        assert len(copies.ring.published) == 1
        copies.ring.acknowledge(1)
        copies.direct._go_on()
        assert copies.device.queued == 1
        copies.finish()


def test_while_another_thread_waits_for_room_only_rows_start_that_would_be_shed():
    """Others could take the room for which it waits, for ever."""
    with running(ring_positions=6) as copies:
        copies.start(3)
        with copies.room:
            copies.start(1, 1)
            assert copies.device.queued == 1
            copies.start(2, 2, name="sheds", sheds=True)
            assert copies.device.queued == 2
            copies.direct.step()
            assert copies.ring.losses == [("sheds", [7, 8])]
        copies.finish()


def test_a_step_that_needs_blocks_waits_for_room_in_the_ring():
    with running(ring_positions=4, pool_positions=8) as copies:
        copies.ring.acknowledges = False
        copies.start(4, 4)
        copies.start(4)
        step = threading.Thread(target=lambda: copies.start(1), daemon=True)
        step.start()
        wait_for(lambda: copies.ring.waiting, "the step that waits")
        assert copies.room.locked()
        assert len(copies.ring.published) == 1, "it would wait in vain for room of copies that are not published"
        copies.ring.acknowledge(1)
        step.join(60)
        copies.finish()


def test_a_flush_that_takes_too_long_ends():
    with running(ring_positions=4) as copies:
        copies.start(4, 4)
        assert not copies.direct.flush(0.01)
        copies.finish()
        assert copies.direct.flush(0.0)
