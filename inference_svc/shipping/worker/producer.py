"""The producer: the worker's interface to the ring. It allocates extents and hands them to shippers."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inference_svc.shipping.figures import FigureFile, figures_path
from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.protocol import Hello, LossReport, extent_ready
from inference_svc.shipping.ring import Extent, SharedRing
from inference_svc.shipping.worker.allotment import SharedAllotment
from inference_svc.shipping.worker.dispatcher import Dispatcher, Item
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.placement import first_rank
from residuum.wire.tokens import split_path
from svc_common.logs import get_logger

_WARN_AFTER_SECONDS = 5.0
"""After this long, a step that waits for room logs a warning."""

_ROUND_SECONDS = 0.005
"""How long a call that does not wait for room still waits for acknowledgements that have already come."""

_ROOMY = 0.75
"""Up to this share of the room that a store can take, acknowledgements may wait a little."""

_log = get_logger(__name__)


class ProducerClosedError(RuntimeError):
    """The producer was closed, or its thread failed, before or during this call."""


class Filled(NamedTuple):
    """An extent that holds rows of a capture; see `RingProducer.publish`."""

    extent: Extent
    capture_id: str
    headers: Sequence[bytes]
    """The headers, serialised."""
    num_bytes: int
    """Bytes of the rows that the headers describe."""


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Figures of a producer since it was created."""

    ring_bytes: int
    """Bytes of the ring."""
    bytes_used: int
    """Bytes of extents that are acquired, or published and not given back yet, including alignment."""
    published: int
    """Extents that were published."""
    freed: int
    """Published extents that came back, because the store acknowledged their rows."""
    losses: int
    """Losses that were reported."""
    waits: int
    """Calls of `acquire` that had to wait."""
    seconds_waited: float
    """The total time of these waits, in seconds, including those that go on."""
    connected_shippers: int
    """Connected shippers that take items now."""


