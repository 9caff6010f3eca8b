"""Collects items that are to be sent at about the same time, so that one call can carry them."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from residuum.rpc import tracing
from residuum.wire.limits import MAX_CAPTURES_PER_OPEN, MAX_MESSAGE_BYTES
from residuum.wire.rows.frames import length_prefix

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

_MAX_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Bytes of the items of one call. The rest is for the message around them."""


class Item(Protocol):
    """An item of a call."""

    @property
    def data(self) -> bytes:
        """What is sent of the item, serialised."""


def together(number: int, items: Iterable[Item]) -> bytes:
    """Return the call with items in its repeated field `number`. A message of them would copy each once more."""
    return b"".join(part for item in items for part in (length_prefix(number, len(item.data)), item.data))


_Item = TypeVar("_Item", bound=Item)


class Batches(Generic[_Item]):
    """Sends items in calls that carry as many as are ready.

    * An item alone is sent at the end of the current turn of the event loop. No timer delays it.
    * Items of the same turn go together. So do items that come while the store has not yet begun to answer the call
      before: with many requests at once, each call then carries more of them.
    * A call with one response, such as SealCaptures, shows only at its end that the store answers. The next call then
      starts when it has ended. A stream, such as OpenCaptures, lets the next call start at its first message.
    * If the process traces, an item with a trace goes alone, so that its call belongs to its trace.
    """

    def __init__(self, send: Callable[[list[_Item], Callable[[], None]], Awaitable[None]]) -> None:
        """Create the collection.

        Args:
            send: Sends one or more items. It is given a function to call as soon as the next items may be sent; its end
                counts as that, too. It must not raise.
        """
        self._send = send
        self._waiting: deque[_Item] = deque()
        self._is_due = False
        self._is_sending = False
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, item: _Item, *, alone: bool = False) -> None:
        """Send an item soon. `alone`: in a call of its own, which delays no other."""
        if alone or tracing.current_context() is not None:
            self._start([item], lambda: None)
            return
        self._waiting.append(item)
        if not self._is_due and not self._is_sending:
            self._is_due = True
            # With a context of its own: the call belongs to no single request, so its logs must not name one.
            asyncio.get_running_loop().call_soon(self._flush, context=contextvars.Context())

    def _flush(self) -> None:
        self._is_due = False
        items: list[_Item] = []
        num_bytes = 0
        while self._waiting and len(items) < MAX_CAPTURES_PER_OPEN:
            num_bytes += len(self._waiting[0].data)
            if items and num_bytes > _MAX_BYTES:
                break
            items.append(self._waiting.popleft())
        self._is_sending = bool(items)
        if items:
            is_released = False

            def release() -> None:
                nonlocal is_released
                if not is_released:
                    is_released = True
                    self._flush()

            self._start(items, release)

    def _start(self, items: list[_Item], release: Callable[[], None]) -> None:
        task = asyncio.ensure_future(self._send(items, release))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: release())
