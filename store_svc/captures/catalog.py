"""The catalog: the published state of every capture. Only committed changes are published."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.tokens import ANY_TENANT
from store_svc.captures.capture_names import CaptureName, name_of, unknown_capture
from store_svc.captures.leases import Leases
from store_svc.captures.lifecycle import OPEN, Capture, Wait


class Feed:
    """A capture that has not ended: its published state, and a condition to wait on for more rows."""

    def __init__(self, capture: Capture, keys: list[bytes]) -> None:
        self.condition = threading.Condition()
        """Notified of each change, and by `wake`."""
        self.capture = capture
        """The capture as last published. A published Capture never changes; it is only replaced."""
        self.keys = keys
        """The keys of its frames, in commit order; the list only grows."""
        self.deleted = False
        """Whether the capture was deleted."""
        self._watchers: set[threading.Event] = set()

    @contextmanager
    def watched(self, news: threading.Event) -> Iterator[None]:
        """Set an event at each change, and at each `wake`, for as long as the context lasts."""
        with self.condition:
            self._watchers.add(news)
        try:
            yield
        finally:
            with self.condition:
                self._watchers.discard(news)

    def publish(self, capture: Capture, keys: list[bytes]) -> None:
        """Replace the capture, add the keys of new frames, and wake all waiters."""
        with self.condition:
            self.capture = capture
            self.keys.extend(keys)
            self._notify()

    def delete(self) -> None:
        """Mark the capture as deleted, and wake all waiters."""
        with self.condition:
            self.deleted = True
            self._notify()

    def wake(self) -> None:
        """Wake all waiters, so that they check their conditions again."""
        with self.condition:
            self._notify()

    def _notify(self) -> None:
        self.condition.notify_all()
        for news in self._watchers:
            news.set()


@dataclass(frozen=True)
class CatalogLimits:
    """Limits on what the catalog keeps in memory."""

    max_captures: int = 1_000_000
    """Captures in any state."""
    max_open_bytes: int = 1 << 30
    """Memory for the state of open captures, in bytes."""


_COPIED, _MOVED = capture_pb2.ARCHIVE_STATE_COPIED, capture_pb2.ARCHIVE_STATE_MOVED

_SCANNED_AT_ONCE = 512
"""Captures that a listing copies before it releases the lock."""


class Holdings:
    """The captures of one tenant, or of all, with their totals. Changed under the catalog's lock."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Internal numbers, ascending, which is the order in which the captures were opened."""
        self.num_bytes = 0
        """Bytes of all chunks in the database. Those that are only in the archive do not count."""
        self.open_bytes = 0
        """Estimated memory that the state of open captures takes, in bytes."""
        self.states: Counter[capture_pb2.CaptureState.ValueType] = Counter()
        """Number of captures in each state."""

    @property
    def num_open(self) -> int:
        """Number of open captures."""
        return self.states[OPEN]


_NOTHING = Holdings()


