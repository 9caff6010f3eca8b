"""`vllm serve` with taps, called by the `openai` client. All tests share one server with SmolLM2 in float32."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import psutil
import pytest

import residuum
from svc_common.launcher import start_store
from tests.reference.hf import Reference, relative_error
from tests.vllm_serve.serving import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from svc_common.launcher import Service
    from tests.vllm_serve.serving import Server

pytestmark = pytest.mark.engine

MODEL = "smollm2"
PROMPT = "The capital of France is Paris, and the capital of Italy is"
SITES = "resid_post,resid_pre,z,mlp_act"
ALL = residuum.Capture(layers="all")
CLOSE = 1e-3
"""How far rows may be from transformers', both in float32, relative to their length."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = start_store(tmp_path_factory.mktemp("store"))
    try:
        service.wait_until_serving(60)
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def server(store: Service, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    environment = {"RESIDUUM_STORE": store.endpoint, "RESIDUUM_CAPTURE_SITES": SITES}
    with running_server(folder, smollm2, "--enable-prompt-tokens-details", **environment) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="module")
def captures(store: Service) -> Iterator[residuum.Client]:
    with residuum.Client(store.endpoint, store=store.endpoint) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


def asking(*arguments: object, **options: object) -> dict[str, object]:
    return {"vllm_xargs": residuum.vllm_xargs(*arguments, **options)}


def check_rows(acts: residuum.Activations, reference: Reference) -> None:
    assert acts.manifest.state == "complete"
    rows = acts.stack()
    assert rows.shape[1] == len(acts.token_ids)
    assert relative_error(rows, reference.rows(acts.token_ids.tolist())["resid_post"]) < CLOSE


def test_a_chat_is_captured_under_the_answers_id(
    api: openai.OpenAI, captures: residuum.Client, reference: Reference
) -> None:
    answer = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        extra_body=asking(ALL),
    )
    assert "Paris" in answer.choices[0].message.content
    acts = captures.activations(answer.id)
    assert len(acts.positions) == answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
    assert acts.manifest.model == MODEL
    check_rows(acts, reference)
    assert acts.text.startswith("<|im_start|>")
    assert "".join(acts.select(span="reply").tokens) in answer.choices[0].message.content
    with pytest.raises(residuum.NoMessageSpans, match="vLLM's API server made the prompt's tokens"):
        _ = acts.spans


def test_a_capture_does_not_change_the_answer(api: openai.OpenAI, captures: residuum.Client) -> None:
    def ask(**extra: object) -> dict[str, object]:
        answer = api.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0, logprobs=2, stop=["Madrid"], **extra
        )
        return answer.model_dump(exclude={"id", "created", "system_fingerprint"}) | {"id": answer.id}

    plain, captured = ask(), ask(extra_body=asking(ALL))
    name = captured.pop("id")
    plain.pop("id")
    for choice in (*plain["choices"], *captured["choices"]):
        values = choice["logprobs"].pop("token_logprobs")
        assert len(values) == len(choice["logprobs"]["tokens"])
        choice["logprobs"].pop("top_logprobs")  # floats
    assert captured == plain
    assert captures.activations(name).manifest.state == "complete"


def test_a_capture_reads_the_prefix_cache_unless_it_needs_the_whole_prompt(
    api: openai.OpenAI, captures: residuum.Client, reference: Reference
) -> None:
    def ask(capture: residuum.Capture) -> tuple[int, residuum.Activations]:
        answer = api.completions.create(
            model=MODEL, prompt=PROMPT * 24, max_tokens=4, temperature=0, extra_body=asking(capture)
        )
        return answer.usage.prompt_tokens_details.cached_tokens, captures.activations(answer.id)

    cached, everything = ask(ALL)
    assert cached == 0
    check_rows(everything, reference)
    cached, last = ask(residuum.Capture(layers="all", positions="last_prompt"))
    assert cached > 0
    assert last.positions.tolist() == [len(last.manifest.prompt_token_ids) - 1]
    rows = reference.rows(everything.token_ids.tolist())["resid_post"][:, last.positions]
    assert relative_error(last.stack(), rows) < CLOSE
    cached, _ = ask(ALL)
    assert cached == 0


