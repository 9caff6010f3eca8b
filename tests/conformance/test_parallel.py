"""A layer that two ranks share: both steer, one captures, and the rows equal those of a single rank.

A call that fails on the ranks leaves nothing behind for the next call.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pytest

from bench.conformance.architectures import ARCHITECTURES, LAYERS
from bench.conformance.check import check
from bench.conformance.models import make_model
from bench.conformance.results import Verdict
from bench.conformance.setup import Setup
from bench.conformance.workload import NEW_TOKENS, make_requests
from inference_svc.engine.engine import Engine
from inference_svc.engine.ranks import RankFailedError
from inference_svc.settings import InferenceSettings
from inference_svc.taps.vllm.worker import SETTINGS_VARIABLE
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
        Setup(tensor_parallel_size=2),
        store_endpoint,
        tmp_path / "two-ranks",
        warm_start.launch,
    )
    assert outcome.verdict is Verdict.EXACT, outcome.detail
    assert outcome.layout == (2, 1)
    assert outcome.capturing_ranks == 1
    assert outcome.rows == LAYERS * sum(len(request.prompt) + NEW_TOKENS - 1 for request in make_requests())


@pytest.mark.usefixtures("two_cores")
async def test_a_call_that_fails_on_the_ranks_leaves_no_answer_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM stops reading at the first rank that raises, and would take the other answers for those to later calls."""
    for name in (SETTINGS_VARIABLE, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, os.environ.get(name, "spawn"))  # the engine sets them; this restores them
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300")
    settings = InferenceSettings(
        model=str(make_model(ARCHITECTURES["llama"], tmp_path / "model")),
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=2,
        kv_cache_gib=0.1,
        ring_mib=4,
        max_model_len=64,
    )
    with tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        engine = await Engine.start(settings, folder)
        try:
            with pytest.raises(
                RankFailedError, match=r"residuum_load_vectors failed in 2 of 2 workers \(rank 0: .*rank 1: "
            ):
                await engine.load_vectors([(0, b"not a float")])
            await engine.load_vectors([(0, bytes(4 * engine.facts.hidden_size))])
            assert await engine.change_steering({"nobody": []}) == {"nobody": 0}
        finally:
            engine.shutdown()
