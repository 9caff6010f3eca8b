from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.calls import methods
from tests.fuzz.messages import Choices
from tests.fuzz.store import SERVICE, FuzzedStore

pytestmark = pytest.mark.usefixtures("shared_memory")

inputs = st.binary(max_size=128)
some = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def store() -> Iterator[FuzzedStore]:
    with FuzzedStore() as running:
        yield running
        running.check()


@some
@given(data=inputs)
def test_hostile_calls_do_not_break_the_store(store: FuzzedStore, data: bytes) -> None:
    store.run(data)
    store.check()


@pytest.mark.parametrize("method", methods(SERVICE))
@settings(some, max_examples=40)
@given(data=inputs)
def test_no_message_causes_an_internal_error(store: FuzzedStore, method: str, data: bytes) -> None:
    store.call(Choices(data), method)