class RingProducer:
    """Allocates extents of the ring and hands them to shippers. No call touches the network or copies rows.

    An extent belongs to the caller from `acquire` to `publish`. From then on it belongs to a shipper, until the store
    has acknowledged every row in it. Only then is it free again. If the shipper dies in between, no row is lost:
    another shipper gets its extents.

    Example:
        producer = RingProducer(control_path, ring_bytes=256 << 20)
        producer.start()
        extent = producer.acquire(payload.nbytes, block=True)   # WAIT; block=False returns None when full: SHED
        producer.view(extent)[:] = payload
        producer.publish(extent, "capture", [header])           # the header describes the extent's rows

    All methods are thread-safe. `acquire` and `publish` are fast enough for the model's step: they take locks that are
    rarely contended, and `publish` sends a short message and wakes no thread.
    """

    def __init__(self, control_path: str | os.PathLike[str], *, ring_bytes: int, stores: Sequence[str] = ("",)) -> None:
        """Reserve the ring's memory and listen for shippers.

        Args:
            control_path: The path of the Unix domain socket, at most about 100 characters, in a directory that only
                this user can enter. It replaces the socket of an earlier worker.
            ring_bytes: The size of the ring, which is rounded up to whole pages.
            stores: The names of the stores. Each has a reserve in the ring; see `SharedAllotment`.

        Raises:
            ValueError: The size is not positive.
            OSError: There is not enough memory, or the socket cannot listen at the path.
        """
        self._ring, self._ring_descriptor = SharedRing.create(ring_bytes)
        self.is_pinned = False
        """Whether a sink has pinned the ring's memory for copies from a GPU."""
        self._changed = threading.Condition()  # guards everything below
        self._stores = tuple(stores)
        self._allotment = SharedAllotment(self._ring.ring_bytes, self._stores)
        self._acquired: set[Extent] = set()  # not published yet
        self._handed_over: dict[int, Extent] = {}  # by ticket
        self._closed = False
        self._failure: BaseException | None = None
        self._tickets = itertools.count(1)
        self._outstanding = 0
        self._impatient = 0  # callers that wait for acknowledgements
        self._published = self._freed = self._losses = self._waits = 0
        self._seconds_waited = 0.0  # of the waits that have ended
        self._waiting_since: list[float] = []  # of each wait that goes on
        self._file = FigureFile(figures_path(control_path), self._figures)
        try:
            self._dispatcher = Dispatcher(
                Path(control_path),
                Hello(self._ring.ring_bytes),
                self._ring_descriptor,
                on_done=self._take_back,
                on_failed=self._fail,
                on_round=self._file.refresh,
                may_pause=self._may_pause,
            )
        except BaseException:
            os.close(self._ring_descriptor)
            raise

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The whole ring, uint8 [ring_bytes]. Its address never changes, so it can be pinned once."""
        return self._ring.memory

    @property
    def ring_bytes(self) -> int:
        """The size of the ring: the requested size, rounded up to whole pages."""
        return self._ring.ring_bytes

    def start(self) -> None:
        """Start the thread that serves shippers. Call it after any fork."""
        self._dispatcher.start()

    def acquire(
        self,
        nbytes: int,
        block: bool,  # noqa: FBT001 - the overflow policy
        capture_id: str = "",
        *,
        at_once: bool = False,
    ) -> Extent | None:
        """Take a free extent.

        A wait ends only when published extents come back. A caller that waits must first publish or release its own
        extents, or it waits for ever.

        Args:
            nbytes: The size of the extent.
            block: When the ring is full, wait for room (policy WAIT) instead of returning None (policy SHED).
            capture_id: The capture that the extent is for. Required with several stores, because each has its own
                reserve.
            at_once: Without `block`, do not even wait the few milliseconds in which acknowledgements that have already
                come are handled.

        Returns:
            The extent, or None.

        Raises:
            ValueError: The size is not positive or exceeds `SharedAllotment.largest`, or the capture ID is missing.
            ProducerClosedError: The producer is closed, or was closed during the wait.
        """
        store = self._store_of(capture_id)
        with self._changed:
            self._check_open()
            extent = self._allotment.take(nbytes, store)
            if extent is None and block:
                extent = self._wait_for_extent(nbytes, store)
            elif extent is None and self._dispatcher.is_pausing:
                self._dispatcher.wake()
                if not at_once:
                    extent = self._take_when_free(nbytes, store, _ROUND_SECONDS)
            if extent is not None:
                self._acquired.add(extent)
            return extent

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return a view of an extent's bytes, uint8 [nbytes]. Write to it only between `acquire` and `publish`."""
        return self._ring.view(extent)

    def release(self, extent: Extent) -> None:
        """Give back an acquired extent without publishing it.

        Raises:
            ValueError: The extent is not acquired, or is already published.
        """
        with self._changed:
            self._check_acquired(extent)
            self._acquired.remove(extent)
            self._free(extent)

    def publish(self, extent: Extent, capture_id: str, headers: Sequence[capture_pb2.ChunkHeader]) -> None:
        """Hand a filled extent to a shipper. The extent is free again when the store has acknowledged all its rows.

        Args:
            extent: The extent.
            capture_id: The capture that the rows belong to.
            headers: The headers of the payloads in the extent. The payloads follow each other from the extent's first
                byte, each contiguous [layers][positions][width]. A payload may be larger than a chunk: shippers cut it.

        Raises:
            ValueError: There is no header, or one describes no rows. Or the headers describe more bytes than the extent
                has, or are too long for one message. Or the extent is not acquired. The extent stays the caller's.
            ProducerClosedError: The producer is closed.
        """
        sizes = [payload_bytes(header) for header in headers]
        if not all(sizes):
            raise ValueError(f"A header describes no rows: the headers describe {sizes} bytes. Leave it out.")
        serialised = [header.SerializeToString() for header in headers]
        self.publish_all([Filled(extent, capture_id, serialised, sum(sizes))])

    def publish_all(self, filled: Sequence[Filled]) -> None:
        """Publish several extents with one message to each shipper. If one is refused, all stay the caller's.

        The headers are not read: that they describe `num_bytes` is up to the caller.

        Raises:
            ValueError: There is no header, `num_bytes` is not positive or more than the extent has, the headers are too
                long for one message, or the extent is not acquired.
            ProducerClosedError: The producer is closed.
        """
        items = [self._item(one) for one in filled]
        with self._changed:
            self._check_open()
            for one in filled:
                self._check_acquired(one.extent)
            for one, item in zip(filled, items, strict=True):
                self._acquired.remove(one.extent)
                self._handed_over[item.ticket] = one.extent
            self._published += len(items)
            self._outstanding += len(items)
        self._dispatcher.submit(items)

    def _item(self, filled: Filled) -> Item:
        extent, capture_id, headers, num_bytes = filled
        if not headers or not 0 < num_bytes <= extent.nbytes:
            raise ValueError(
                f"{len(headers)} headers describe {num_bytes} bytes, which do not fit {extent}. Give at least one "
                "header, for at most the bytes of the extent."
            )
        ticket = next(self._tickets)
        return Item(ticket, capture_id, extent_ready(ticket, extent.offset, capture_id, headers), num_bytes)

    def report_loss(self, capture_id: str, loss: store_pb2.RowLoss) -> None:
        """Report to the store, through a shipper, rows that will never arrive.

        Raises:
            ProducerClosedError: The producer is closed.
        """
        ticket = next(self._tickets)
        message = LossReport(ticket, capture_id, loss).encode()
        with self._changed:
            self._check_open()
            self._losses += 1
            self._outstanding += 1
        self._dispatcher.submit([Item(ticket, capture_id, message)])

    def stats(self) -> ProducerStats:
        """Return the figures."""
        with self._changed:
            # A wait counts while it goes on: it may last as long as a store is away, which is when operators look.
            now = time.monotonic()
            seconds_waited = self._seconds_waited + sum(now - since for since in self._waiting_since)
            return ProducerStats(
                ring_bytes=self._ring.ring_bytes,
                bytes_used=self._allotment.bytes_used,
                published=self._published,
                freed=self._freed,
                losses=self._losses,
                waits=self._waits,
                seconds_waited=seconds_waited,
                connected_shippers=self._dispatcher.num_links,
            )

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until the stores have acknowledged all published extents and reports, and return whether they have."""
        with self._changed, self._impatience():
            self._changed.wait_for(lambda: not self._outstanding or self._closed, timeout_seconds)
            return not self._outstanding

    def close(self) -> None:
        """Stop serving shippers, and wake threads that wait for room.

        Shippers still deliver the extents that they have. The memory stays valid while a view of it exists.
        """
        with self._changed:
            if self._ring_descriptor < 0:
                return
            descriptor, self._ring_descriptor = self._ring_descriptor, -1
            self._closed = True
            self._changed.notify_all()
        self._dispatcher.stop()
        self._file.remove()
        os.close(descriptor)

    def _figures(self) -> dict[str, float]:
        stats = self.stats()
        with self._changed:
            by_store = {f"store_bytes_used:{store}": used for store, used in self._allotment.used.items()}
        return {**asdict(stats), "under_way": stats.published - stats.freed, **by_store}

    def _store_of(self, path: str) -> str:
        if len(self._stores) == 1:
            return self._stores[0]
        if not path:
            raise ValueError(
                "name the capture: with several stores, its ID decides which reserve the extent comes from"
            )
        _, capture_id, _ = split_path(path)
        return first_rank(self._stores, capture_id)

    def _wait_for_extent(self, nbytes: int, store: str) -> Extent | None:
        """Wait for a free run that is long enough. When all published extents have come back, there is one."""
        self._waits += 1
        with self._counted_wait(), self._impatience():
            extent = self._take_when_free(nbytes, store, _WARN_AFTER_SECONDS)
            if extent is None:
                _log.warning(
                    "the ring is full: the model waits for the store",
                    store=store or None,
                    wanted_bytes=nbytes,
                    bytes_used=self._allotment.bytes_used,
                    store_bytes_used=self._allotment.used[store],
                    ring_bytes=self._ring.ring_bytes,
                    shippers=self._dispatcher.num_links,
                )
                extent = self._take_when_free(nbytes, store)
        return extent

    @contextmanager
    def _counted_wait(self) -> Iterator[None]:
        """Count the time of a wait for room. Call it with the lock."""
        since = time.monotonic()
        self._waiting_since.append(since)
        try:
            yield
        finally:
            self._waiting_since.remove(since)
            self._seconds_waited += time.monotonic() - since

    def _take_when_free(self, nbytes: int, store: str, timeout_seconds: float | None = None) -> Extent | None:
        """Take an extent as soon as there is room; return None after the timeout. Call it with the lock.

        Raises:
            ProducerClosedError: The producer was closed meanwhile.
        """
        found = self._changed.wait_for(lambda: self._allotment.take(nbytes, store) or self._closed, timeout_seconds)
        self._check_open()
        return found if isinstance(found, Extent) else None

    @contextmanager
    def _impatience(self) -> Iterator[None]:
        """Have acknowledgements handled at once. Call it with the lock."""
        self._impatient += 1
        self._dispatcher.wake()
        try:
            yield
        finally:
            self._impatient -= 1

    def _may_pause(self) -> bool:
        return not self._impatient and self._allotment.fullness <= _ROOMY

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosedError("the producer is closed") from self._failure

    def _check_acquired(self, extent: Extent) -> None:
        if extent not in self._acquired:
            raise ValueError(f"{extent} is not acquired: it was never acquired, or was already published or released")

    def _take_back(self, tickets: Sequence[int]) -> None:
        with self._changed:
            for ticket in tickets:
                extent = self._handed_over.pop(ticket, None)  # None: a loss report
                if extent is not None:
                    self._freed += 1
                    self._allotment.give_back(extent)
            self._outstanding -= len(tickets)
            self._changed.notify_all()

    def _free(self, extent: Extent) -> None:
        self._allotment.give_back(extent)
        self._changed.notify_all()  # not notify: merged with its neighbours, the run may fit any of the waiting calls

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._closed = True
            self._changed.notify_all()