def test_captured_and_plain_requests_run_concurrently(
    api: openai.OpenAI, captures: residuum.Client, reference: Reference
) -> None:
    """Concurrent requests: half are captured and half are not, some streamed and some not."""
    prompts = [PROMPT, "To bake bread, you need", "def fibonacci(n):", "Hello", "Once upon a time", "My favourite"]

    def ask(index: int) -> tuple[str, str | None]:
        extra = {"extra_body": asking(ALL, request_id=f"neighbour-{index}")} if index % 3 else {}
        options = {"model": MODEL, "prompt": prompts[index % len(prompts)], "max_tokens": 20, "temperature": 0}
        if index % 2:
            chunks = list(api.completions.create(stream=True, **options, **extra))
            text = "".join(chunk.choices[0].text for chunk in chunks)
        else:
            text = api.completions.create(**options, **extra).choices[0].text
        return text, f"neighbour-{index}" if extra else None

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    for index, (text, _) in enumerate(answers):
        assert text == answers[index % len(prompts)][0], "the reply does not depend on capture and streaming"
    names = [name for _, name in answers if name]
    assert len(names) == 8
    for name in names:
        check_rows(captures.activations(name), reference)


def test_several_prompts_and_several_sequences(api: openai.OpenAI, captures: residuum.Client) -> None:
    options = {"model": MODEL, "prompt": ["A colour is", "A city is"], "n": 2, "max_tokens": 8}
    sampling = {"temperature": 1.0, "seed": 7}
    plain = api.completions.create(**options, **sampling)
    captured = api.completions.create(**options, **sampling, extra_body=asking(ALL))
    assert [choice.index for choice in captured.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in captured.choices] == [choice.text for choice in plain.choices]
    for name in (captured.id, f"{captured.id}-1"):
        acts = captures.activations(name)
        assert acts.manifest.state == "complete"
        assert len(acts.manifest.sequences) == 2
        assert acts.select(sequence=0)[0].shape == acts.select(sequence=1)[0].shape


def test_two_streamed_sequences(api: openai.OpenAI, captures: residuum.Client) -> None:
    texts, ends = ["", ""], 0
    for chunk in api.completions.create(
        model=MODEL, prompt="A colour is", n=2, max_tokens=6, stream=True, extra_body=asking(ALL, request_id="pair")
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += choice.finish_reason is not None
    assert all(texts)
    assert ends == 2
    assert captures.activations("pair").manifest.state == "complete"


def test_points_of_any_width_are_captured_and_steered(
    api: openai.OpenAI, captures: residuum.Client, reference: Reference
) -> None:
    capture = residuum.Capture(points=["resid_post.12", "z.11", "mlp_act.3-4"])
    without_head = np.ones(576, np.float32)
    without_head[2 * 64 : 3 * 64] = 0
    steer = [residuum.Multiply(residuum.Vector.from_array(without_head), layer=11, site="z")]
    for name, operations in (("points", []), ("no-head", steer)):
        extra = asking(capture, operations, request_id=name)
        api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=extra)
    acts, changed = (captures.activations(name) for name in ("points", "no-head"))
    assert {site: acts.select(site=site).layers for site in acts.sites} == {
        "resid_post": (12,), "z": (11,), "mlp_act": (3, 4)
    }  # fmt: skip
    expected = reference.rows(acts.token_ids.tolist())
    for site, layer in (("resid_post", 12), ("z", 11), ("mlp_act", 3), ("mlp_act", 4)):
        assert relative_error(acts.at(f"{site}.{layer}"), expected[site][layer]) < CLOSE
    prompt = acts.prompt_tokens
    np.testing.assert_allclose(changed.at("z.11")[:prompt], acts.at("z.11")[:prompt] * without_head, atol=1e-4)
    assert relative_error(changed.at("mlp_act.4")[:prompt], acts.at("mlp_act.4")[:prompt]) < CLOSE
    assert relative_error(changed.at("resid_post.12")[:prompt], acts.at("resid_post.12")[:prompt]) > CLOSE


