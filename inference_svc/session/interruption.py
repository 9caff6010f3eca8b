"""Awaits work that an event may interrupt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from residuum.rpc.errors import Failure

_T = TypeVar("_T")


async def unless_interrupted(
    interrupted: asyncio.Event, failure: Callable[[], Failure], work: Coroutine[object, object, _T]
) -> _T:
    """Return the result of `work`, or cancel it if the event is set first.

    Raises:
        Failure: The event was set first. `failure` returns it.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise failure()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
