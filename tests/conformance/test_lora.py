"""LoRA adapters: requests with different ones in one batch, captured and steered, each with its own rows."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from svc_common.launcher import ServiceFailedError
from tests.conformance.engines import KV_BLOCK, running_engine
from tests.conformance.rows import ALL, Row, check_capture, make_prompt
from tests.conformance.steering import adding
from tests.reference.adapters import make_adapter, merge
from tests.reference.hf import Reference, relative_error
from tests.reference.tiny import LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.engines import Engine

pytestmark = pytest.mark.engine

MODEL = "tiny-llama"
WIDE, NARROW = "wide", "narrow"
"""The adapters: of every linear module, with a rank that vLLM pads; of a few modules, with another rank and rsLoRA."""

FAR = 0.02
"""Rows with different adapters differ by more than this, relative to their length."""


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        WIDE: make_adapter(folder / WIDE, tiny_llama, 1, rank=12, alpha=18),
        NARROW: make_adapter(
            folder / NARROW, tiny_llama, 2, rank=4, alpha=4, modules=("q_proj", "v_proj", "down_proj"), rslora=True
        ),
    }


@pytest.fixture(scope="module")
def lora_engine(
    tiny_llama: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, cache_root: Path
) -> Iterator[Engine]:
    """An engine with both adapters, and with taps folded into norms. On a CPU, vLLM compiles no model with LoRA."""
    folder = tmp_path_factory.mktemp("lora")
    modules = ",".join(f"{name}={place}" for name, place in adapters.items())
    with running_engine("compiled", tiny_llama, folder, cache_root, f"--lora-modules={modules}") as running:
        yield running


@pytest.fixture(scope="module")
def references(tiny_llama: Path, adapters: dict[str, Path]) -> dict[str, Reference]:
    """The model in transformers with each adapter merged; under the model's name without one."""
    found = {name: Reference(tiny_llama) for name in (MODEL, *adapters)}
    for name, place in adapters.items():
        merge(found[name].model, place)
    return found


def test_the_adapters_are_named(lora_engine: Engine) -> None:
    info = lora_engine.client.info()
    assert (info.model, info.adapters) == (MODEL, (WIDE, NARROW))


def test_requests_with_different_adapters_in_one_batch(
    lora_engine: Engine, references: dict[str, Reference], direction: residuum.Vector
) -> None:
    """Plain and steered requests of each adapter, with prompts of equal and of different lengths."""
    client, rng = lora_engine.client, np.random.default_rng(60)
    same = make_prompt(rng, 20)
    steered = adding(direction, scale=0.7)
    asked = []
    with lora_engine.held(direction):
        for model in (None, WIDE, NARROW, MODEL):
            for prompt, steer, changes in (
                (same, None, {}),
                (same, steered.steer, steered.changes),
                (make_prompt(rng, int(rng.integers(5, 40))), None, {}),
            ):
                stream = client.stream(prompt, model=model, steer=steer, max_tokens=12, ignore_eos=True, capture=ALL)
                asked.append((model, stream, changes))
    ends = {}
    for model, stream, changes in asked:
        for _ in stream:
            pass
        found = check_capture(lora_engine, references[model or MODEL], stream.reply, changes=changes)
        ends.setdefault(
            (model or MODEL, bool(changes)),
            np.stack([found[Row(0, "resid_post", LAYERS - 1, position)] for position in range(20)]),
        )
        manifest = client.manifest(stream.request_id)
        assert (manifest.model, manifest.adapter) == (MODEL, model if model in {WIDE, NARROW} else "")
        assert manifest.to_dict()["description"]["adapter"] == manifest.adapter
    apart = {(one, other): relative_error(ends[one], ends[other]) for one in ends for other in ends if one < other}
    assert min(apart.values()) > FAR, f"the adapters and the steering change the rows: {apart}"
    together = max(len(step.chunks) for step in lora_engine.journal.steps_of(*(item[1].request_id for item in asked)))
    assert together > 8, "requests with both adapters and without one were in one batch"  # 3 for each