def test_steering_by_vectors_in_the_request_then_by_their_digests(
    api: openai.OpenAI, captures: residuum.Client
) -> None:
    direction = residuum.Vector.from_array(np.random.default_rng(5).standard_normal(576).astype(np.float32))
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    steer = [residuum.Add(direction, layer=12, scale=0.5)]
    with pytest.raises(openai.BadRequestError, match="MISSING_VECTORS"):
        api.completions.create(**options, extra_body=asking(ALL, steer, send_vectors=False))
    names = ["unsteered", "steered", "steered-again"]
    asked = [
        asking(ALL, request_id="unsteered"),
        asking(ALL, steer, request_id="steered"),
        asking(ALL, steer, request_id="steered-again", send_vectors=False),
    ]
    for extra_body in asked:
        api.completions.create(**options, extra_body=extra_body)
    plain, steered, again = (captures.activations(name).stack() for name in names)
    np.testing.assert_allclose(steered[12], plain[12] + 0.5 * np.asarray(direction), rtol=1e-4, atol=1e-3)
    assert relative_error(steered[:12], plain[:12]) < CLOSE
    assert relative_error(again, steered) < CLOSE
    assert captures.manifest("steered").steered


WEIGHTS = np.random.default_rng(8).standard_normal((3, 576)) / 100
PROBES = [
    residuum.Probe(WEIGHTS[0], 0.5, layer=12, name="one"),
    residuum.Probe(WEIGHTS[1:], layer=20, activation="softmax", name="two"),
]


