"""Steering that changes while a request generates. It is exact from the announced position on, even if vLLM preempts
the request and computes it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.engines import KV_BLOCK
from tests.conformance.rows import ALL, MAX_ERROR, SITES, check_capture, make_prompt
from tests.conformance.steering import add, in_turn, replace, tensor
from tests.reference.hf import relative_error
from tests.reference.tiny import HIDDEN

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

MAX_SHORTFALL = 1e-2


def test_steering_is_changed_while_it_generates(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """One vector, then another operation on another layer, then none."""
    other = make_vector(5)
    v, w = tensor(direction), tensor(other)
    prompt = make_prompt(np.random.default_rng(50), 40)
    start = [residuum.Add(direction, layer=1, scale=0.7)]
    with engine.paced():
        stream = engine.client.stream(prompt, max_tokens=200, ignore_eos=True, capture=ALL, steer=start, updatable=True)
        read(stream, 5)
        (first,) = stream.update_steering([residuum.Replace(other, layer=2, value=0.8)])
        read(stream, 5)
        (second,) = engine.client.update_steering(stream, None)
    finish(stream)
    assert len(prompt) + 4 < first < second < len(prompt) + 199, "both changes came during the generation"
    check_capture(
        engine,
        reference,
        stream.reply,
        changes={
            1: in_turn([(0, add(v, 0.7)), (first, None)]),
            2: in_turn([(first, replace(w, 0.8)), (second, None)]),
        },
    )
    manifest = engine.client.manifest(stream.request_id)
    assert [change.first_positions for change in manifest.steering_changes] == [(first,), (second,)]
    assert [[item.operation for item in change.steering] for change in manifest.steering_changes] == [["replace"], []]
    assert [item.operation for item in manifest.steering] == ["add"]


def test_a_change_applies_at_each_sequences_own_position(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """An unsteered request of three sequences that is steered later."""
    prompt = make_prompt(np.random.default_rng(51), 30)
    with engine.paced():
        stream = engine.client.stream(
            prompt, max_tokens=150, ignore_eos=True, capture=ALL, n=3, temperature=1.0, seed=3, updatable=True
        )
        read(stream, 3)
        firsts = stream.update_steering(residuum.Add(direction, layer=0, scale=0.7))
    finish(stream)
    acts = engine.client.activations(stream.request_id)
    assert len(firsts) == 3
    for sequence, first in enumerate(firsts):
        rows = acts.select(sequence=sequence, site="resid_post")
        expected = reference.rows(rows.token_ids, {0: in_turn([(first, add(tensor(direction), 0.7))])})
        assert relative_error(rows.stack(), expected["resid_post"]) < MAX_ERROR


def test_recomputed_positions_are_steered_as_the_first_time(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """Fourteen long replies, nearly twice what the KV cache holds, all changed during the generation."""
    rng = np.random.default_rng(52)
    v = tensor(direction)
    with engine.held(direction):
        streams = [
            engine.client.stream(
                make_prompt(rng, int(rng.integers(20, 100))),
                max_tokens=int(rng.integers(180, 230)),
                ignore_eos=True,
                capture=ALL if index % 2 else residuum.Capture(sites=SITES, positions="generated"),
                steer=residuum.Add(direction, layer=1, scale=0.7),
                updatable=True,
            )
            for index in range(14)
        ]
    changes = []
    with engine.paced():
        for stream in streams:
            read(stream, 3)
            changes.append(stream.update_steering(residuum.Add(direction, layer=1, scale=-0.7)))
    for stream in streams:
        finish(stream)
    preempted = [index for index, stream in enumerate(streams) if engine.journal.preemptions(stream.request_id)]
    again = [
        index
        for index in preempted
        if any(first < changes[index][0] for first, _ in engine.journal.chunks(streams[index].request_id)[-60:])
    ]
    assert len(again) >= 2, "vLLM recomputed some requests from before the change"
    for index, stream in enumerate(streams):
        changed = {1: in_turn([(0, add(v, 0.7)), (changes[index][0], add(v, -0.7))])}
        wanted = {} if index % 2 else {"wanted": range}
        check_capture(engine, reference, stream.reply, changes=changed, **wanted)


def test_no_request_reads_the_kv_cache_of_a_changed_request(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """A request with the old steering gets the changed request's text as its prompt. It must not share the KV cache."""
    prompt = make_prompt(np.random.default_rng(53), KV_BLOCK + 4)
    steer = residuum.Add(direction, layer=1, scale=0.7)
    with engine.paced():
        stream = engine.client.stream(prompt, max_tokens=100, ignore_eos=True, steer=steer, updatable=True)
        read(stream, 2)
        stream.update_steering(None)
    finish(stream)
    text = [*prompt, *stream.reply.token_ids]
    engine.client.generate(prompt, max_tokens=2, steer=steer)  # its cached prompt may be shared
    reply = engine.client.generate(text[: 4 * KV_BLOCK], max_tokens=8, ignore_eos=True, steer=steer)
    changes = {1: add(tensor(direction), 0.7)}
    assert reference.shortfall(reply.prompt_token_ids, reply.token_ids, changes) < MAX_SHORTFALL
    assert engine.journal.chunks(reply.request_id)[0][0] <= KV_BLOCK, "at most the prompt was read from the cache"


def test_a_request_that_is_not_updatable_cannot_be_changed(engine: Engine, direction: residuum.Vector) -> None:
    with engine.paced(), engine.client.stream([5, 6], max_tokens=500, ignore_eos=True) as stream:
        with pytest.raises(residuum.NotUpdatable, match="updatable"):
            stream.update_steering(residuum.Add(direction, layer=1))
        with pytest.raises(residuum.UnknownRequest):
            engine.client.update_steering("nobody", None)


def read(stream: residuum.Stream, tokens: int) -> None:
    """Read some tokens of a stream."""
    while tokens > 0:
        tokens -= len(next(stream).token_ids)


def finish(stream: residuum.Stream) -> None:
    """Read the rest of a stream."""
    for _ in stream:
        pass


def make_vector(seed: int) -> residuum.Vector:
    return residuum.Vector.from_array(np.random.default_rng(seed).standard_normal(HIDDEN).astype(np.float32))
