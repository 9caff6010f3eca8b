"""Prefetching: a thread makes the next items of a stream while the consumer handles the current one."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")

_OWN_ITEMS = 8
"""One more than an answer may have without a thread, because its end must be found too. For a few messages, a thread
costs more than it saves."""


def ahead(items: Generator[_T, None, None], depth: int = 1) -> Generator[_T, None, None]:
    """Yield what `items` yields, while a thread prefetches up to `depth` items and works on one more.

    Sending a chunk, and fetching and checking the next one, hold the GIL only briefly, so two threads overlap them.
    The caller's own thread makes the first items. So a short answer, such as a manifest, the rows of one layer of a
    request and the closing manifest, costs no thread.

    Exceptions of `items` are raised here. Closing this generator ends the thread and closes `items`; it waits until
    `items` returns from whatever it waits for. So that wait must end soon after the caller has disconnected.
    """
    try:
        for _ in range(_OWN_ITEMS):
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
        yield from _Prefetcher(items, depth).items()
    finally:
        items.close()


class _Prefetcher(Generic[_T]):
    """A bounded queue, and the thread that fills it."""

    def __init__(self, items: Generator[_T, None, None], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._changed = threading.Condition()
        self._made: deque[_T] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._unwanted = False
        # The copied context makes the thread's log lines carry the request ID, as the caller's do.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._make,), name="ahead")

    def items(self) -> Iterator[_T]:
        """Start the thread and yield the items that it makes."""
        self._thread.start()
        try:
            while self._wait_for_item():
                yield self._take()
        finally:
            self._stop()
            # Kept here, it would be in a cycle with its traceback, which holds the shared memory of the read.
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _wait_for_item(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._made or self._ended)
            return bool(self._made)

    def _take(self) -> _T:
        with self._changed:
            self._changed.notify_all()
            return self._made.popleft()

    def _stop(self) -> None:
        with self._changed:
            self._unwanted = True
            self._changed.notify_all()
        self._thread.join()

    def _make(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:  # noqa: BLE001 - items() raises it again in the consumer's thread
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: _T) -> bool:
        """Queue an item once there is room. Return whether more items are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._made) < self._depth or self._unwanted)
            self._made.append(item)
            self._changed.notify_all()
            return not self._unwanted
