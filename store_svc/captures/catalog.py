"""What is published of every capture: only what is committed."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from residuum.v1 import capture_pb2, store_pb2
from store_svc.captures.capture_names import CaptureName, name_of, unknown_capture
from store_svc.captures.lifecycle import OPEN, Capture, Wait


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


class Holdings:
    """Some captures, and how much they are: those of a tenant, or all. Changed under the catalog's lock."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Their internal numbers, ascending: the order in which they were opened."""
        self.num_bytes = 0
        """Bytes of their chunks."""
        self.states: Counter[capture_pb2.CaptureState.ValueType] = Counter()
        """How many are in each state."""

    @property
    def num_open(self) -> int:
        """How many have not ended."""
        return self.states[OPEN]


_NOTHING = Holdings()


class Catalog:
    """All captures. The writer's thread alone changes it; anyone may read it."""

    def __init__(self, limits: CatalogLimits | None = None) -> None:
        self.limits = limits or CatalogLimits()
        """What the writer keeps to."""
        self.open_bytes = 0
        """Memory that the account of captures takes that have not ended."""
        self._lock = threading.Lock()
        self._numbers: dict[CaptureName, int] = {}
        self._all = Holdings()
        self._tenants: dict[str, Holdings] = {}
        self._feeds: dict[int, Feed] = {}
        self._accounts: dict[int, int] = {}  # bytes, of those that have not ended
        self._ended: dict[int, store_pb2.CaptureSummary] = {}
        self._by_end: list[tuple[int, int]] = []  # (end in ns, number) of the ended
        self._readers: Counter[int] = Counter()
        self._expiring: set[int] = set()
        self._waiting: dict[Wait, dict[int, float]] = {wait: {} for wait in Wait}
        self.stopping = False
        """Whether the store is stopping; waits must end."""

    @property
    def num_captures(self) -> int:
        """How many captures there are."""
        return len(self._numbers)

    @property
    def num_bytes(self) -> int:
        """Bytes of chunks of all captures."""
        return self._all.num_bytes

    def holdings(self, tenant: str | None = None) -> Holdings:
        """Return what a tenant has; None: all together."""
        return self._all if tenant is None else self._tenants.get(tenant, _NOTHING)

    def number_of(self, name: CaptureName) -> int | None:
        """Return the internal number of a capture, or None if there is no such capture."""
        return self._numbers.get(name)

    def feed_of(self, number: int) -> Feed | None:
        """Return the feed of a capture, or None if it has ended or is no more."""
        return self._feeds.get(number)

    def require(self, name: CaptureName) -> tuple[int, Feed | None]:
        """Return a capture's number, and its feed unless it has ended.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        with self._lock:
            return self._find(name)

    @contextmanager
    def reading(self, name: CaptureName) -> Iterator[tuple[int, Feed | None]]:
        """Give what `require` returns, and keep the capture from expiring for as long as the context lasts.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        with self._lock:
            number, feed = self._find(name)
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
            self._insert(name_of(capture.description), capture.number)
            self._feeds[capture.number] = Feed(capture, keys)
            self._count(capture.description.tenant, {capture.state: 1}, capture.num_bytes)
        self.open_bytes += self._accounts.setdefault(capture.number, capture.account_bytes)
        self._note_progress(capture)

    def open_ended(self, number: int, summary: store_pb2.CaptureSummary) -> None:
        """Publish an ended capture that is new here."""
        with self._lock:
            self._insert(name_of(summary), number)
            self._ended[number] = summary
            self._count(summary.tenant, {summary.state: 1}, summary.num_bytes)
        insort(self._by_end, _place(number, summary))

    def publish(self, capture: Capture, keys: list[bytes]) -> None:
        """Publish what became of a capture, and the keys of its new frames."""
        feed = self._feeds[capture.number]
        before = feed.capture
        added = capture.num_bytes - before.num_bytes
        before_bytes = self._accounts.pop(capture.number, 0)
        if not capture.ended:
            self._accounts[capture.number] = capture.account_bytes
        self.open_bytes += self._accounts.get(capture.number, 0) - before_bytes
        feed.publish(capture, keys)
        self._note_progress(capture)
        if not capture.ended:
            with self._lock:
                self._count(capture.description.tenant, {}, added)
        else:
            summary = capture.summary()
            with self._lock:
                self._ended[capture.number] = summary
                del self._feeds[capture.number]
                self._count(summary.tenant, {before.state: -1, capture.state: 1}, added)
            insort(self._by_end, _place(capture.number, summary))

    def delete(self, name: CaptureName, number: int) -> None:
        """Forget a capture."""
        with self._lock:
            del self._numbers[name]
            feed = self._feeds.pop(number, None)
            ended = self._ended.pop(number, None)
            self._expiring.discard(number)
            known = feed.capture if feed else ended
            assert known is not None  # noqa: S101 - it has a number
            self._count(name.tenant, {known.state: -1}, -known.num_bytes)
            self._remove(name, number)
        if ended:
            del self._by_end[bisect_left(self._by_end, _place(number, ended))]
        self.open_bytes -= self._accounts.pop(number, 0)
        if feed:
            feed.delete()
            self._waiting[feed.capture.wait].pop(number)

    def waiting(self, wait: Wait) -> Iterator[Capture]:
        """Yield the captures that wait for this, the one that made no progress for longest first.

        For the writer's thread alone, which must change nothing meanwhile.
        """
        return (self._feeds[number].capture for number in self._waiting[wait])

    def states(self, tenant: str | None = None) -> dict[capture_pb2.CaptureState.ValueType, int]:
        """Return how many captures of a tenant, or of all, are in each state, of those in which any is."""
        with self._lock:
            return {state: count for state, count in sorted(self.holdings(tenant).states.items()) if count}

    def newest(
        self,
        before: int | None = None,
        prefix: str = "",
        states: Collection[capture_pb2.CaptureState.ValueType] = (),
        tenant: str | None = None,
    ) -> Iterator[tuple[int, store_pb2.CaptureSummary | None]]:
        """Yield the numbers of captures, the newest first, and what they are in short, or None for those not wanted.

        Args:
            before: Only those with a number below this.
            prefix: Only those whose id starts with this.
            states: Only those in one of these states; empty means all.
            tenant: Only those of this tenant; None means of all.
        """
        while numbers := self._before(before, tenant):
            for number in numbers:
                summary = self._summary(number)
                if summary is not None and not (
                    summary.capture_id.startswith(prefix) and (not states or summary.state in states)
                ):
                    summary = None
                yield number, summary
            before = numbers[-1]

    def _before(self, number: int | None, tenant: str | None) -> list[int]:
        """Return the next captures with a number below this, the newest first."""
        with self._lock:
            numbers = self.holdings(tenant).numbers
            end = len(numbers) if number is None else bisect_left(numbers, number)
            return numbers[max(end - _SCANNED_AT_ONCE, 0) : end][::-1]

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

    def _find(self, name: CaptureName) -> tuple[int, Feed | None]:
        number = self._numbers.get(name)
        if number is None or number in self._expiring:
            raise unknown_capture(name.capture_id)
        return number, self._feeds.get(number)

    def _insert(self, name: CaptureName, number: int) -> None:
        self._numbers[name] = number
        for holdings in (self._all, self._tenants.setdefault(name.tenant, Holdings())):
            insort(holdings.numbers, number)

    def _remove(self, name: CaptureName, number: int) -> None:
        own = self._tenants[name.tenant]
        for holdings in (self._all, own):
            del holdings.numbers[bisect_left(holdings.numbers, number)]
        if not own.numbers:
            del self._tenants[name.tenant]

    def _count(self, tenant: str, states: Mapping[capture_pb2.CaptureState.ValueType, int], num_bytes: int) -> None:
        for holdings in (self._all, self._tenants[tenant]):
            holdings.num_bytes += num_bytes
            for state, count in states.items():
                holdings.states[state] += count

    def _summary(self, number: int) -> store_pb2.CaptureSummary | None:
        with self._lock:
            feed, ended = self._feeds.get(number), self._ended.get(number)
        return feed.capture.summary() if feed else ended


def _place(number: int, summary: store_pb2.CaptureSummary) -> tuple[int, int]:
    return summary.end_time.ToNanoseconds(), number