def check_scores(fields: dict[str, list[float]], acts: residuum.Activations, prompt: int) -> None:
    """Check the scores of an answer against its rows."""
    for probe in PROBES:
        expected = probe.score(acts[probe.layer][prompt - 1 :])
        np.testing.assert_allclose(fields[probe.name], expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(acts.scores[probe.name][prompt - 1 :], fields[probe.name], rtol=1e-6)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_has_the_scores_of_its_tokens(
    api: openai.OpenAI, captures: residuum.Client, chat: bool, stream: bool
) -> None:
    """In a stream, they come with their tokens."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    answer = (api.chat.completions if chat else api.completions).create(
        model=MODEL, **prompt, max_tokens=8, temperature=0, stream=stream, extra_body=asking(ALL, probes=PROBES)
    )
    scores: dict[str, list[float]] = {"one": [], "two": []}
    parts = list(answer) if stream else [answer]
    for part in parts:
        for choice in part.choices:
            found = (choice.model_extra or {}).get("residuum", {}).get("scores", {})
            text = (choice.delta.content if stream else choice.message.content) if chat else choice.text
            assert not text or found, "each piece of text has its scores"
            for name, values in found.items():
                scores[name] += values
    acts = captures.activations(parts[0].id)
    assert len(scores["one"]) == len(acts.token_ids) + 1 - len(acts.manifest.prompt_token_ids) > 4
    check_scores(scores, acts, len(acts.manifest.prompt_token_ids))


def test_probes_of_every_kind_score_the_prompt_and_the_answer(api: openai.OpenAI, captures: residuum.Client) -> None:
    """An MLP, an attention probe, one of several layers, and smoothing, against the rows of the capture."""
    rng = np.random.default_rng(8)
    several = rng.normal(size=(2, 2 * 576)) / 50
    probes = [
        residuum.Probe(
            rng.normal(size=(3, 576)) / 9, layer=12, mlp=[residuum.ProbeLayer([[1, -1, 2]], 0.5)], name="mlp"
        ),
        residuum.Probe.from_attention(rng.normal(size=576) / 50, WEIGHTS[0] / 9, layer=12, name="pooled"),
        residuum.Probe(several, [1, 2], layer=[12, 25], activation="softmax", name="several"),
        residuum.Probe(WEIGHTS[1] / 9, layer=25, smooth=residuum.RollingMean(3), name="smooth"),
    ]
    answer = api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0,
        extra_body=asking(residuum.Capture(layers=[12, 25]), probes=probes, score_prompt=True),
    )  # fmt: skip
    acts, found = captures.activations(answer.id), answer.choices[0].model_extra["residuum"]
    prompt = len(acts.manifest.prompt_token_ids)
    rows = {"several": np.concatenate([acts[12], acts[25]], axis=-1), "smooth": acts[25]}
    for probe in probes:
        exact = probe.score(rows.get(probe.name, acts[12]))
        wanted = [exact[:prompt], exact[prompt - 1 :]]
        if probe.smooth is not None:
            wanted = [probe.smooth.apply(part) for part in wanted]
        for scores, expected in zip((found["prompt_scores"], found["scores"]), wanted, strict=True):
            np.testing.assert_allclose(scores[probe.name], expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


def test_the_choices_of_several_prompts_have_their_own_scores(api: openai.OpenAI, captures: residuum.Client) -> None:
    probe = residuum.Probe(WEIGHTS[0], layer=12)
    answer = api.completions.create(
        model=MODEL, prompt=[PROMPT, "Once"], n=2, max_tokens=3, seed=5, extra_body=asking(ALL, probes=probe)
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        name = answer.id if choice.index < 2 else f"{answer.id}-1"
        scores = captures.manifest(name, wait=30).scores(choice.index % 2)
        np.testing.assert_allclose(choice.model_extra["residuum"]["scores"]["probe"], scores["probe"], rtol=1e-6)


@pytest.mark.parametrize("name", [None, "batch"])
def test_the_conversations_of_a_batch_have_their_own_captures_and_scores(
    api: openai.OpenAI, captures: residuum.Client, name: str | None
) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "What is the capital of France?")]
    asked = asking(ALL, probes=residuum.Probe(WEIGHTS[0], layer=12), request_id=name)
    body = {"model": MODEL, "messages": chats, "max_tokens": 3, "temperature": 0, **asked}
    answer: Any = api.post("/chat/completions/batch", cast_to=object, body=body)
    first = name or answer["id"]
    found = [choice["residuum"]["scores"]["probe"] for choice in answer["choices"]]
    for scores, capture in zip(found, (first, f"{first}-1"), strict=True):
        kept = captures.manifest(capture, wait=30).scores(0)
        np.testing.assert_allclose(scores, kept["probe"], rtol=1e-6)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_is_captured_under_the_answers_id(
    api: openai.OpenAI, captures: residuum.Client, reference: Reference, stream: bool
) -> None:
    answer = api.responses.create(
        model=MODEL, input=PROMPT, max_output_tokens=4, temperature=0, stream=stream, extra_body=asking(ALL)
    )
    parts = [part.response for part in answer if part.type == "response.created"] if stream else [answer]
    check_rows(captures.activations(parts[0].id), reference)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_rule_ends_and_steers_an_answer(api: openai.OpenAI, captures: residuum.Client, stream: bool) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    plain = api.completions.create(**options, extra_body=asking(probes=PROBES)).choices[0]
    scores = plain.model_extra["residuum"]["scores"]["one"]
    at = int(np.argmax(scores[1:10])) + 1
    threshold = (scores[at] + sorted(scores[: at + 1])[-2]) / 2
    joy = residuum.Vector.from_array(WEIGHTS[2].astype(np.float32) * 1e-4)  # changes no token
    rules = [
        residuum.Rule(PROBES[0], above=threshold, for_tokens=1, then="abort", name="stop"),
        residuum.Rule(PROBES[0], above=min(scores) - 1, then=residuum.Add(joy, layer=12), name="joy"),
    ]
    answer = api.completions.create(**options, stream=stream, extra_body=asking(ALL, rules=rules))
    parts = list(answer) if stream else [answer]
    choices = [choice for part in parts for choice in part.choices]
    assert rules[0].fires_at(scores) is not None
    text = "".join(choice.text for choice in choices)
    assert text
    assert plain.text.startswith(text)
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("rule", "stop")
    events = [event for choice in choices for event in choice.model_extra["residuum"].get("rule_events", [])]
    assert [event["rule"] for event in events] == ["joy", "stop"]
    manifest = captures.manifest(parts[0].id, wait=30)
    assert manifest.state == "complete"
    assert [event.rule for event in manifest.rule_events] == ["joy", "stop"]
    assert len(manifest.sequences[0].generated_token_ids) == events[1]["token"] + 1
    (change,) = manifest.steering_changes
    assert change.first_positions == (events[0]["first_position"],)


def test_a_gate_steers_only_the_rows_that_open_it(api: openai.OpenAI, captures: residuum.Client) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    direction, gate = (
        residuum.Vector.from_array(np.random.default_rng(seed).standard_normal(576).astype(np.float32))
        for seed in (6, 7)
    )
    api.completions.create(**options, extra_body=asking(ALL, request_id="ungated"))
    plain = captures.activations("ungated")[12]
    scores = plain @ gate.values / gate.norm
    threshold = float(np.sort(scores)[len(scores) // 2 - 1 : len(scores) // 2 + 1].mean())
    steer = [residuum.Add(direction, layer=12, scale=0.5, gate=residuum.Gate(gate, threshold))]
    api.completions.create(**options, extra_body=asking(ALL, steer, request_id="gated"))
    acts = captures.activations("gated")
    is_open = scores > threshold
    assert 0 < is_open.sum() < len(scores)
    expected = plain + 0.5 * is_open[:, None] * direction.values
    np.testing.assert_allclose(acts[12], expected, rtol=1e-4, atol=1e-3)
    assert acts.manifest.steering[0].gate == residuum.GateRecord((gate.hexdigest,), pytest.approx(threshold))


@pytest.mark.parametrize("bounds", [{"value": 0.0}, {"min": 6.0}], ids=str)
def test_a_clamped_feature_changes_rows_as_the_formula_says(
    api: openai.OpenAI, captures: residuum.Client, bounds: dict[str, float]
) -> None:
    rng = np.random.default_rng(11)
    decoder = rng.standard_normal((32, 576)).astype(np.float32)
    decoder /= np.linalg.norm(decoder, axis=1, keepdims=True)
    sae = residuum.SAE(decoder, decoder, encoder_bias=rng.standard_normal(32), decoder_bias=np.ones(576))
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    plain = captures.activations(api.completions.create(**options, extra_body=asking(ALL)).id)[12].astype(np.float64)
    values = sae.encode(plain)
    feature = int((values[1:] > 0).sum(axis=0).argmax())  # without the first token, whose row is far longer
    clamp = residuum.ClampFeature(sae, feature=feature, layer=12, **bounds)
    answer = api.completions.create(**options, extra_body=asking(ALL, clamp))
    acts = captures.activations(answer.id)
    wanted = np.clip(values[:, feature], bounds.get("min", 0.0), bounds.get("value"))
    moves = wanted - values[:, feature]
    assert (np.abs(moves) > 0.5).sum() > 4
    np.testing.assert_allclose(acts[12], plain + moves[:, None] * sae.decoder[feature], rtol=1e-4, atol=1e-3)
    (record,) = acts.manifest.steering
    assert (record.operation, record.digests) == ("clamp_feature", (sae.vector(feature).hexdigest,))


def test_vectors_to_project_onto(api: openai.OpenAI, captures: residuum.Client) -> None:
    vectors = [residuum.Vector.from_array(np.eye(576, dtype=np.float32)[at]) for at in (3, 5)]
    both = residuum.Capture(layers=[7], encoding="project", vectors=vectors)
    for name, capture in (("projected", both), ("whole", residuum.Capture(layers=[7]))):
        api.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=2, temperature=0, extra_body=asking(capture, request_id=name)
        )
    projected, whole = captures.activations("projected")[7], captures.activations("whole")[7]
    np.testing.assert_allclose(projected, whole[:, [3, 5]], rtol=1e-4, atol=1e-4)


def test_a_random_projection_to_one_row(api: openai.OpenAI, captures: residuum.Client) -> None:
    capture = residuum.Capture(layers=[7], encoding="rp8", dimensions=32, seed=3, reduction="mean", positions="prompt")
    answer = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, extra_body=asking(capture))
    acts = captures.activations(answer.id)
    assert acts.manifest.state == "complete"
    assert acts[7].shape == (1, 32)


def test_closing_a_stream_aborts_the_capture(api: openai.OpenAI, captures: residuum.Client) -> None:
    with api.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=400,
        stream=True,
        extra_body={**asking(ALL, request_id="closed"), "ignore_eos": True},
    ) as stream:
        for at, _ in enumerate(stream):
            if at == 3:
                break
    manifest = captures.manifest("closed", wait=60)
    assert manifest.state == "aborted"
    (sequence,) = manifest.sequences
    assert 3 <= len(sequence.generated_token_ids) < 400
    acts = captures.activations("closed", allow_partial=True)
    assert len(acts.positions) >= len(manifest.prompt_token_ids)


def test_a_client_timeout_aborts_the_capture(api: openai.OpenAI, captures: residuum.Client) -> None:
    with pytest.raises(openai.APITimeoutError):
        api.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=490,
            extra_body={**asking(ALL, request_id="unread"), "ignore_eos": True},
            timeout=1.5,
        )
    manifest = captures.manifest("unread", wait=60)
    assert manifest.state == "aborted"
    assert manifest.sequences[0].generated_token_ids, "tokens are known although the answer was not streamed"


SIGMOID = {"name": "p", "layer": 12, "activation": "PROBE_ACTIVATION_SIGMOID", "outputs": [{"digest": "A" * 43 + "="}]}
BAD = {
    "not JSON": ({"residuum": "layers=all"}, "not a RequestSpec"),
    "not a spec": ({"residuum": '{"capture": {"depth": 3}}'}, "depth"),
    "a number": ({"residuum": 3}, "send a string with a RequestSpec"),
    "a list": ({"residuum": ["{}"]}, "send a string with a RequestSpec"),
    "deep": ({"residuum": "[" * 20_000}, "not a RequestSpec"),
    "nothing asked": ({"residuum": "{}"}, "no capture, steering or probes"),
    "no such layer": ({"residuum": '{"capture": {"layers": {"list": {"layers": [30]}}}}'}, "UNKNOWN_LAYER"),
    "a site that is not enabled": (
        {"residuum": '{"capture": {"layers": {"all": true}, "sites": ["SITE_MLP_OUT"]}}'},
        r"UNKNOWN_SITE: The site mlp_out is not enabled .* RESIDUUM_CAPTURE_SITES",
    ),
    "a misspelt argument": ({"residum": '{"capture": {"layers": {"all": true}}}'}, "Did you mean residuum"),
    "another model": ({"residuum": '{"model": "gpt-2", "capture": {"layers": {"all": true}}}'}, "UNKNOWN_MODEL"),
    "a bad id": ({"residuum": '{"request_id": "../x", "capture": {"layers": {"all": true}}}'}, "request ID"),
    "updatable": ({"residuum": '{"steering": {"updatable": true}}'}, "updatable|cannot change"),
    "a rule that can never fire": (
        {"residuum": json.dumps({"probes": {"probes": [SIGMOID], "rules": [{"name": "r", "probe": "p", "above": 2}]}})},
        "r is invalid: it can never fire: scores of the probe 'p' are from 0 to 1",
    ),
    "a rule without its probe": (
        {"residuum": '{"probes": {"rules": [{"name": "r", "probe": "p", "above": 2}]}}'},
        "names the probe 'p'",
    ),
    "vectors alone": ({"residuum_vectors": ["AAAA"]}, "add residuum"),
    "not base64": (
        {"residuum": '{"capture": {"layers": {"all": true}}}', "residuum_vectors": ["§"]},
        "not valid base64",
    ),
    "a vector of another width": (
        {"residuum": '{"capture": {"layers": {"all": true}}}', "residuum_vectors": ["AAAAAA=="]},
        "the rows of this model have 576 or 1536",
    ),
    "a vector that is no number": (
        {"residuum": '{"capture": {"layers": {"all": true}}}', "residuum_vectors": ["AADAfw==" * 576]},
        "BAD_VALUES|base64",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_a_bad_request(api: openai.OpenAI, case: str, stream: bool) -> None:
    arguments, message = BAD[case]
    with pytest.raises(openai.BadRequestError, match=message):
        api.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=2, stream=stream, extra_body={"vllm_xargs": arguments}
        )


def test_a_request_may_opt_out_of_rules_that_are_not_there(api: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    plain = api.completions.create(**options).choices
    assert api.completions.create(**options, extra_body=asking(without_operator_rules=True)).choices == plain


def test_an_id_that_was_used_is_a_bad_request(api: openai.OpenAI, captures: residuum.Client) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "extra_body": asking(ALL, request_id="once")}
    api.completions.create(**options)
    rows = captures.activations("once").stack()
    with pytest.raises(openai.BadRequestError, match="once"):
        api.completions.create(**options)
    assert np.array_equal(captures.activations("once").stack(), rows)


REFUSED_BY_VLLM = {
    "logprobs": {"logprobs": 50},
    "regex": {"structured_outputs": {"regex": "(["}},
    "token": {"prompt": [5, 1_000_000]},
}


@pytest.mark.parametrize("case", REFUSED_BY_VLLM)
def test_a_request_that_vllm_refuses_makes_and_replaces_no_capture(
    api: openai.OpenAI, captures: residuum.Client, case: str
) -> None:
    def ask(if_exists: str, **body: object) -> None:
        asked = asking(ALL, request_id=f"kept-{case}", if_exists=if_exists)
        api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, extra_body={**asked, **body})

    with pytest.raises(openai.BadRequestError):
        ask("fail", **REFUSED_BY_VLLM[case])
    ask("fail")
    with pytest.raises(openai.BadRequestError):
        ask("replace", **REFUSED_BY_VLLM[case])
    assert captures.manifest(f"kept-{case}", wait=30).state == "complete"


def test_plans_from_callers_do_not_reach_the_worker(server: Server, api: openai.OpenAI) -> None:
    """A worker trusts plans. An invalid plan from a caller would kill it and its engine."""
    api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, extra_body={"vllm_xargs": {"residuum_plan": "x", "other": 1}}
    )
    body = {
        "token_ids": [504, 3575],
        "sampling_params": {"max_tokens": 2, "extra_args": {"residuum_plan": {"prompt_tokens": "x"}}},
    }
    request = urllib.request.Request(
        f"{server.url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def test_the_spec_may_be_an_object_if_vllm_accepts_objects(server: Server, captures: residuum.Client) -> None:
    spec = {"request_id": "tokens", "capture": {"layers": {"list": {"layers": [2]}}, "positions": {"phases": [1]}}}
    body = {"token_ids": [504, 3575], "sampling_params": {"max_tokens": 2, "extra_args": {"residuum": spec}}}
    request = urllib.request.Request(
        f"{server.url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    acts = captures.activations("tokens")
    assert acts.token_ids.tolist() == [504, 3575]


def test_the_command_line_pulls_a_capture_of_vllm_serve(api: openai.OpenAI, store: Service, tmp_path: Path) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2, extra_body=asking(ALL)
    )
    pulled = subprocess.run(
        [
            sys.executable,
            "-m",
            "residuum",
            "pull",
            answer.id,
            "--store",
            store.endpoint,
            "--out",
            str(tmp_path / "a.npz"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert pulled.returncode == 0, pulled.stderr
    assert (tmp_path / "a.npz").stat().st_size > 10_000


def test_an_engine_that_dies_leaves_the_capture_incomplete(
    server: Server, api: openai.OpenAI, captures: residuum.Client
) -> None:
    """This test must be last, because it stops the server."""
    stream = api.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=400,
        stream=True,
        extra_body={**asking(ALL, request_id="orphan"), "ignore_eos": True},
    )
    next(iter(stream))
    engines = [child for child in psutil.Process(server.process.pid).children() if "EngineCore" in _title(child)]
    assert engines, [_title(child) for child in psutil.Process(server.process.pid).children()]
    os.kill(engines[0].pid, signal.SIGKILL)
    manifest = captures.manifest("orphan", wait=120)
    assert manifest.state == "incomplete"
    assert manifest.reason == "ENGINE_DIED"
    assert server.process.wait(120) == 1, "a supervisor starts it again"
    left = [path.name for path in server.log.parent.iterdir() if path.name.startswith("residuum-")]
    assert not left


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()) + process.name()
