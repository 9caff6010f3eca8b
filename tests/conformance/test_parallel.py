"""A layer that two ranks share: both steer, each captures a part of the requests, and the rows equal those of a single
rank. If one is killed, no capture is complete. One of them scores rows, and both compute features.

Two ranks with half of the layers each: both capture, and a change of steering reaches both at the same position.

A call that fails on the ranks leaves nothing behind for the next call.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import residuum
from bench.conformance.architectures import ARCHITECTURES, LAYERS
from bench.conformance.check import check
from bench.conformance.models import make_model
from bench.conformance.results import KILLED, Verdict
from bench.conformance.setup import Setup
from bench.conformance.workload import NEW_TOKENS, make_requests
from svc_common.launcher import ROOT, start_store
from tests import warm_start
from tests.conformance.engines import running_engine
from tests.conformance.rows import ALL, check_capture, make_prompt
from tests.conformance.steering import add, in_turn, tensor
from tests.conformance.steering import replace as replacing
from tests.observing import metrics
from tests.reference.tiny import HIDDEN
from tests.reference.tiny import LAYERS as TINY_LAYERS
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]


STREAM = ("resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post")
HEADS = ("q", "k", "v", "z", "q_pre", "k_pre")
"""At these sites and at `mlp_act`, each rank has a part of every row."""
SITES = {
    "llama": (*STREAM, *HEADS, "mlp_act", "final_norm"),
    "qwen3_moe": (*STREAM, *HEADS, "router_logits", "routing_weights", "final_norm"),
}
"""All sites of a dense model, and of a mixture of experts."""


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
@pytest.mark.parametrize("name", SITES)
def test_two_ranks_capture_each_row_once_and_the_death_of_one_ends_all_captures(
    name: str, store_endpoint: str, tmp_path: Path
) -> None:
    sites = SITES[name]
    outcome = check(
        ARCHITECTURES[name],
        Setup(tensor_parallel_size=2, sites=sites, kill=True),
        store_endpoint,
        tmp_path / "two-ranks",
        warm_start.launch,
    )
    assert outcome.verdict is Verdict.EXACT, outcome.detail
    assert outcome.layout == (2, 1)
    assert outcome.capturing_ranks == 2
    assert outcome.ends_killed is not None
    assert outcome.ends_killed.keys() == {KILLED}
    points = (len(sites) - 1) * LAYERS + 1  # only the last layer has the final norm
    requests = make_requests({"attn_out": (1, range(LAYERS))})  # one more is steered inside the layers
    assert outcome.rows == points * sum(len(request.prompt) + NEW_TOKENS - 1 for request in requests)


@pytest.mark.usefixtures("two_cores")
def test_two_ranks_score_rows_and_compute_features(tiny_llama: Path, cache_root: Path, reference: Reference) -> None:
    """One rank scores, and both compute the features of their own captures, while rows are steered by a feature."""
    folder = cache_root.parent / "ranks"
    folder.mkdir()
    source = np.random.default_rng(92)
    weights, layer = source.standard_normal((HIDDEN, HIDDEN)).astype(np.float32), TINY_LAYERS - 2
    probe = residuum.Probe(weights[:2], [0.5, 0.0], layer=layer)
    sae = residuum.SAE(weights, weights / np.linalg.norm(weights, axis=1, keepdims=True))
    clamp = residuum.ClampFeature(sae, feature=3, layer=0, min=1.0)
    encoder, decoder = torch.tensor(sae.encoder[3]), torch.tensor(sae.decoder[3])

    def clamped(x: torch.Tensor) -> torch.Tensor:
        return x + (1 - torch.relu(x @ encoder)).clamp(min=0)[..., None] * decoder

    prompts = [make_prompt(source, size) for size in (1, 40, 150, 17)]
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    flags = ("--sae-mib=1", "--metrics=127.0.0.1:0")
    with running_engine("eager", tiny_llama, folder, cache_root, *flags, engine_args=ranks) as engine:
        both = [
            engine.client.generate_many(
                prompts, max_tokens=9, ignore_eos=True, capture=capture, probes=probe, steer=clamp, progress=False
            )
            for capture in (ALL, residuum.Capture(layers=[layer], sae=sae, dimensions=HIDDEN))
        ]
        for plain, featured in zip(*both, strict=True):
            check_capture(engine, reference, plain, changes={0: clamped})
            rows = engine.client.activations(plain).select(site="resid_post")[layer]
            assert featured.token_ids == plain.token_ids
            for reply in (plain, featured):
                assert reply.scores is not None
                expected = rows[len(reply.prompt_token_ids) - 1 :] @ probe.weights.T + probe.bias
                np.testing.assert_allclose(reply.scores["probe"], expected, atol=2e-3 * np.abs(expected).max())
            expected = sae.encode(rows)
            found = engine.client.activations(featured)[layer]
            np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())
        for rank in "01":
            extents = "residuum_inference_ring_extents_published_total", rank
            wait_for(lambda extents=extents: metrics(engine.inference)[extents], f"rank {rank} captures")


@pytest.mark.usefixtures("two_cores")
def test_all_pipeline_stages_change_the_steering_at_the_same_position(
    tiny_llama: Path, cache_root: Path, reference: Reference, direction: residuum.Vector
) -> None:
    """While one stage computes a step, the other one computes the next: of other requests, or of the same prompt."""
    folder = cache_root.parent / "stages"
    folder.mkdir()
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    before, after = (
        residuum.Add(direction, layer=0, scale=0.7),
        residuum.Replace(direction, layer=TINY_LAYERS - 1, value=0.8),
    )
    v, source = tensor(direction), np.random.default_rng(91)
    with running_engine("eager", tiny_llama, folder, cache_root, "--sae-mib=1", engine_args=stages) as engine:
        with engine.paced():
            streams = [
                engine.client.stream(
                    make_prompt(source, 20 + 90 * index),
                    max_tokens=60,
                    ignore_eos=True,
                    capture=ALL,
                    steer=before,
                    updatable=True,
                )
                for index in range(4)
            ]
            # The last prompt takes several steps, so a part of it may still be on its way through the stages.
            firsts = [(stream.update_steering(after)[0], stream.update_steering(None)[0]) for stream in streams]
        for stream, (first, second) in zip(streams, firsts, strict=True):
            for _ in stream:
                pass
            check_capture(
                engine,
                reference,
                stream.reply,
                changes={
                    0: in_turn([(0, add(v, 0.7)), (first, None)]),
                    TINY_LAYERS - 1: in_turn([(first, replacing(v, 0.8)), (second, None)]),
                },
            )
        assert any(first < second for first, second in firsts), "the engine computed something between the changes"
        assert engine.serving()["capturing_ranks"] == 2
        check_lens(engine.client, source)


def check_lens(client: residuum.Client, source: np.random.Generator) -> None:
    """A map of a lens is applied, whichever stage has it: rows through it predict what the mapped rows predict."""
    width = client.info().hidden_size
    item = residuum.LensMap(source.standard_normal((width, width)) / width**0.5, source.standard_normal(width))
    rows = source.standard_normal((5, width))
    found, expected = client.unembed(rows, via=item), client.unembed(item.apply(rows))
    np.testing.assert_allclose(found.top, expected.top, atol=1e-4)
    assert np.abs(found.top - client.unembed(rows).top).max() > 0.01


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
