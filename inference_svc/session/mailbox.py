"""A queue for one reader, which takes all items at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items that the tasks of one event loop put in, for one task.

    Each token of a reply comes through one. An `asyncio.Queue` takes several times as long for that, because it finds
    the running loop each time that its reader waits, which is a system call before Python 3.12.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._items: list[Item] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add an item."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():  # as in `wake`: a call would cost time for each token
            self._waiter.set_result(None)

    def wake(self) -> None:
        """End the wait of the reader, if it waits. It then gets no items if there are none."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Item]:
        """Return all items in their order, and leave none. If there is none, wait for the first one or for `wake`."""
        if not self._items:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items
