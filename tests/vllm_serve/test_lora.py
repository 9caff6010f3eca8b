"""`vllm serve` with taps and LoRA adapters: the request's model is the adapter, and the manifest says so."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import openai
import pytest

import residuum
from bench.conformance.reference import adding
from svc_common.launcher import start_store
from tests.reference.adapters import make_adapter, merge
from tests.reference.hf import Reference, relative_error
from tests.vllm_serve.serving import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.conformance.reference import Change

pytestmark = pytest.mark.engine

MODEL, ADAPTERS = "smollm2", ("joy", "calm")
"""The names of the served models. The first one has no adapter."""
CLOSE = 2e-4
LAYER = 1


@pytest.fixture(scope="module")
def places(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, tiny_llama, seed, rank=8, alpha=8) for seed, name in enumerate(ADAPTERS)}


@pytest.fixture(scope="module")
def references(tiny_llama: Path, places: dict[str, Path]) -> dict[str, Reference]:
    found = {name: Reference(tiny_llama) for name in (MODEL, *places)}
    for name, place in places.items():
        merge(found[name].model, place)
    return found


@pytest.fixture(scope="module")
def served(
    tiny_llama: Path, places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[openai.OpenAI, residuum.Client]]:
    """The OpenAI client and the client of the store."""
    store = start_store(tmp_path_factory.mktemp("store"))
    modules = [f"{name}={place}" for name, place in places.items()]
    flags = ["--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--lora-modules", *modules]
    try:
        store.wait_until_serving(60)
        with (
            running_server(
                tmp_path_factory.mktemp("vllm"), tiny_llama, *flags, fork=True, RESIDUUM_STORE=store.endpoint
            ) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as api,
            residuum.Client(store.endpoint, store=store.endpoint) as captures,
        ):
            yield api, captures
    finally:
        store.stop()


def complete(api: openai.OpenAI, model: str, prompt: list[int], xargs: dict[str, object]) -> str:
    """Complete a prompt, and return the ID of the answer."""
    return api.completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"vllm_xargs": xargs}
    ).id


def test_requests_of_each_adapter_at_once(
    served: tuple[openai.OpenAI, residuum.Client], references: dict[str, Reference]
) -> None:
    api, captures = served
    push = np.random.default_rng(3).standard_normal(references[MODEL].model.config.hidden_size).astype(np.float32)
    steer = residuum.Add(residuum.Vector.from_array(push), layer=LAYER)
    steering: list[tuple[residuum.Add | None, dict[int, Change]]] = [(None, {}), (steer, {LAYER: adding(push)})]
    asked = [(model, *steered) for model in references for steered in steering]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [
            pool.submit(complete, api, model, [20 + number, 7, 8, 9], residuum.vllm_xargs(residuum.Capture(), steer))
            for number, (model, steer, _) in enumerate(asked)
        ]
    for (model, _, changes), answer in zip(asked, answers, strict=True):
        acts = captures.activations(answer.result())
        assert (acts.manifest.model, acts.manifest.adapter) == (MODEL, "" if model == MODEL else model)
        expected = references[model].rows(acts.token_ids.tolist(), changes)["resid_post"]
        assert relative_error(acts.stack(), expected) < CLOSE


def test_a_capture_of_another_adapter_is_not_the_answer(served: tuple[openai.OpenAI, residuum.Client]) -> None:
    api, captures = served
    xargs = residuum.vllm_xargs(residuum.Capture(), request_id="once", if_exists="skip")
    complete(api, "joy", [5, 6], xargs)
    first = captures.manifest("once", wait=30)
    complete(api, "joy", [5, 6], xargs)
    assert captures.manifest("once").open_time == first.open_time, "the capture that exists is the answer"
    for model in (MODEL, "calm"):
        with pytest.raises(openai.BadRequestError, match="its LoRA adapter differs"):
            complete(api, model, [5, 6], xargs)


@pytest.mark.parametrize("named", ["joy", ""])
def test_the_spec_may_name_the_adapter(served: tuple[openai.OpenAI, residuum.Client], named: str) -> None:
    api, captures = served
    spec = json.dumps({"model": named, "capture": {"layers": {"all": True}}})
    assert captures.manifest(complete(api, "joy", [5, 6], {"residuum": spec}), wait=30).adapter == "joy"


@pytest.mark.parametrize(("model", "named"), [("joy", "calm"), ("joy", MODEL), (MODEL, "joy")])
def test_a_spec_that_expects_another_model_is_refused(
    served: tuple[openai.OpenAI, residuum.Client], model: str, named: str
) -> None:
    spec = json.dumps({"model": named, "capture": {"layers": {"all": True}}})
    with pytest.raises(openai.BadRequestError, match=rf"UNKNOWN_MODEL: .*{model}.*{named}"):
        complete(served[0], model, [5, 6], {"residuum": spec})
