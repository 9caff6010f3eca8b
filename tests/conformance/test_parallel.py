"""A layer that two ranks share: both steer, one captures, and the rows equal those of a single rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from bench.conformance.architectures import ARCHITECTURES, LAYERS
from bench.conformance.check import Setup, check
from bench.conformance.results import Verdict
from bench.conformance.workload import NEW_TOKENS, make_requests
from svc_common.launcher import start_store
from tests import warm_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def store_endpoint(tmp_path: Path) -> Iterator[str]:
    store = start_store(tmp_path)
    try:
        store.wait_until_serving(60.0)
        yield store.endpoint
    finally:
        store.stop()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="vLLM gives each rank its own core")
def test_two_ranks_capture_each_row_once(store_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # otherwise each rank compiles a helper of the embedding
    outcome = check(
        ARCHITECTURES["llama"],
        Setup(tensor_parallel_size=2),
        store_endpoint,
        tmp_path / "two-ranks",
        warm_start.launch,
    )
    assert outcome.verdict is Verdict.EXACT, outcome.detail
    assert outcome.layout == (2, 1)
    assert outcome.capturing_ranks == 1
    assert outcome.rows == LAYERS * sum(len(request.prompt) + NEW_TOKENS - 1 for request in make_requests())
