"""A layer that two ranks share: both steer, one captures, and the rows equal those of a single rank.

A call that fails on the ranks leaves nothing behind for the next call.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from bench.conformance.architectures import ARCHITECTURES, LAYERS
from bench.conformance.check import check
from bench.conformance.models import make_model
from bench.conformance.results import Verdict
from bench.conformance.setup import Setup
from bench.conformance.workload import NEW_TOKENS, make_requests
from svc_common.launcher import ROOT, start_store
from tests import warm_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.slow]


SITES = ("resid_post", "final_norm", "q", "k", "v", "z", "mlp_act", "q_pre", "k_pre")
"""At the last seven, each rank has a part of every row."""


@pytest.fixture
def store_endpoint(tmp_path: Path) -> Iterator[str]:
    store = start_store(tmp_path)
    try:
        store.wait_until_serving(60.0)
        yield store.endpoint
    finally:
        store.stop()


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each of two ranks a core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("vLLM gives each rank its own core")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # otherwise each rank compiles a helper of the embedding


@pytest.mark.usefixtures("two_cores")
def test_two_ranks_capture_each_row_once(store_endpoint: str, tmp_path: Path) -> None:
    outcome = check(
        ARCHITECTURES["llama"],
        Setup(tensor_parallel_size=2, sites=SITES),
        store_endpoint,
        tmp_path / "two-ranks",
        warm_start.launch,
    )
    assert outcome.verdict is Verdict.EXACT, outcome.detail
    assert outcome.layout == (2, 1)
    assert outcome.capturing_ranks == 1
    points = (len(SITES) - 1) * LAYERS + 1  # only the last layer has the final norm
    assert outcome.rows == points * sum(len(request.prompt) + NEW_TOKENS - 1 for request in make_requests())


@pytest.mark.usefixtures("two_cores")
def test_a_call_that_fails_on_the_ranks_leaves_no_answer_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM stops reading at the first rank that raises, and would take the other answers for those to later calls."""
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300")
    model, log = make_model(ARCHITECTURES["llama"], tmp_path / "model"), tmp_path / "log"
    log.touch()
    process = warm_start.launch("tests.conformance.failing_call", [str(model)], ROOT, log)
    assert process.wait(400) == 0, log.read_text()
