"""What is published of every capture: only what is committed."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_ID_LENGTH
from store_svc.capture import Capture, Wait


class Feed:
    """A capture that has not ended: its rows as they are, and the place to wait for more."""

    def __init__(self, capture: Capture, keys: list[bytes]) -> None:
        self.condition = threading.Condition()
        """Notified of each change, and by `Catalog.wake`."""
        self.capture = capture
        """The capture as it was last published; it is never changed, only replaced."""
        self.keys = keys
        """The keys of its frames, in the order of their commits; the list only grows."""
        self.deleted = False
        """Whether it was deleted."""

    def publish(self, capture: Capture, keys: list[bytes]) -> None:
        """Replace the capture, add the keys of new frames, and wake all that wait."""
        with self.condition:
            self.capture = capture
            self.keys.extend(keys)
            self.condition.notify_all()

    def delete(self) -> None:
        """Say that the capture is no more, and wake all that wait."""
        with self.condition:
            self.deleted = True
            self.condition.notify_all()

    def wake(self) -> None:
        """Wake all that wait, so that they look again."""
        with self.condition:
            self.condition.notify_all()


@dataclass(frozen=True)
class CatalogLimits:
    """How much is kept in memory."""

    max_captures: int = 1_000_000
    """Captures, whatever their state."""
    max_open_bytes: int = 1 << 30
    """Memory for the account of captures that have not ended, in bytes."""


_SCANNED_AT_ONCE = 512
"""Captures that a list looks at before it lets others have the lock."""


class Catalog:
    """All captures. The writer's thread alone changes it; anyone may read it."""

    def __init__(self, limits: CatalogLimits | None = None) -> None:
        self.limits = limits or CatalogLimits()
        """What the writer keeps to."""
        self.open_bytes = 0
        """Memory that the account of captures takes that have not ended."""
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._order: list[int] = []
        self._feeds: dict[int, Feed] = {}
        self._accounts: dict[int, int] = {}  # bytes, of those that have not ended
        self._ended: dict[int, store_pb2.CaptureSummary] = {}
        self._by_end: list[tuple[int, int]] = []  # (end in ns, number) of the ended
        self._readers: Counter[int] = Counter()
        self._expiring: set[int] = set()
        self._waiting: dict[Wait, dict[int, float]] = {wait: {} for wait in Wait}
        self.stopping = False
        """Whether the store is stopping; waits must end."""
        self.num_bytes = 0
        """Bytes of chunks of all captures."""
        self._states: Counter[capture_pb2.CaptureState.ValueType] = Counter()

    @property
    def num_captures(self) -> int:
        """How many captures there are."""
        return len(self._numbers)

    def number_of(self, capture_id: str) -> int | None:
        """Return the internal number of a capture, or None if there is no such capture."""
        return self._numbers.get(capture_id)

    def feed_of(self, number: int) -> Feed | None:
        """Return the feed of a capture, or None if it has ended or is no more."""
        return self._feeds.get(number)

    def require(self, capture_id: str) -> tuple[int, Feed | None]:
        """Return a capture's number, and its feed unless it has ended.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        with self._lock:
            return self._find(capture_id)

    @contextmanager
    def reading(self, capture_id: str) -> Iterator[tuple[int, Feed | None]]:
        """Give what `require` returns, and keep the capture from expiring for as long as the context lasts.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        with self._lock:
            number, feed = self._find(capture_id)
            self._readers[number] += 1
        try:
            yield number, feed
        finally:
            with self._lock:
                self._readers[number] -= 1
                if not self._readers[number]:
                    del self._readers[number]

    def oldest_ended(self) -> Iterator[tuple[int, store_pb2.CaptureSummary]]:
        """Yield ended captures with their numbers, the one that ended first before the others.

        For the writer's thread alone, which must change nothing meanwhile.
        """
        return ((number, self._ended[number]) for _, number in self._by_end)

    def begin_expiry(self, number: int) -> bool:
        """Hide an ended capture from readers, because it will be deleted; tells False, and does not, if one has it."""
        with self._lock:
            if number in self._readers:
                return False
            self._expiring.add(number)
            return True

    def cancel_expiry(self, number: int) -> None:
        """Show a capture again that could not be deleted."""
        with self._lock:
            self._expiring.discard(number)

    def open(self, capture: Capture, keys: list[bytes]) -> None:
        """Publish a capture that is new here, with the keys of its frames."""
        with self._lock:
            self._insert(capture.description.capture_id, capture.number)
            self._feeds[capture.number] = Feed(capture, keys)
            self._states[capture.state] += 1
        self.num_bytes += capture.num_bytes
        self.open_bytes += self._accounts.setdefault(capture.number, capture.account_bytes)
        self._note_progress(capture)

    def open_ended(self, number: int, summary: store_pb2.CaptureSummary) -> None:
        """Publish an ended capture that is new here."""
        with self._lock:
            self._insert(summary.capture_id, number)
            self._ended[number] = summary
            self._states[summary.state] += 1
        insort(self._by_end, _place(number, summary))
        self.num_bytes += summary.num_bytes

    def publish(self, capture: Capture, keys: list[bytes]) -> None:
        """Publish what became of a capture, and the keys of its new frames."""
        feed = self._feeds[capture.number]
        before = feed.capture
        self.num_bytes += capture.num_bytes - before.num_bytes
        before_bytes = self._accounts.pop(capture.number, 0)
        if not capture.ended:
            self._accounts[capture.number] = capture.account_bytes
        self.open_bytes += self._accounts.get(capture.number, 0) - before_bytes
        feed.publish(capture, keys)
        self._note_progress(capture)
        if capture.ended:
            summary = capture.summary()
            with self._lock:
                self._ended[capture.number] = summary
                del self._feeds[capture.number]
                self._states.subtract([before.state])
                self._states[capture.state] += 1
            insort(self._by_end, _place(capture.number, summary))

    def delete(self, capture_id: str, number: int) -> None:
        """Forget a capture."""
        with self._lock:
            del self._numbers[capture_id]
            feed = self._feeds.pop(number, None)
            ended = self._ended.pop(number, None)
            self._expiring.discard(number)
            del self._order[bisect_left(self._order, number)]
            for known in (feed.capture if feed else None, ended):
                if known:
                    self._states.subtract([known.state])
        if ended:
            self.num_bytes -= ended.num_bytes
            del self._by_end[bisect_left(self._by_end, _place(number, ended))]
        self.open_bytes -= self._accounts.pop(number, 0)
        if feed:
            self.num_bytes -= feed.capture.num_bytes
            feed.delete()
            self._waiting[feed.capture.wait].pop(number)

    def waiting(self, wait: Wait) -> Iterator[Capture]:
        """Yield the captures that wait for this, the one that made no progress for longest first.

        For the writer's thread alone, which must change nothing meanwhile.
        """
        return (self._feeds[number].capture for number in self._waiting[wait])

    def states(self) -> dict[capture_pb2.CaptureState.ValueType, int]:
        """Return how many captures are in each state, of those in which any is."""
        with self._lock:
            return {state: count for state, count in sorted(self._states.items()) if count}

    def newest(
        self,
        before: int | None = None,
        prefix: str = "",
        states: Collection[capture_pb2.CaptureState.ValueType] = (),
    ) -> Iterator[tuple[int, store_pb2.CaptureSummary | None]]:
        """Yield the numbers of captures, the newest first, and what they are in short, or None for those not wanted.

        Args:
            before: Only those with a number below this.
            prefix: Only those whose id starts with this.
            states: Only those in one of these states; empty means all.
        """
        while numbers := self._before(before):
            for number in numbers:
                summary = self._summary(number)
                if summary is not None and not (
                    summary.capture_id.startswith(prefix) and (not states or summary.state in states)
                ):
                    summary = None
                yield number, summary
            before = numbers[-1]

    def _before(self, number: int | None) -> list[int]:
        """Return the next captures with a number below this, the newest first."""
        with self._lock:
            end = len(self._order) if number is None else bisect_left(self._order, number)
            return self._order[max(end - _SCANNED_AT_ONCE, 0) : end][::-1]

    def stop(self) -> None:
        """Make every wait end."""
        self.stopping = True
        with self._lock:
            feeds = list(self._feeds.values())
        for feed in feeds:
            feed.wake()

    def _note_progress(self, capture: Capture) -> None:
        """Keep `_waiting` in the order of progress, at the same cost however many captures wait."""
        if self._waiting[capture.wait].get(capture.number) == capture.progress and not capture.ended:
            return
        for numbers in self._waiting.values():
            numbers.pop(capture.number, None)
        if not capture.ended:
            self._waiting[capture.wait][capture.number] = capture.progress

    def _find(self, capture_id: str) -> tuple[int, Feed | None]:
        number = self._numbers.get(capture_id)
        if number is None or number in self._expiring:
            raise unknown_capture(capture_id)
        return number, self._feeds.get(number)

    def _insert(self, capture_id: str, number: int) -> None:
        self._numbers[capture_id] = number
        insort(self._order, number)

    def _summary(self, number: int) -> store_pb2.CaptureSummary | None:
        with self._lock:
            feed, ended = self._feeds.get(number), self._ended.get(number)
        return feed.capture.summary() if feed else ended


def _place(number: int, summary: store_pb2.CaptureSummary) -> tuple[int, int]:
    return summary.end_time.ToNanoseconds(), number


def unknown_capture(capture_id: str) -> Failure:
    """Return the Failure that says that there is no such capture."""
    shown = capture_id[:MAX_ID_LENGTH]  # whatever was asked for, an answer is short
    message = f"The store holds no capture {shown!r}: it was never opened, or it was deleted, or has expired."
    return Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, message, capture_id=shown)
