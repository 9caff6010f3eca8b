"""Copies of rows as the model computed them, which the engine's thread starts, and publishes in a later step.

A thread of their own would have to be woken up for them, and take the GIL to start a copy and again to publish it. Each
time the engine's thread waits for the GIL, and then until it is woken up. This takes longer than the work itself. While
the device computes a step, the engine's thread usually has time left for that work.

The device may do all copies to the host in the order in which they were started. So a step's sampled tokens would wait
for all rows whose copies were started before, and with them the next step. This is why at most PIECE_BYTES are queued,
or one block, if it is larger. Other blocks wait, and so do those for which the ring has no room. Each step starts more
of them. So does a step that needs the blocks' rows of the pool. A thread does it only if no step follows in time.

Full blocks of generated tokens gather for a few steps before they are started. Most of the work does not depend on how
many blocks there are, and with pipeline parallelism the next step waits for all of it. Blocks of SHED do not gather:
the ring may have no room for many at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.gpu import host_copies
from inference_svc.taps.gpu.driver import CurrentStream
from inference_svc.taps.ring_writer import Encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.ring_writer import RingWriter

LATE_SECONDS = 0.016
"""After this time without a step, the thread looks after the blocks."""
_RETRY_SECONDS = 0.002
"""How often it does until the next step."""
GATHER_STEPS = 8
"""For how many steps blocks gather that may (`Block.may_gather`)."""
GATHER_BYTES = 16 << 20
"""How many bytes gather at most. Their copies take 0.3 ms at 50 GB/s, for which a step's tokens may have to wait."""


class _Group(NamedTuple):
    """Blocks that are published together."""

    end: torch.cuda.Event
    """When their copies are done."""
    blocks: list[tuple[Block, Encoded]]