def test_log_probabilities_of_prompts_in_a_batch(lora_engine: Engine, references: dict[str, Reference]) -> None:
    rng, asked = np.random.default_rng(63), []
    with lora_engine.held():
        for model in (None, WIDE, NARROW):
            prompt = make_prompt(rng, int(rng.integers(5, 40)))
            asked.append((model, lora_engine.client.stream(prompt, model=model, max_tokens=3, prompt_logprobs=0)))
    for model, stream in asked:
        for _ in stream:
            pass
        prompt = stream.reply.prompt_token_ids
        logits = references[model or MODEL].logits(prompt)[:-1]
        expected = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        expected = (expected - logits.max(axis=1, keepdims=True))[np.arange(len(prompt) - 1), prompt[1:]]
        assert np.abs(stream.reply.prompt_logprobs.tokens[1:] - expected).max() < 1e-3


def test_a_registered_request_keeps_its_adapter(lora_engine: Engine, references: dict[str, Reference]) -> None:
    client = lora_engine.client
    registration = client.register(model=NARROW, capture=ALL, request_id="registered")
    reply = client.generate(make_prompt(np.random.default_rng(61), 9), registration=registration, max_tokens=3)
    check_capture(lora_engine, references[NARROW], reply)
    assert client.manifest(reply.request_id).adapter == NARROW


def test_adapters_share_no_prefix_cache(lora_engine: Engine, references: dict[str, Reference]) -> None:
    prompt = make_prompt(np.random.default_rng(62), 2 * KV_BLOCK + 5)
    for is_warm in (False, True):
        for model in (None, WIDE, NARROW):
            reply = lora_engine.client.generate(prompt, model=model, max_tokens=6, ignore_eos=True)
            assert lora_engine.journal.chunks(reply.request_id)[0][0] == (2 * KV_BLOCK if is_warm else 0)
            assert references[model or MODEL].shortfall(prompt, reply.token_ids) < 1e-2


def test_a_capture_of_another_adapter_is_not_taken_for_the_same_request(lora_engine: Engine) -> None:
    def ask(model: str | None) -> residuum.Reply:
        return lora_engine.client.generate(
            [5, 6, 7], model=model, request_id="once", if_exists="skip", capture=ALL, max_tokens=2
        )

    assert not ask(WIDE).skipped
    lora_engine.client.manifest("once", wait=30)
    assert ask(WIDE).skipped
    with pytest.raises(residuum.CaptureExists, match=r"LoRA adapter differs \(it was wide, now none\)"):
        ask(None)
    with pytest.raises(residuum.CaptureExists, match=r"LoRA adapter differs \(it was wide, now narrow\)"):
        ask(NARROW)


def test_an_adapter_that_vllm_cannot_serve_ends_the_start_by_name(
    tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path, cache_root: Path
) -> None:
    """PEFT's DoRA, next to an adapter that is served."""
    dora = shutil.copytree(adapters[NARROW], tmp_path / "dora")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    modules = f"--lora-modules={NARROW}={adapters[NARROW]},strange={dora}"
    told = rf"vLLM cannot load the LoRA adapter 'strange' from {dora}: .*DoRA.* leave it out of --lora-modules\."
    with (
        pytest.raises(ServiceFailedError, match=told),
        running_engine("eager", tiny_llama, tmp_path, cache_root, modules),
    ):
        pass


def test_an_adapter_that_does_not_exist_is_refused_by_name(lora_engine: Engine) -> None:
    told = "This server serves tiny-llama and its LoRA adapters wide, narrow, not joyful. Name one of these"
    for call in (
        lambda: lora_engine.client.generate([5], model="joyful"),
        lambda: lora_engine.client.register(model="joyful"),
    ):
        with pytest.raises(residuum.UnknownModel, match=told) as refused:
            call()
        assert (refused.value.metadata["model"], refused.value.metadata["serving"]) == ("joyful", MODEL)
