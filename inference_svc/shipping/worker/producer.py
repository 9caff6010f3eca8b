"""The worker's end of shipping: fill extents, publish them, get them back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from inference_svc.shipping.figures import FigureFile, beside
from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.protocol import MAX_BODY_BYTES, ExtentReady, Hello, LossReport
from inference_svc.shipping.ring import Extent, SharedRing
from inference_svc.shipping.worker.allotment import SharedAllotment
from inference_svc.shipping.worker.dispatcher import Dispatcher, Item
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.placement import first_rank
from residuum.wire.tokens import split_path
from svc_common.logs import get_logger

_WARN_AFTER_SECONDS = 5.0
"""A step that has waited this long for room says so in the log."""

_log = get_logger(__name__)


class ProducerClosedError(RuntimeError):
    """The producer was closed, or its thread failed, while something was still wanted of it."""


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Figures of a producer since it was made."""

    ring_bytes: int
    """Bytes of the ring."""
    bytes_used: int
    """Bytes of extents that are acquired, or published and not yet given back, with what alignment costs."""
    published: int
    """Extents that were published."""
    freed: int
    """Published extents that were given back: their rows are acknowledged by the store."""
    losses: int
    """Losses that were reported."""
    waits: int
    """Calls of `acquire` that had to wait."""
    seconds_waited: float
    """What those calls waited, together."""
    connected_shippers: int
    """Shippers that are connected now and take more."""


