"""The worker's end of shipping: fill slots, publish them, get them back."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from inference_svc.shipping.dispatcher import Dispatcher, Item
from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.protocol import Hello, LossReport, SlotReady
from inference_svc.shipping.ring import SharedRing
from residuum.rpc.logs import get_logger
from residuum.v1 import capture_pb2, store_pb2

_WARN_AFTER_SECONDS = 5.0
"""A step that has waited this long for a slot says so in the log."""

_log = get_logger(__name__)


class ProducerClosedError(RuntimeError):
    """The producer was closed, or its thread failed, while something was still wanted of it."""


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Figures of a producer since it was made."""

    num_slots: int
    """Slots in the ring."""
    slots_used: int
    """Slots that are acquired, or published and not yet given back."""
    published: int
    """Slots that were published."""
    freed: int
    """Published slots that were given back: their rows are acknowledged by the store."""
    losses: int
    """Losses that were reported."""
    waits: int
    """Calls of `acquire` that had to wait."""
    seconds_waited: float
    """What those calls waited, together."""
    connected_shippers: int
    """Shippers that are connected now and take more."""


class RingProducer:
    """Hands filled slots to shipper processes without ever touching the network, a pickle or a copy.

    A slot's bytes belong to the caller from `acquire` to `publish`, and from then on to a shipper until the store has
    acknowledged every row in it; only then is the slot free again. A shipper that dies in between is no loss: its slots
    go to another.

    Example:
        producer = RingProducer(control_path, num_slots=64, slot_bytes=4 << 20)
        producer.start()
        index = producer.acquire(block=True)            # WAIT; with block=False, None when the ring is full: SHED
        producer.slot(index)[:payload.nbytes] = payload
        producer.publish(index, "capture", header)      # the header describes what lies in the slot

    All methods may be called from any thread; `acquire` and `publish` are made for the model's step: they take one
    uncontended lock and, to publish, wake the thread that does the rest.
    """

    def __init__(self, control_path: str | os.PathLike[str], *, num_slots: int, slot_bytes: int) -> None:
        """Take the ring's memory and listen for shippers.

        Args:
            control_path: The Unix domain socket to listen on, at most about 100 characters, in a directory that only
                this user can enter. A socket left there by a worker before is replaced.
            num_slots: Slots in the ring.
            slot_bytes: What a slot holds at least.

        Raises:
            ValueError: A size is not positive.
            OSError: There is not enough memory, or the path cannot be listened on.
        """
        self._ring, self._ring_descriptor = SharedRing.create(num_slots, slot_bytes)
        self._changed = threading.Condition()  # guards everything below
        self._free = deque(range(num_slots))
        self._closed = False
        self._failure: BaseException | None = None
        self._next_ticket = 1
        self._outstanding = 0
        self._published = self._freed = self._losses = self._waits = 0
        self._seconds_waited = 0.0
        try:
            self._dispatcher = Dispatcher(
                Path(control_path),
                Hello(num_slots, slot_bytes, self._ring.stride),
                self._ring_descriptor,
                on_done=self._take_back,
                on_failed=self._fail,
            )
        except BaseException:
            os.close(self._ring_descriptor)
            raise

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The whole ring, uint8[num_slots * stride]; its address never changes, so it can be pinned once."""
        return self._ring.memory

    @property
    def slot_bytes(self) -> int:
        """What a slot holds."""
        return self._ring.slot_bytes

    @property
    def fill(self) -> float:
        """How full the ring is, from 0 to 1."""
        return 1.0 - len(self._free) / self._ring.num_slots

    def start(self) -> None:
        """Begin to serve shippers, on a thread of its own. Call it after any fork."""
        self._dispatcher.start()

    def acquire(self, block: bool) -> int | None:  # noqa: FBT001 - the overflow policy, and its only argument
        """Take a free slot.

        Args:
            block: With no slot free, wait for one (the policy WAIT) rather than return None (SHED).

        Returns:
            The slot's index, or None.

        Raises:
            ProducerClosedError: The producer is closed, or was while this waited.
        """
        with self._changed:
            if not self._free and block:
                self._wait_for_slot()
            self._check_open()
            return self._free.popleft() if self._free else None

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        """Return a slot's bytes, uint8[slot_bytes], to be written between `acquire` and `publish`."""
        return self._ring.slot(index)

    def release(self, index: int) -> None:
        """Give back a slot that was acquired and is not needed after all."""
        with self._changed:
            self._free.append(index)
            self._changed.notify_all()

    def publish(self, index: int, capture_id: str, header: capture_pb2.ChunkHeader) -> None:
        """Hand a filled slot over.

        Args:
            index: The slot.
            capture_id: The capture that the rows belong to.
            header: What the slot's first bytes hold, contiguous [layers][positions][width]. It may be larger than a
                chunk: shippers cut it. It must not be changed afterwards.

        Raises:
            ValueError: The header describes nothing, or more than a slot holds.
            ProducerClosedError: The producer is closed.
        """
        if not 0 < payload_bytes(header) <= self._ring.slot_bytes:
            raise ValueError(f"{payload_bytes(header)} bytes do not fit a slot of {self._ring.slot_bytes}")
        with self._changed:
            self._published += 1
            self._submit(SlotReady(self._take_ticket(), index, capture_id, header))

    def report_loss(self, capture_id: str, loss: store_pb2.RowLoss) -> None:
        """Tell the store, by way of a shipper, of rows that will never come. It must not be changed afterwards.

        Raises:
            ProducerClosedError: The producer is closed.
        """
        with self._changed:
            self._losses += 1
            self._submit(LossReport(self._take_ticket(), capture_id, loss))

    def stats(self) -> ProducerStats:
        """Return the figures."""
        with self._changed:
            return ProducerStats(
                num_slots=self._ring.num_slots,
                slots_used=self._ring.num_slots - len(self._free),
                published=self._published,
                freed=self._freed,
                losses=self._losses,
                waits=self._waits,
                seconds_waited=self._seconds_waited,
                connected_shippers=self._dispatcher.num_links,
            )

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until the store has acknowledged all that was published and reported; say whether it has."""
        with self._changed:
            self._changed.wait_for(lambda: not self._outstanding or self._closed, timeout_seconds)
            return not self._outstanding

    def close(self) -> None:
        """Stop serving shippers, and wake whoever waits for a slot. Slots that a shipper has are still delivered.

        The memory stays valid for whoever still holds a view of it.
        """
        with self._changed:
            if self._ring_descriptor < 0:
                return
            descriptor, self._ring_descriptor = self._ring_descriptor, -1
            self._closed = True
            self._changed.notify_all()
        self._dispatcher.stop()
        os.close(descriptor)

    def _wait_for_slot(self) -> None:
        self._waits += 1
        start = time.monotonic()
        if not self._changed.wait_for(lambda: self._free or self._closed, _WARN_AFTER_SECONDS):
            _log.warning(
                "the ring is full: the model waits for the store",
                slots=self._ring.num_slots,
                shippers=self._dispatcher.num_links,
            )
            self._changed.wait_for(lambda: self._free or self._closed)
        self._seconds_waited += time.monotonic() - start

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosedError("the producer is closed") from self._failure

    def _take_ticket(self) -> int:
        self._check_open()
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        return ticket

    def _submit(self, item: Item) -> None:
        self._outstanding += 1
        self._dispatcher.submit(item)

    def _take_back(self, item: Item) -> None:
        with self._changed:
            self._outstanding -= 1
            if isinstance(item, SlotReady):
                self._freed += 1
                self._free.append(item.index)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._closed = True
            self._changed.notify_all()
