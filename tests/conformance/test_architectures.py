"""Every row of each architecture, through both services, against transformers; several engines at a time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from bench.conformance.architectures import ARCHITECTURES, LAYERS
from bench.conformance.check import Setup, check
from bench.conformance.results import Outcome, Verdict
from bench.conformance.workload import NEW_TOKENS, make_requests
from examples.services import start_store

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_ENGINES = 3
"""At a time: starting keeps one core busy, and stopping none."""
NAMES = [name for name, architecture in ARCHITECTURES.items() if architecture.everyday]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """What becomes of each architecture that is asked for, by name."""
    chosen = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    folder = tmp_path_factory.mktemp("architectures")
    store = start_store(folder)
    with ThreadPoolExecutor(_ENGINES) as pool:
        try:
            store.wait_until_serving(60.0)

            def run(name: str) -> Outcome:
                return check(ARCHITECTURES[name], Setup(), store.endpoint, folder / f"run-{name}")

            yield {name: pool.submit(run, name) for name in chosen}
        finally:
            pool.shutdown(cancel_futures=True)
            store.stop()


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_that_of_transformers(outcomes: dict[str, Future[Outcome]], name: str) -> None:
    outcome = outcomes[name].result()
    assert outcome.verdict is Verdict.EXACT, outcome.detail
    requests = make_requests()
    assert outcome.rows == LAYERS * sum(len(request.prompt) + NEW_TOKENS - 1 for request in requests)
    assert outcome.states == {"complete": len(requests)}
    assert outcome.capturing_ranks == 1
