from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.calls import methods
from tests.fuzz.inference import SERVICE, FuzzedInference
from tests.fuzz.messages import Choices

inputs = st.binary(max_size=128)
some = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def service() -> Iterator[FuzzedInference]:
    with FuzzedInference() as running:
        yield running
        running.check()


@some
@given(data=inputs)
def test_hostile_calls_do_not_break_the_service(service: FuzzedInference, data: bytes) -> None:
    service.run(data)
    service.check()


@pytest.mark.parametrize("method", methods(SERVICE))
@settings(some, max_examples=40)
@given(data=inputs)
def test_no_message_causes_an_internal_error(service: FuzzedInference, method: str, data: bytes) -> None:
    service.call(Choices(data), method)