class DirectCopies:
    """Copies blocks to the ring. The rows of a capture are published in the order of `start`.

    The engine's thread calls `start`, `step` and `wait`. It waits only in `wait` and `flush`.
    """

    def __init__(self, pool: BlockPool, writer: RingWriter, ring_address: int, room: threading.Lock) -> None:
        """Start the thread.

        Args:
            pool: The pool of the blocks.
            writer: Writes to the ring.
            ring_address: Where the ring's pinned memory begins.
            room: Held by a thread that waits for room in the ring. Meanwhile no block of WAIT takes any, or a large
                block might wait for ever.
        """
        self._pool = pool
        self._writer = writer
        self._ring_address = ring_address
        self._stream = torch.cuda.Stream(pool.memory.device)
        self._current = CurrentStream(pool.memory.device)
        self._model: torch.cuda.Stream | None = None  # fills the waiting blocks; None: `_stream` already waits for it
        self._waiting: deque[Block] = deque()  # whose copies have not been started
        self._waiting_bytes = 0  # of those that were sent since the last start
        self._steps = self._due = 0  # steps so far, and the one that starts the waiting blocks
        self._group: list[tuple[Block, Encoded]] = []  # the next group
        self._groups: deque[_Group] = deque()  # not published
        self._sent = self._started = self._done = 0  # blocks
        self._started_bytes = self._done_bytes = 0
        self._free_events: list[torch.cuda.Event] = []
        # They are acquired in this order.
        self._room = room
        self._publishing = threading.Lock()
        self._starting = threading.Lock()
        self._has_blocks = threading.Event()  # wakes the thread up
        self._hurries = threading.Event()
        self._has_stepped = False  # since the thread's last look
        self._may_hurry = False  # whether blocks were started since the last step that may be the last one
        threading.Thread(target=self._run, name="residuum-copies", daemon=True).start()

    @property
    def is_empty(self) -> bool:
        """Whether all blocks have left."""
        return self._done == self._sent

    def start(self, blocks: Sequence[Block]) -> None:
        """Start to copy blocks that the current stream fills, at once or after a few steps.

        If the ring has no room, not even in the next step, the capture's policy decides: WAIT lets the block wait,
        SHED drops the rows and reports them as lost.
        """
        self._pool.leaving(len(blocks))
        with self._starting:
            if not self._waiting:
                self._due = self._steps + GATHER_STEPS
            self._follow(self._current.get())
            self._sent += len(blocks)
            self._waiting += blocks
            self._waiting_bytes += sum(self._nbytes(block) for block in blocks)
            if self._waiting_bytes >= GATHER_BYTES or not all(map(_gathers, blocks)):
                self._due = self._steps
            if self._is_due:
                self._start_waiting(sheds=False)
        self._has_stepped = self._may_hurry = True
        if self._hurries.is_set():
            self._hurries.clear()
        if not self._has_blocks.is_set():
            self._has_blocks.set()

    def hurry(self) -> None:
        """Let blocks gather only until the next step: a reply has ended, and its last block may be one of them."""
        self._due = self._steps

    def step(self, *, may_be_last: bool = False) -> None:
        """Publish the copies that are done, give their blocks back, and start more. Call it in each step.

        Args:
            may_be_last: No request is left. Then the thread does the rest at once, because perhaps no step follows.
        """
        self._has_stepped = True
        self._steps += 1
        self._publish_done()
        if self._waiting and self._is_due:
            with self._starting:
                self._start_waiting(sheds=True)
        if not may_be_last:
            return
        if self._may_hurry:
            self._hurries.set()
        else:  # steps follow, for requests that are not captured
            self._hurries.clear()
        self._may_hurry = False

    @property
    def _is_due(self) -> bool:
        return self._steps >= self._due

    def _go_on(self) -> None:
        """Publish the copies that are done, and start more, also of blocks that may gather."""
        self._publish_done()
        if not self.is_empty:  # another thread may have taken all of `_waiting`, and may put some back
            with self._starting:
                self._start_waiting(sheds=True)

    def _publish_done(self) -> None:
        if self._groups and self._publishing.acquire(blocking=False):  # otherwise another thread publishes them
            try:
                while self._groups and self._groups[0].end.query():
                    self._publish_first()
            finally:
                self._publishing.release()

    def wait(self) -> bool:
        """Wait until the oldest blocks have left, or the next waiting one has room. Return False if there is none."""
        if self._publish_next():
            return True
        self._go_on()
        if self._groups or not self._waiting:
            return self._publish_next()
        with self._room:
            with self._starting:  # from now on, the thread starts no block of WAIT
                block = next((block for block in self._waiting if not block.capture.sheds), None)
            encoded = self._acquire(block, waits=True) if block else None
            if block and encoded:
                with self._starting:
                    self._waiting.remove(block)
                    self._queue(block, encoded)
                    self._end_group()
        return True

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all blocks have left, and return whether they have."""
        end = time.monotonic() + timeout_seconds
        while not (self.is_empty or self._pool.has_failed) and time.monotonic() < end:
            self._go_on()
            time.sleep(_RETRY_SECONDS)
        return self.is_empty

    def _run(self) -> None:
        torch.cuda.set_device(self._pool.memory.device)
        with self._pool.failing_on_error():
            self._stream.synchronize()  # gives the thread its CUDA context, without which the driver refuses copies
            while True:
                self._has_blocks.wait()
                if not self._hurries.wait(LATE_SECONDS) and self._has_stepped:
                    self._has_stepped = False
                else:
                    self._look_after_blocks()

    def _look_after_blocks(self) -> None:
        """Do what a step would do, until one comes or all blocks have left."""
        self._has_stepped = False
        while not (self._has_stepped or self.is_empty or self._pool.has_failed):
            self._go_on()
            time.sleep(_RETRY_SECONDS)
        self._has_blocks.clear()  # before the look at `is_empty`: `start` first sends blocks, and then sets this
        if not (self.is_empty or self._pool.has_failed):
            self._has_blocks.set()

    def _start_waiting(self, *, sheds: bool) -> None:
        """Start as many copies as may be queued, if the ring has room for them. Call it with `_starting`.

        Args:
            sheds: Whether to shed blocks without room, if their policy says so.
        """
        self._follow(None)
        self._waiting_bytes = 0
        is_full = self._room.locked()
        kept: list[Block] = []
        kept_captures: set[str] = set()  # the rows of each leave in their order, also if later blocks would find room
        while self._waiting and self._may_start(self._waiting[0]):
            block = self._waiting.popleft()
            may_wait = not block.capture.sheds
            is_behind = (is_full and may_wait) or block.capture.capture_id in kept_captures
            encoded = None if is_behind else self._acquire(block, waits=False)
            if encoded is not None:
                self._queue(block, encoded)
            elif sheds and not may_wait:
                self._writer.shed(block.capture, block.positions)
                self._sent -= 1
                self._pool.give_back(block)
            else:
                kept.append(block)
                kept_captures.add(block.capture.capture_id)
                is_full |= may_wait  # for the blocks after this one, too: otherwise small ones could starve a large one
        self._end_group()
        self._waiting.extendleft(reversed(kept))
        self._due = self._steps  # those that are left do not gather

    def _follow(self, model: torch.cuda.Stream | None) -> None:
        """Note the stream that fills the waiting blocks, after those sent before. Call it with `_starting`."""
        if self._model is not None and self._model != model:
            self._stream.wait_stream(self._model)
        self._model = model

    def _may_start(self, block: Block) -> bool:
        queued = self._started_bytes - self._done_bytes
        is_enough = queued and queued + self._nbytes(block) > host_copies.PIECE_BYTES
        return not is_enough and self._started - self._done < host_copies.MOST_COPIES

    def _nbytes(self, block: Block) -> int:
        return int(block.capture.units * len(block.positions) * self._pool.row_bytes)

    def _acquire(self, block: Block, *, waits: bool) -> Encoded | None:
        capture, positions = block.capture, block.positions
        form = self._writer.format_of(capture)
        extent = self._writer.acquire(capture, positions, form, block=waits, at_once=True)
        return Encoded(capture, positions, form, extent) if extent else None

    def _queue(self, block: Block, encoded: Encoded) -> None:
        """Queue a block's copies on the stream. Call it with `_starting`, and `_end_group` after the last block."""
        lines = host_copies.lines_of(self._pool, block, self._ring_address + encoded.extent.offset)
        for piece in host_copies.divided(lines):
            host_copies.queue_lines(piece, self._stream.cuda_stream)
        self._started_bytes += encoded.extent.nbytes
        self._started += 1
        self._group.append((block, encoded))

    def _end_group(self) -> None:
        if self._group:
            # No blocking event: the device would interrupt the host at the end of each.
            end = self._free_events.pop() if self._free_events else torch.cuda.Event()
            end.record(self._stream)
            self._groups.append(_Group(end, self._group))
            self._group = []

    def _publish_next(self) -> bool:
        """Wait for the oldest copies, and publish them. Return False if there are none."""
        with self._publishing:
            if not self._groups:
                return False
            self._groups[0].end.synchronize()
            self._publish_first()
            return True

    def _publish_first(self) -> None:
        """Publish the oldest copies. Call it with `_publishing`."""
        group = self._groups[0]
        self._writer.publish(*(encoded for _, encoded in group.blocks))
        self._groups.popleft()
        self._pool.give_back(*(block for block, _ in group.blocks))
        self._free_events.append(group.end)
        self._done_bytes += sum(encoded.extent.nbytes for _, encoded in group.blocks)
        self._done += len(group.blocks)


def _gathers(block: Block) -> bool:
    """Return whether a block may wait for others before it is copied."""
    return block.may_gather and not block.free and not block.capture.sheds
