"""Making the next item of a stream while the one before is dealt with."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


def ahead(items: Generator[_T, None, None], depth: int = 1) -> Generator[_T, None, None]:
    """Yield what `items` yields, while a thread makes up to `depth` items ahead, and works on one more.

    To send a chunk, and to fetch and check the next one, holds no GIL for long; but one thread takes such steps one
    after the other. The first two items are made by the caller's own thread, so that what is answered in one or two
    messages costs no thread.

    What `items` raises is raised here. When this is closed, so is `items`, and the thread has ended: whatever `items`
    waits for must end when nobody wants it any more.
    """
    try:
        for _ in range(2):
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
        yield from _Ahead(items, depth).taken()
    finally:
        items.close()


class _Ahead(Generic[_T]):
    """A bounded queue, and the thread that fills it."""

    def __init__(self, items: Generator[_T, None, None], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._changed = threading.Condition()
        self._made: deque[_T] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._unwanted = False
        # Its log lines name the request, as the caller's do.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._make,), name="ahead")

    def taken(self) -> Iterator[_T]:
        """Yield the items."""
        self._thread.start()
        try:
            while self._wait_for_item():
                yield self._take()
        finally:
            self._stop()
        if self._error is not None:
            raise self._error

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
        except BaseException as error:  # noqa: BLE001 - raised again where the items are taken
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: _T) -> bool:
        """Queue an item as soon as there is room; tell whether it is still wanted."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._made) < self._depth or self._unwanted)
            self._made.append(item)
            self._changed.notify_all()
            return not self._unwanted
