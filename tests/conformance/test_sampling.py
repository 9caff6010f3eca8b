"""Sampling parameters, log-probabilities and prompts without a reply, compared with the logits of transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.engines import CHUNK, KV_BLOCK
from tests.conformance.rows import ALL, check_capture, make_prompt
from tests.conformance.steering import adding

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(50), 40)
TOLERANCE = 1e-2
"""How far a log-probability or a logit may be off. Logits of random tokens differ by about 1."""


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = logits - logits.max(axis=-1, keepdims=True)
    for row in found.reshape(-1, found.shape[-1]):  # one by one: several copies of all of them take longer
        np.subtract(row, np.log(np.exp(row).sum()), out=row)
    return found


def check_logprobs(found: residuum.Logprobs | None, token_ids: list[int], expected: npt.NDArray, k: int) -> None:
    """Check the log-probabilities of tokens against the reference for the whole vocabulary, [tokens, vocabulary]."""
    assert found is not None
    assert (found.tokens.shape, found.top.shape, found.top_ids.shape) == ((len(expected),), *[(len(expected), k)] * 2)
    at = np.arange(len(expected))
    np.testing.assert_allclose(found.tokens, expected[at, token_ids], atol=TOLERANCE)
    greatest = np.sort(np.partition(expected, -k, axis=-1)[:, -k:], axis=-1)[:, ::-1]
    np.testing.assert_allclose(found.top, greatest, atol=TOLERANCE)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, found.top_ids, axis=-1), atol=TOLERANCE)


@pytest.mark.parametrize("size", [1, CHUNK + 1])
def test_log_probabilities(engine: Engine, reference: Reference, direction: residuum.Vector, size: int) -> None:
    """Prompts in one step and in several, cold and warm, with and without a capture and steering."""
    prompt = make_prompt(np.random.default_rng(60 + size), size)
    steered = adding(direction, scale=0.7)
    for options, changes in (({}, None), ({"capture": ALL}, None), ({"steer": steered.steer}, steered.changes)):
        reply = engine.client.generate(
            prompt,
            max_tokens=6,
            n=2,
            temperature=1.0,
            top_k=5,
            ignore_eos=True,
            logprobs=4,
            prompt_logprobs=3,
            **options,
        )
        for sequence in reply.sequences:
            tokens = list(sequence.token_ids)
            expected = log_softmax(reference.logits([*prompt, *tokens], changes))
            check_logprobs(sequence.logprobs, tokens, expected[size - 1 : -1], 4)
        of_prompt = reply.prompt_logprobs
        assert of_prompt is not None
        assert np.isnan(of_prompt.tokens[0])
        rest = residuum.Logprobs(of_prompt.tokens[1:], of_prompt.top_ids[1:], of_prompt.top[1:])
        check_logprobs(rest, prompt[1:], expected[: size - 1], 3)


@pytest.mark.parametrize("size", [1, KV_BLOCK, CHUNK + 7])
def test_a_prompt_alone(engine: Engine, reference: Reference, size: int) -> None:
    """The capture has a row for every position of the prompt, and no other rows."""
    prompt = make_prompt(np.random.default_rng(70 + size), size)
    for _ in range(2):  # the second time, the prefix cache is warm
        reply = engine.client.generate(prompt, max_tokens=0, capture=ALL, n=2, prompt_logprobs=1)
        assert [(item.text, item.token_ids, item.finish_reason) for item in reply.sequences] == [("", (), "length")] * 2
        assert reply.usage == residuum.Usage(prompt_tokens=size, generated_tokens=0)
        rows = check_capture(engine, reference, reply)
        assert {row.position for row in rows} == set(range(size))
        assert reply.prompt_logprobs is not None
        assert len(reply.prompt_logprobs) == size


def test_a_reduced_prompt_alone(engine: Engine) -> None:
    mean = residuum.Capture(layers=[1], reduction="mean")
    reply = engine.client.generate(PROMPT, max_tokens=0, capture=mean)
    every = engine.client.generate(PROMPT, max_tokens=0, capture=residuum.Capture(layers=[1]))
    rows = [engine.client.activations(item)[1] for item in (reply, every)]
    assert rows[0].shape[0] == 1
    np.testing.assert_allclose(rows[0][0], rows[1].mean(axis=0), atol=1e-5)


def test_a_stop_token(engine: Engine, reference: Reference) -> None:
    plain = engine.client.generate(PROMPT, max_tokens=20, ignore_eos=True)
    token = plain.token_ids[7]
    end = plain.token_ids.index(token)
    reply = engine.client.generate(PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=[token, 5], capture=ALL)
    assert reply.token_ids == plain.token_ids[: end + 1]
    assert (reply.finish_reason, reply.sequences[0].stop_token_id) == ("stop", token)
    check_capture(engine, reference, reply)


def check_greedy(
    reference: Reference, reply: residuum.Reply, change: Callable[[npt.NDArray, list[int]], npt.NDArray]
) -> None:
    """Check that each token has the largest logit, after a change of the logits that depends on earlier tokens."""
    tokens = list(reply.token_ids)
    logits = reference.logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    for at, token in enumerate(tokens):
        changed = change(logits[at].copy(), tokens[:at])
        assert changed.max() - changed[token] < TOLERANCE, f"token {at}"


def generate(engine: Engine, **sampling: object) -> residuum.Reply:
    plain = engine.client.generate(PROMPT, max_tokens=24, ignore_eos=True)
    reply = engine.client.generate(PROMPT, max_tokens=24, ignore_eos=True, **sampling)
    assert reply.token_ids != plain.token_ids
    return reply


def test_penalties(engine: Engine, reference: Reference) -> None:
    # A bias makes three tokens by far the most likely, so that they repeat and the penalties matter.
    bias = dict.fromkeys((PROMPT[0], 100, 200), 30.0)

    def change(logits: npt.NDArray, before: list[int]) -> npt.NDArray:
        logits[list(bias)] += 30.0
        seen = np.unique([*PROMPT, *before])
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        counts = np.bincount(before, minlength=len(logits))
        changed: npt.NDArray = logits - 1.25 * counts - 0.75 * (counts > 0)
        return changed

    reply = generate(engine, repetition_penalty=1.5, frequency_penalty=1.25, presence_penalty=0.75, logit_bias=bias)
    assert set(reply.token_ids) <= set(bias)
    check_greedy(reference, reply, change)


def test_logit_bias(engine: Engine, reference: Reference) -> None:
    bias = {int(token): -100.0 for token in engine.client.generate(PROMPT, max_tokens=24, ignore_eos=True).token_ids}
    reply = generate(engine, logit_bias=bias)
    assert not set(bias) & set(reply.token_ids)

    def change(logits: npt.NDArray, before: list[int]) -> npt.NDArray:
        del before
        logits[list(bias)] -= 100.0
        return logits

    check_greedy(reference, reply, change)


def test_min_p(engine: Engine, reference: Reference) -> None:
    reply = engine.client.generate(PROMPT, max_tokens=24, ignore_eos=True, temperature=2.0, min_p=0.5, seed=3)
    tokens = list(reply.token_ids)
    logits = reference.logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    behind = logits.max(axis=-1) - logits[np.arange(len(tokens)), tokens]
    assert behind.max() <= 2.0 * np.log(2) + TOLERANCE, "at least half as likely as the best token, at temperature 2"
    assert behind.max() > TOLERANCE, "some token is not the most likely one"


def test_bad_words(engine: Engine) -> None:
    plain = engine.client.generate(PROMPT, max_tokens=24, ignore_eos=True)
    with engine.client.stream(PROMPT, max_tokens=24, ignore_eos=True) as stream:
        words = [text for delta in stream if len(text := delta.text.strip()) > 2 and text.isascii()]
    reply = engine.client.generate(PROMPT, max_tokens=24, ignore_eos=True, bad_words=words[:3])
    assert words[0] in plain.text
    assert not any(word in reply.text for word in words[:3])


def test_a_regular_expression(engine: Engine, reference: Reference) -> None:
    reply = engine.client.generate(PROMPT, max_tokens=40, regex="(ab|[0-9]{2})[.]{3}", capture=ALL)
    assert reply.finish_reason == "stop"
    assert reply.text in {"ab...", *(f"{number:02}..." for number in range(100))}
    check_capture(engine, reference, reply)


def test_a_json_schema(engine: Engine, reference: Reference) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "blue"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    # Without a bias, a random model generates white space until the end.
    reply = engine.client.generate(PROMPT, max_tokens=200, json_schema=schema, n=2, capture=ALL, logprobs=0)
    for sequence in reply.sequences:
        assert sequence.logprobs is not None
        assert len(sequence.logprobs) == len(sequence.token_ids)
        if sequence.finish_reason == "stop":
            found = json.loads(sequence.text)
            assert set(found) == {"ok", "kind"}
            assert (type(found["ok"]), found["kind"] in {"red", "blue"}) == (bool, True)
        else:
            assert sequence.text.lstrip().startswith("{")
    check_capture(engine, reference, reply)


REFUSED = {
    "sampling.json_schema": {"json_schema": {"type": "no such type"}},
    "sampling.regex": {"regex": "(a"},
    "sampling.bad_words": {"bad_words": ["many tokens in one word " * 300]},
    "sampling.logit_bias": {"logit_bias": {49152: 1.0}},
    "sampling.stop_token_ids": {"stop_token_ids": [49152]},
    "sampling.logprobs": {"logprobs": 21},
}


@pytest.mark.parametrize(("field", "sampling"), REFUSED.items(), ids=REFUSED)
def test_parameters_that_vllm_refuses_are_named_before_the_request_begins(
    engine: Engine, field: str, sampling: dict
) -> None:
    name = f"refused-{field.partition('.')[2]}-{engine.name}"
    registration = engine.client.register(capture=ALL, request_id=name)
    with pytest.raises(residuum.InvalidRequest) as caught:
        engine.client.generate(PROMPT, max_tokens=4, registration=registration, **sampling)
    assert caught.value.metadata["field"] == field
    assert engine.client.generate(PROMPT, max_tokens=0, registration=registration).request_id == name