class Catalog:
    """All captures. Only the writer thread changes the catalog; any thread may read it."""

    def __init__(
        self, limits: CatalogLimits | None = None, leases: Leases | None = None, *, has_archive: bool = False
    ) -> None:
        self.has_archive = has_archive
        """Whether ended captures are copied to an archive."""
        self.is_archive_claimed = False
        """Whether the archive has answered since the start, and is known to be this store's."""
        self.limits = limits or CatalogLimits()
        """The limits that the writer enforces."""
        self.leases = leases or Leases()
        """The leases of the inference services."""
        self._lock = threading.Lock()
        self._numbers: dict[CaptureName, int] = {}
        self._all = Holdings()
        self._tenants: dict[str, Holdings] = {}
        self._feeds: dict[int, Feed] = {}
        self._open_bytes_by_number: dict[int, int] = {}
        self._ended: dict[int, store_pb2.CaptureSummary] = {}
        self._by_end: list[tuple[int, int]] = []  # (end time in ns, number) of ended captures, ascending
        self._only_here: list[tuple[int, int]] = []  # the same, of those that are not in the archive
        self._copied: OrderedDict[int, None] = OrderedDict()  # rows here and in the archive, last read at the end
        self.bytes_copied = 0
        """Bytes of chunks that are in the database and in the archive."""
        self.bytes_dropped = 0
        """Bytes of chunks that were dropped from the database, because the archive has them."""
        self._readers: Counter[int] = Counter()
        self._archive_states: Counter[capture_pb2.ArchiveState.ValueType] = Counter()
        self._expiring: set[int] = set()
        self._waiting: dict[Wait, dict[int, float]] = {wait: {} for wait in Wait}
        self.stopping = False
        """Whether the store is stopping. Every wait must then end."""

    @property
    def num_captures(self) -> int:
        """Number of captures."""
        return len(self._numbers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunks of all captures."""
        return self._all.num_bytes

    @property
    def open_bytes(self) -> int:
        """Estimated memory that the state of open captures takes, in bytes."""
        return self._all.open_bytes

    def holdings(self, tenant: str | None = None) -> Holdings:
        """Return the captures and totals of one tenant, or of all tenants if it is None."""
        return self._all if tenant is None else self._tenants.get(tenant, _NOTHING)

    def number_of(self, name: CaptureName) -> int | None:
        """Return the internal number of a capture, or None if it does not exist."""
        return self._numbers.get(name)

    def feed_of(self, number: int) -> Feed | None:
        """Return the feed of a capture, or None if the capture has ended or was deleted."""
        return self._feeds.get(number)

    def feed_named(self, name: CaptureName) -> Feed | None:
        """Return the feed of a capture, or None if it does not exist or has ended."""
        with self._lock:
            return self._feeds.get(self._numbers.get(name, -1))

    def state_of(self, name: CaptureName) -> capture_pb2.CaptureState.ValueType | None:
        """Return the state of a capture, or None if it does not exist."""
        number = self._numbers.get(name)
        summary = None if number is None else self.summary_of(number)
        return None if summary is None else summary.state

    def require(self, name: CaptureName) -> tuple[int, Feed | None]:
        """Return a capture's number and its feed; the feed is None if the capture has ended.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        with self._lock:
            return self._find(name)

    @contextmanager
    def reading(self, name: CaptureName) -> Iterator[tuple[int, Feed | None]]:
        """Yield what `require` returns, and keep the capture from expiring for as long as the context lasts.

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
        """Yield the numbers and summaries of ended captures, in the order in which they ended.

        Only the writer thread may call this, and it must not change the catalog while iterating.
        """
        return ((number, self._ended[number]) for _, number in self._by_end)

    def oldest_only_here(self) -> Iterator[tuple[int, store_pb2.CaptureSummary]]:
        """Yield those of `oldest_ended` that are not in the archive. The same rules hold."""
        return ((number, self._ended[number]) for _, number in self._only_here)

    def to_drop(self, num_bytes: int, limit: int) -> list[int]:
        """Return at most `limit` copied captures that have these bytes together. Those not read for longest go first.

        If one is being read, its reader finds the other rows in the archive. None are returned before the archive is
        known to be this store's: another one does not have the rows.
        """
        numbers: list[int] = []
        if num_bytes <= 0 or not self.is_archive_claimed:
            return numbers
        with self._lock:
            for number in self._copied:
                numbers.append(number)
                num_bytes -= self._ended[number].num_bytes
                if num_bytes <= 0 or len(numbers) == limit:
                    break
        return numbers

    def touch(self, number: int) -> None:
        """Note that a capture is read, so that its rows are dropped later than others."""
        with self._lock:
            if number in self._copied:
                self._copied.move_to_end(number)

    def begin_expiry(self, number: int) -> bool:
        """Hide an ended capture from readers before it is deleted. Return False, changing nothing, if one reads it."""
        with self._lock:
            if number in self._readers:
                return False
            self._expiring.add(number)
            return True

    def cancel_expiry(self, number: int) -> None:
        """Show a capture to readers again, because it could not be deleted."""
        with self._lock:
            self._expiring.discard(number)

    def open(self, capture: Capture, keys: list[bytes], holder: str = ANY_TENANT) -> None:
        """Add an open capture to the catalog, with the keys of its frames. Its service's lease starts anew.

        `holder`: see `Leases.renew`.
        """
        if capture.description.service_instance:
            self.leases.renew(capture.description.service_instance, holder)
        with self._lock:
            self._insert(name_of(capture.description), capture.number)
            self._feeds[capture.number] = Feed(capture, keys)
            self._count(capture.description.tenant, {capture.state: 1}, capture.num_bytes)
        self._note_open_bytes(capture.number, capture.description.tenant, capture.memory_bytes)
        self._note_progress(capture)

    def open_ended(self, number: int, summary: store_pb2.CaptureSummary) -> None:
        """Add an ended capture to the catalog."""
        with self._lock:
            self._insert(name_of(summary), number)
            self._add_ended(number, summary)
            self._count(summary.tenant, {summary.state: 1}, local_bytes(summary))

    def publish(self, capture: Capture, keys: list[bytes]) -> None:
        """Publish the new state of a capture, and the keys of its new frames."""
        feed = self._feeds[capture.number]
        before = feed.capture
        added = capture.num_bytes - before.num_bytes
        self._note_open_bytes(capture.number, capture.description.tenant, 0 if capture.ended else capture.memory_bytes)
        feed.publish(capture, keys)
        self._note_progress(capture)
        if not capture.ended:
            with self._lock:
                self._count(capture.description.tenant, {}, added)
        else:
            summary = capture.summary()
            with self._lock:
                self._add_ended(capture.number, summary)
                del self._feeds[capture.number]
                self._count(summary.tenant, {before.state: -1}, added)
                self._count(summary.tenant, {capture.state: 1}, 0)  # it may have been opened and have ended at once

    def note_archive_state(self, number: int, state: capture_pb2.ArchiveState.ValueType) -> None:
        """Publish where the rows of an ended capture are. Those that are only in the archive no longer count."""
        with self._lock:
            before = self._remove_ended(number)
            summary = store_pb2.CaptureSummary()
            summary.CopyFrom(before)
            summary.archive_state = state
            self._add_ended(number, summary)
            self._count(summary.tenant, {}, local_bytes(summary) - local_bytes(before))
            if state == _MOVED:
                self.bytes_dropped += summary.num_bytes

    def archive_states(self) -> dict[capture_pb2.ArchiveState.ValueType, int]:
        """Return how many ended captures are in each state of the archive."""
        with self._lock:
            return dict(self._archive_states)

    def delete(self, name: CaptureName, number: int) -> None:
        """Remove a capture from the catalog, and wake its waiters."""
        with self._lock:
            del self._numbers[name]
            feed = self._feeds.pop(number, None)
            ended = self._remove_ended(number) if number in self._ended else None
            self._expiring.discard(number)
            known = feed.capture if feed else ended
            assert known is not None  # noqa: S101 - every number belongs to a feed or an ended capture
            self._count(name.tenant, {known.state: -1}, -local_bytes(known))
            self._note_open_bytes(number, name.tenant, 0)
            self._remove(name, number)
        if feed:
            feed.delete()
            self._waiting[feed.capture.wait].pop(number)

    def waiting(self, wait: Wait) -> Iterator[Capture]:
        """Yield the captures that wait for `wait`; those whose last progress is longest ago come first.

        Only the writer thread may call this, and it must not change the catalog while iterating.
        """
        return (self._feeds[number].capture for number in self._waiting[wait])

    def states(self, tenant: str | None = None) -> dict[capture_pb2.CaptureState.ValueType, int]:
        """Return the number of captures in each state, of one tenant or of all; without the states that have none."""
        with self._lock:
            return {state: count for state, count in sorted(self.holdings(tenant).states.items()) if count}

    def newest(
        self,
        before: int | None = None,
        prefix: str = "",
        states: Collection[capture_pb2.CaptureState.ValueType] = (),
        tenant: str | None = None,
        among: Iterator[int] | None = None,
    ) -> Iterator[tuple[int, store_pb2.CaptureSummary | None]]:
        """Yield each capture's number, newest first, with its summary; the summary is None if a filter excludes it.

        Args:
            before: Yield only captures with a lower number.
            prefix: Match only captures whose ID starts with this.
            states: Match only captures in one of these states; empty matches all.
            tenant: Yield only this tenant's captures; None yields those of all tenants.
            among: Yield only these captures, of those that `before` and `tenant` select, newest first; None yields all.
        """
        for number in among if among is not None else self._numbers_before(before, tenant):
            summary = self.summary_of(number)
            if summary is not None and not (
                summary.capture_id.startswith(prefix) and (not states or summary.state in states)
            ):
                summary = None
            yield number, summary

    def _numbers_before(self, before: int | None, tenant: str | None) -> Iterator[int]:
        while numbers := self._before(before, tenant):
            yield from numbers
            before = numbers[-1]

    def _before(self, number: int | None, tenant: str | None) -> list[int]:
        """Return the next numbers below this one, newest first."""
        with self._lock:
            numbers = self.holdings(tenant).numbers
            end = len(numbers) if number is None else bisect_left(numbers, number)
            return numbers[max(end - _SCANNED_AT_ONCE, 0) : end][::-1]

    def stop(self) -> None:
        """End every wait."""
        self.stopping = True
        with self._lock:
            feeds = list(self._feeds.values())
        for feed in feeds:
            feed.wake()

    def _note_open_bytes(self, number: int, tenant: str, num_bytes: int) -> None:
        added = num_bytes - self._open_bytes_by_number.pop(number, 0)
        if num_bytes:
            self._open_bytes_by_number[number] = num_bytes
        for holdings in (self._all, self._tenants[tenant]):
            holdings.open_bytes += added

    def _note_progress(self, capture: Capture) -> None:
        """Keep `_waiting` in order of progress, in constant time."""
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

    def _add_ended(self, number: int, summary: store_pb2.CaptureSummary) -> None:
        """Add an ended capture. The caller has the lock."""
        if self.has_archive and not summary.archive_state:
            summary.archive_state = capture_pb2.ARCHIVE_STATE_PENDING
        self._archive_states[summary.archive_state] += 1
        self._ended[number] = summary
        insort(self._by_end, _end_key(number, summary))
        if summary.archive_state == _COPIED:
            if summary.num_bytes:
                self._copied[number] = None
            self.bytes_copied += summary.num_bytes
        elif summary.archive_state != _MOVED:
            insort(self._only_here, _end_key(number, summary))

    def _remove_ended(self, number: int) -> store_pb2.CaptureSummary:
        """Remove an ended capture, and return its summary. The caller has the lock."""
        summary = self._ended.pop(number)
        self._archive_states[summary.archive_state] -= 1
        del self._by_end[bisect_left(self._by_end, _end_key(number, summary))]
        if summary.archive_state == _COPIED:
            self._copied.pop(number, None)
            self.bytes_copied -= summary.num_bytes
        elif summary.archive_state != _MOVED:
            del self._only_here[bisect_left(self._only_here, _end_key(number, summary))]
        return summary

    def _count(self, tenant: str, states: Mapping[capture_pb2.CaptureState.ValueType, int], num_bytes: int) -> None:
        for holdings in (self._all, self._tenants[tenant]):
            holdings.num_bytes += num_bytes
            for state, count in states.items():
                holdings.states[state] += count

    def summary_of(self, number: int) -> store_pb2.CaptureSummary | None:
        """Return the summary of a capture, or None if it does not exist."""
        with self._lock:
            feed, ended = self._feeds.get(number), self._ended.get(number)
        return feed.capture.summary() if feed else ended


def local_bytes(capture: Capture | store_pb2.CaptureSummary) -> int:
    """Return the bytes of a capture's chunks in the database."""
    is_moved = isinstance(capture, store_pb2.CaptureSummary) and capture.archive_state == _MOVED
    return 0 if is_moved else capture.num_bytes


def _end_key(number: int, summary: store_pb2.CaptureSummary) -> tuple[int, int]:
    return summary.end_time.ToNanoseconds(), number
