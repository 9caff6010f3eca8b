"""Counts running calls: limits how many run at once, and waits until none runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from residuum.rpc.errors import Failure, Reason
from residuum.wire.tokens import ANY_TENANT
from svc_common.security.tokens_file import Limits, no_limits

SHORT_CALLS = 32
"""Call slots beyond those of reads and writes. They keep health checks and short calls working at the limits."""

MAX_SEARCHES = 2
"""Searches that may run at once. They share threads, and count as reads too."""


@dataclass
class _Slots:
    limit: int
    name: str
    """The limit's name, for programs."""
    what: str
    """What it limits, for people."""
    taken: int = 0
    holders: Counter[str] = field(default_factory=Counter)
    """How many each tenant occupies; "*": callers that act for all tenants."""


class Calls:
    """Counts calls, except health watches, which last as long as their clients like."""

    def __init__(self, max_streams: int, max_writers: int, limits_of: Callable[[str], Limits] = no_limits) -> None:
        """Create the counter.

        Args:
            max_streams: Reads and waits that may run at once.
            max_writers: Writer streams that may run at once. They have a limit of their own: readers may wait for rows
                that only writers bring, so readers must not shut writers out.
            limits_of: Returns a tenant's limits.
        """
        self._limits_of = limits_of
        self._condition = threading.Condition()
        self._running = 0
        self._readers = _Slots(max_streams, "max_streams", "reads and waits")
        self._writers = _Slots(max_writers, "max_writers", "writer streams")
        self._searches = _Slots(MAX_SEARCHES, "searches", "searches")
        self._searchers: set[str] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a call for as long as the context lasts."""
        with self._condition:
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    def reading(self, holder: str = ANY_TENANT) -> AbstractContextManager[None]:
        """Count a caller's call as a read or a wait for as long as the context lasts. `holder`: `Caller.holder`.

        Raises:
            Failure: LIMIT_REACHED, when the context is entered.
        """
        return self._occupy(self._readers, holder)

    def writing(self, holder: str = ANY_TENANT) -> AbstractContextManager[None]:
        """Count a caller's call as a writer stream for as long as the context lasts. `holder`: `Caller.holder`.

        Raises:
            Failure: LIMIT_REACHED, when the context is entered.
        """
        return self._occupy(self._writers, holder)

    @contextmanager
    def searching(self, holder: str) -> Iterator[None]:
        """Count a caller's call as a search for as long as the context lasts. `holder`: `Caller.holder`.

        A tenant runs one search at a time, so that it leaves room for the others. Without tenants ("*"), all may be one
        caller's.

        Raises:
            Failure: LIMIT_REACHED, when the context is entered.
        """
        with self._condition:
            if holder in self._searchers:
                message = "A search of this tenant is running. Try again when it has ended."
                raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit="searches")
            if holder != ANY_TENANT:
                self._searchers.add(holder)
        try:
            with self._occupy(self._searches, ANY_TENANT):
                yield
        finally:
            self._searchers.discard(holder)

    @property
    def num_reading(self) -> int:
        """Running reads and waits."""
        return self._readers.taken

    @property
    def num_writing(self) -> int:
        """Running writer streams."""
        return self._writers.taken

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no call runs, or for `timeout` seconds."""
        with self._condition:
            self._condition.wait_for(lambda: not self._running, timeout)

    @contextmanager
    def _occupy(self, slots: _Slots, holder: str) -> Iterator[None]:
        """Occupy a slot. At the limit this fails at once: a waiting call would hold a server thread."""
        share = self._limits_of(holder).share_of(slots.limit)
        with self._condition:
            if slots.taken >= slots.limit:
                message = f"The store already serves {slots.limit} {slots.what}, its limit. Try again later."
                raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit=slots.name)
            if slots.holders[holder] >= share:
                message = f"The store already serves {share} {slots.what} of your tenant, its share of {slots.limit}. "
                message += "Try again later."
                raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit=slots.name)
            slots.taken += 1
            slots.holders[holder] += 1
        try:
            yield
        finally:
            with self._condition:
                slots.taken -= 1
                slots.holders -= Counter([holder])