class RingProducer:
    """Hands filled extents to shipper processes without ever touching the network, a pickle or a copy.

    An extent is a run of the ring's bytes, as long as is asked for. Its bytes belong to the caller from `acquire` to
    `publish`, and from then on to a shipper until the store has acknowledged every row in it; only then are they free
    again. A shipper that dies in between is no loss: its extents go to another.

    Example:
        producer = RingProducer(control_path, ring_bytes=256 << 20)
        producer.start()
        extent = producer.acquire(payload.nbytes, block=True)   # WAIT; with block=False, None for no room: SHED
        producer.view(extent)[:] = payload
        producer.publish(extent, "capture", [header])           # the header describes what lies in the extent

    All methods may be called from any thread; `acquire` and `publish` are made for the model's step: they take one
    uncontended lock and, to publish, wake the thread that does the rest.
    """

    def __init__(self, control_path: str | os.PathLike[str], *, ring_bytes: int, stores: Sequence[str] = ("",)) -> None:
        """Take the ring's memory and listen for shippers.

        Args:
            control_path: The Unix domain socket to listen on, at most about 100 characters, in a directory that only
                this user can enter. A socket left there by a worker before is replaced.
            ring_bytes: Bytes of the ring at least; they are rounded up to whole pages.
            stores: The names of the stores that captures go to; each has a reserve of the ring, see `SharedAllotment`.

        Raises:
            ValueError: The size is not positive.
            OSError: There is not enough memory, or the path cannot be listened on.
        """
        self._ring, self._ring_descriptor = SharedRing.create(ring_bytes)
        self._changed = threading.Condition()  # guards everything below
        self._stores = tuple(stores)
        self._allotment = SharedAllotment(self._ring.ring_bytes, self._stores)
        self._acquired: set[Extent] = set()  # not published yet
        self._handed_over: dict[int, Extent] = {}  # by ticket
        self._closed = False
        self._failure: BaseException | None = None
        self._next_ticket = 1
        self._outstanding = 0
        self._published = self._freed = self._losses = self._waits = 0
        self._seconds_waited = 0.0
        self._file = FigureFile(beside(control_path), self._figures)
        try:
            self._dispatcher = Dispatcher(
                Path(control_path),
                Hello(self._ring.ring_bytes),
                self._ring_descriptor,
                on_done=self._take_back,
                on_failed=self._fail,
                on_round=self._file.refresh,
            )
        except BaseException:
            os.close(self._ring_descriptor)
            raise

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The whole ring, uint8[ring_bytes]; its address never changes, so it can be pinned once."""
        return self._ring.memory

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring: what was asked for, rounded up to whole pages."""
        return self._ring.ring_bytes

    @property
    def fill(self) -> float:
        """How full the ring is, by bytes, from 0 to 1."""
        return self._allotment.bytes_used / self._ring.ring_bytes

    def start(self) -> None:
        """Begin to serve shippers, on a thread of its own. Call it after any fork."""
        self._dispatcher.start()

    def acquire(
        self,
        nbytes: int,
        block: bool,  # noqa: FBT001 - the overflow policy
        capture_id: str = "",
    ) -> Extent | None:
        """Take a free run of bytes.

        A wait ends only when others' extents come back: what the caller itself holds it must publish or release before.

        Args:
            nbytes: How many.
            block: With no run that long, wait for one (the policy WAIT) rather than return None (SHED).
            capture_id: The capture that it is for, if there are several stores: room is its store's.

        Returns:
            The extent, or None.

        Raises:
            ValueError: The size is not positive, or more than the ring or its largest part; or the capture is missing.
            ProducerClosedError: The producer is closed, or was while this waited.
        """
        store = self._store_of(capture_id)
        with self._changed:
            self._check_open()
            extent = self._allotment.take(nbytes, store)
            if extent is None and block:
                extent = self._wait_for_extent(nbytes, store)
            if extent is not None:
                self._acquired.add(extent)
            return extent

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return an extent's bytes, uint8[nbytes], to be written between `acquire` and `publish`."""
        return self._ring.view(extent)

    def release(self, extent: Extent) -> None:
        """Give back an extent that was acquired and is not needed after all.

        Raises:
            ValueError: It is not acquired, or is published.
        """
        with self._changed:
            self._check_acquired(extent)
            self._acquired.remove(extent)
            self._free(extent)

    def publish(self, extent: Extent, capture_id: str, headers: Sequence[capture_pb2.ChunkHeader]) -> None:
        """Hand a filled extent over, under one ticket: it is free again when every row of it is acknowledged.

        Args:
            extent: The extent.
            capture_id: The capture that the rows belong to.
            headers: What the extent's first bytes hold: the headers' payloads, one directly after the other, each
                contiguous [layers][positions][width]. One may be larger than a chunk: shippers cut it. They must not be
                changed afterwards.

        Raises:
            ValueError: A header describes nothing; there is none; all together they describe more than the extent
                holds, or are too long for a message; or the extent is not acquired. It stays the caller's.
            ProducerClosedError: The producer is closed.
        """
        sizes = [payload_bytes(header) for header in headers]
        if not sizes or not all(sizes) or sum(sizes) > extent.nbytes:
            least = min(sizes, default=0)
            raise ValueError(f"{len(sizes)} headers of {least} bytes or more, {sum(sizes)} in all, do not fit {extent}")
        with self._changed:
            self._check_open()
            self._check_acquired(extent)
            item = ExtentReady(self._take_ticket(), extent.offset, capture_id, tuple(headers))
            if item.body_bytes() > MAX_BODY_BYTES:
                raise ValueError(f"{len(sizes)} headers of {item.body_bytes()} bytes do not fit a message")
            self._acquired.remove(extent)
            self._handed_over[item.ticket] = extent
            self._published += 1
            self._submit(item)

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
                ring_bytes=self._ring.ring_bytes,
                bytes_used=self._allotment.bytes_used,
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
        """Stop serving shippers, and wake whoever waits for room. Extents that a shipper has are still delivered.

        The memory stays valid for whoever still holds a view of it.
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
            raise ValueError("name the capture: there are several stores, and each has room of its own")
        _, capture_id = split_path(path)
        return first_rank(self._stores, capture_id)

    def _wait_for_extent(self, nbytes: int, store: str) -> Extent | None:
        """Wait for a run that is long enough: there is one, once all that was published has come back."""

        def found() -> Extent | bool:
            return self._allotment.take(nbytes, store) or self._closed

        self._waits += 1
        start = time.monotonic()
        extent = self._changed.wait_for(found, _WARN_AFTER_SECONDS)
        if not extent:
            _log.warning(
                "the ring is full: the model waits for the store",
                store=store or None,
                wanted_bytes=nbytes,
                bytes_used=self._allotment.bytes_used,
                store_bytes_used=self._allotment.used[store],
                ring_bytes=self._ring.ring_bytes,
                shippers=self._dispatcher.num_links,
            )
            extent = self._changed.wait_for(found)
        self._seconds_waited += time.monotonic() - start
        self._check_open()
        return extent if isinstance(extent, Extent) else None

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosedError("the producer is closed") from self._failure

    def _check_acquired(self, extent: Extent) -> None:
        if extent not in self._acquired:
            raise ValueError(f"{extent} is not acquired, or is no longer")

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
            if isinstance(item, ExtentReady):
                self._freed += 1
                self._free(self._handed_over.pop(item.ticket))
            self._changed.notify_all()

    def _free(self, extent: Extent) -> None:
        self._allotment.give_back(extent)
        self._changed.notify_all()  # any run that comes back may be the missing part of a longer one

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._closed = True
            self._changed.notify_all()
