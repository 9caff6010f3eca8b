"""Every row of each architecture, through both services, compared with transformers. Several engines run at a time.

The workers' uninitialised memory is filled with garbage, so that code that depends on it cannot pass by chance.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest

from bench.conformance.architectures import ARCHITECTURES, LAYERS
from bench.conformance.architectures.architecture import HEADS
from bench.conformance.check import check
from bench.conformance.reference import ALL_SITES, SITES
from bench.conformance.results import Outcome, Verdict
from bench.conformance.setup import Setup
from bench.conformance.workload import NEW_TOKENS, make_requests
from svc_common.launcher import start_store
from tests import one_process, warm_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    OutcomeOf = Callable[[str, tuple[str, ...], str], Outcome]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

_ENGINES = 2
"""Engines that run at the same time. An engine uses one core while it starts, and none while it stops."""
NAMES = [name for name, architecture in ARCHITECTURES.items() if architecture.everyday]
STEERABLE = {"attn_out", "resid_mid", "mlp_out", "z", "mlp_act"}
_REFUSED = [name for name in NAMES if ARCHITECTURES[name].refused]
_VLLM, _TRANSFORMERS = "vllm", "transformers"
"""Whose code runs the model: vLLM's own, or that of transformers (vLLM's `--model-impl`)."""
CASES = [
    *((name, ARCHITECTURES[name].site_sets(ALL_SITES)[-1], _VLLM) for name in NAMES),
    ("gemma2", tuple(site for site in SITES if site not in HEADS), _TRANSFORMERS),
]
REFUSED = [(name, SITES, _VLLM) for name in _REFUSED]


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutcomeOf]:
    """Checks each requested architecture once, with some capture sites."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    cases = [(chosen["name"], chosen["sites"], chosen["code"]) for chosen in params]
    folder = tmp_path_factory.mktemp("architectures")
    store = start_store(folder)
    with ThreadPoolExecutor(_ENGINES) as pool, pytest.MonkeyPatch.context() as patch:
        # Otherwise each engine compiles vLLM's count of ranks, which takes a quarter of its processor time.
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        try:
            store.wait_until_serving(60.0)

            def run(name: str, sites: tuple[str, ...], code: str) -> Outcome:
                engine_args = {**one_process.ENGINE_ARGS, "model_impl": code}
                setup = Setup(sites=sites, garbage=True, engine_args=engine_args)
                run_folder = folder / f"run-{name}-{len(sites)}-{code}"
                return check(ARCHITECTURES[name], setup, store.endpoint, run_folder, warm_start.launch)

            running: dict[tuple[str, tuple[str, ...], str], Future[Outcome]] = {
                case: pool.submit(run, *case) for case in cases
            }
            # All of them at once: threads that import modules disturb pytest between two tests.
            wait(running.values())
            yield lambda name, sites, code: running[name, sites, code].result()
        finally:
            pool.shutdown(cancel_futures=True)
            store.stop()


@pytest.mark.parametrize(("name", "sites", "code"), CASES, ids=[*NAMES, "gemma2-transformers"])
def test_every_row_is_that_of_transformers(outcome_of: OutcomeOf, name: str, sites: tuple[str, ...], code: str) -> None:
    outcome = outcome_of(name, sites, code)
    assert outcome.verdict is Verdict.EXACT, outcome.detail
    requests = make_requests(dict.fromkeys(STEERABLE & set(sites), (1, range(LAYERS))))
    positions = sum(len(request.prompt) + NEW_TOKENS - 1 for request in requests)
    lacking = sum(LAYERS - len(layers) for layers in outcome.site_layers.values())
    assert outcome.rows == (len(sites) * LAYERS - lacking) * positions
    assert outcome.states == {"complete": len(requests)}
    assert outcome.capturing_ranks == 1
    with_heads = len(outcome.site_layers.get("q", range(LAYERS))) if {"q", "k"} <= set(sites) else 0
    assert outcome.attention_layers == len(requests) * with_heads
    assert outcome.model_runner in {"v1", "v2"}


@pytest.mark.parametrize(("name", "sites", "code"), REFUSED, ids=_REFUSED)
def test_sites_that_a_model_lacks_are_refused_by_name(
    outcome_of: OutcomeOf, name: str, sites: tuple[str, ...], code: str
) -> None:
    outcome = outcome_of(name, sites, code)
    assert outcome.verdict is Verdict.REFUSED, outcome.detail
    sites = "resid_mid" if "resid_mid" in ARCHITECTURES[name].refused_sites else "attn_out and mlp_out"
    assert f"{sites} cannot be captured" in outcome.detail
    assert "--capture-sites" in outcome.detail
