"""The queue of a request's tokens."""

from __future__ import annotations

import asyncio

import pytest

from inference_svc.session.mailbox import Mailbox


async def test_the_reader_takes_all_items_in_order():
    box = Mailbox()
    box.put(1)
    box.put(2)
    assert await box.take() == [1, 2]
    taking = asyncio.ensure_future(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    box.put(3)
    box.put(4)  # before the reader runs
    assert await taking == [3, 4]


async def test_a_reader_that_is_cancelled_loses_no_item():
    box = Mailbox()
    taking = asyncio.ensure_future(box.take())
    await asyncio.sleep(0)
    taking.cancel()
    box.put(1)
    with pytest.raises(asyncio.CancelledError):
        await taking
    box.put(2)
    assert await box.take() == [1, 2]


async def test_a_woken_reader_takes_nothing():
    box = Mailbox()
    box.wake()  # nobody waits
    taking = asyncio.ensure_future(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    box.wake()
    assert await taking == []
