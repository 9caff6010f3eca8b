"""Prefetching the next items of a stream while the consumer handles the current one."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_svc.reading import prefetch
from store_svc.reading.prefetch import ahead

_SECONDS = 10.0


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ahead"]


@given(st.lists(st.integers()), st.integers(1, 4))
def test_all_items_come_in_order(values: list[int], depth: int) -> None:
    assert list(ahead((value for value in values), depth)) == values
    assert not _threads()


def test_the_next_items_are_prefetched_while_one_is_handled() -> None:
    own = prefetch._OWN_ITEMS
    made = [threading.Event() for _ in range(own + 4)]

    def items() -> Generator[int, None, None]:
        for number, event in enumerate(made):
            event.set()
            yield number

    stream = ahead(items())
    for _ in range(own + 1):  # the last of them is the thread's first
        next(stream)
    assert made[own + 1].wait(_SECONDS), "the next item is not prefetched while one is handled"
    assert made[own + 2].wait(_SECONDS), "no item is started while the next one waits"
    assert not made[own + 3].is_set(), "too many items were prefetched"
    stream.close()
    assert not _threads()


@pytest.mark.parametrize("count", [0, 1, 3, prefetch._OWN_ITEMS - 1])
def test_short_streams_cost_no_thread(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started"))
    assert list(ahead(number for number in range(count))) == list(range(count))


@pytest.mark.parametrize("good", [0, 1, *range(prefetch._OWN_ITEMS - 1, prefetch._OWN_ITEMS + 4)])
def test_an_exception_is_raised_after_the_earlier_items(good: int) -> None:
    def items() -> Generator[int, None, None]:
        yield from range(good)
        raise LookupError("no more")

    stream = ahead(items())
    assert [next(stream) for _ in range(good)] == list(range(good))
    with pytest.raises(LookupError, match="no more"):
        next(stream)
    assert not _threads()


@pytest.mark.parametrize("taken", [1, *range(prefetch._OWN_ITEMS - 1, prefetch._OWN_ITEMS + 3)])
def test_closing_it_closes_the_items(taken: int) -> None:
    closed = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    stream = ahead(items())
    for _ in range(taken):
        next(stream)
    stream.close()
    assert closed.is_set()
    assert not _threads()
