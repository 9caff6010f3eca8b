"""Steering changes every row as requested, and no row of another request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import residuum
from tests.conformance.rows import ALL, MAX_ERROR, SITES, check_capture, make_prompt
from tests.conformance.steering import ablate, add, adding, cap, keeping_norm, replace, tensor
from tests.reference.hf import relative_error
from tests.reference.tiny import HIDDEN

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(8), 150)
MAX_SHORTFALL = 1e-2

WAYS = {
    "add": (lambda v: residuum.Add(v, layer=1, scale=0.7), lambda v: add(v, 0.7)),
    "ablate": (lambda v: residuum.Ablate(v, layer=1), ablate),
    "cap": (lambda v: residuum.Cap(v, layer=1, min=-0.5, max=0.5), lambda v: cap(v, -0.5, 0.5)),
    "replace": (lambda v: residuum.Replace(v, layer=1, value=0.8), lambda v: replace(v, 0.8)),
    "set": (lambda v: residuum.Set(v, layer=1), lambda v: lambda x: v.expand_as(x).clone()),
    "set and keep the norm": (
        lambda v: residuum.Set(v, layer=1, keep_norm=True),
        lambda v: keeping_norm(lambda x: v.expand_as(x).clone()),
    ),
    "add and keep the norm": (
        lambda v: residuum.Add(v, layer=1, scale=0.7, keep_norm=True),
        lambda v: keeping_norm(add(v, 0.7)),
    ),
    "ablate and keep the norm": (
        lambda v: residuum.Ablate(v, layer=1, keep_norm=True),
        lambda v: keeping_norm(ablate(v)),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_steering_agrees_with_its_definition(
    engine: Engine, reference: Reference, direction: residuum.Vector, way: str
) -> None:
    operation, change = WAYS[way]
    reply = engine.client.generate(
        PROMPT[:70], max_tokens=10, ignore_eos=True, capture=ALL, steer=[operation(direction)]
    )
    check_capture(engine, reference, reply, changes={1: change(tensor(direction))})
    acts = engine.client.activations(reply.request_id).select(site="resid_post")
    assert relative_error(acts[1], reference.rows(acts.token_ids)["resid_post"][1]) > 0.01, "the steering has an effect"


def test_rows_of_another_request_can_be_set(engine: Engine, reference: Reference) -> None:
    """Activation patching: from the patched positions on, the request continues like the other one."""
    rng = np.random.default_rng(9)
    clean, other = make_prompt(rng, 20), make_prompt(rng, 20)
    reply = engine.client.generate(clean, max_tokens=0, capture=ALL)
    source = engine.client.activations(reply).select(site="resid_post")
    rows = torch.from_numpy(source[1].copy())
    chosen = [3, 4, 19]

    def patched(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[chosen] = rows[chosen]
        return x

    steer = residuum.Set.from_activations(source, layers=[1], positions=chosen)
    reply = engine.client.generate(other, max_tokens=4, ignore_eos=True, capture=ALL, steer=steer)
    check_capture(engine, reference, reply, changes={1: patched})
    everything = residuum.Set.from_activations(source, layers=[1])
    reply = engine.client.generate(other, max_tokens=1, capture=ALL, steer=everything)
    after = engine.client.activations(reply).select(site="resid_post")
    assert relative_error(after[3], source[3]) < MAX_ERROR, "every row equals that of the other request"


def test_operations_are_applied_in_their_order(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    v = tensor(direction)
    operations = [residuum.Add(direction, layer=2, scale=0.7), residuum.Ablate(direction, layer=2)]
    forward = engine.client.generate(PROMPT[:12], max_tokens=2, ignore_eos=True, capture=ALL, steer=operations)
    check_capture(engine, reference, forward, changes={2: lambda x: ablate(v)(add(v, 0.7)(x))})
    backward = engine.client.generate(PROMPT[:12], max_tokens=2, ignore_eos=True, capture=ALL, steer=operations[::-1])
    check_capture(engine, reference, backward, changes={2: lambda x: add(v, 0.7)(ablate(v)(x))})


def test_every_layer_at_once(engine: Engine, reference: Reference, direction: residuum.Vector) -> None:
    steer = residuum.Add(direction, layers="all", scale=0.2)
    reply = engine.client.generate(PROMPT[:40], max_tokens=8, ignore_eos=True, capture=ALL, steer=steer)
    check_capture(engine, reference, reply, changes=dict.fromkeys(range(4), add(tensor(direction), 0.2)))


def test_every_layer_has_its_own_vector(engine: Engine, reference: Reference) -> None:
    vectors = {layer: make_vector(layer) for layer in (0, 2, 3)}
    reply = engine.client.generate(
        PROMPT[:40], max_tokens=8, ignore_eos=True, capture=ALL, steer=residuum.Add(vectors, scale=0.3)
    )
    changes = {layer: add(tensor(vector), 0.3) for layer, vector in vectors.items()}
    check_capture(engine, reference, reply, changes=changes)


def make_vector(seed: int) -> residuum.Vector:
    return residuum.Vector.from_array(np.random.default_rng(seed).standard_normal(HIDDEN).astype(np.float32))


@pytest.mark.parametrize(
    ("positions", "start"), [("generated", 70), ([(33, None)], 33), ([(-1, None)], 69)], ids=["reply", "range", "end"]
)
def test_steering_of_some_positions(
    engine: Engine, reference: Reference, direction: residuum.Vector, positions: object, start: int
) -> None:
    steered = adding(direction, scale=0.7, positions=positions, start=start)
    reply = engine.client.generate(PROMPT[:70], max_tokens=10, ignore_eos=True, capture=ALL, steer=steered.steer)
    check_capture(engine, reference, reply, changes=steered.changes)


def test_rows_before_steering(engine: Engine, reference: Reference, direction: residuum.Vector) -> None:
    """resid_post of the steered layer and resid_pre of the next, which are the same rows; no other row differs."""
    steered = adding(direction, scale=0.7)
    capture = residuum.Capture(sites=SITES, before_steering=True)
    reply = engine.client.generate(PROMPT[:70], max_tokens=4, ignore_eos=True, capture=capture, steer=steered.steer)
    acts = engine.client.activations(reply.request_id)
    expected = reference.rows(acts.token_ids, steered.changes)
    for site, layer in (("resid_post", 1), ("resid_pre", 2)):
        expected[site][layer] -= 0.7 * direction.values
    for site in SITES:
        assert relative_error(acts.select(site=site).stack(), expected[site]) < MAX_ERROR


def test_steering_is_seen_from_the_next_layer_on(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """Attention and MLP of the steered layer are unchanged. The input of the next layer is steered."""
    steered = adding(direction, scale=0.7)
    reply = engine.client.generate(PROMPT[:70], max_tokens=4, ignore_eos=True, capture=ALL, steer=steered.steer)
    check_capture(engine, reference, reply, changes=steered.changes)
    acts = engine.client.activations(reply.request_id)
    before, after, attention, mlp = (
        acts.select(site=site) for site in ("resid_pre", "resid_post", "attn_out", "mlp_out")
    )
    np.testing.assert_array_equal(before[2], after[1])
    made = before[1] + attention[1] + mlp[1]
    assert relative_error(made + 0.7 * direction.values, after[1]) < MAX_ERROR
    plain = reference.rows(acts.token_ids)
    assert relative_error(attention[1], plain["attn_out"][1]) < MAX_ERROR
    assert relative_error(mlp[1], plain["mlp_out"][1]) < MAX_ERROR
    assert relative_error(attention[2], plain["attn_out"][2]) > 0.01, "the steering reaches the next layer's attention"


def test_captured_and_steered_requests_in_one_batch(engine: Engine, reference: Reference) -> None:
    """Twelve requests at once, half of them steered, with three vectors. Rows or tokens show the steering of each."""
    rng = np.random.default_rng(9)
    vectors = [residuum.Vector.from_array(rng.standard_normal(HIDDEN).astype(np.float32)) for _ in range(3)]
    asked = []
    with engine.held(*vectors):
        for index in range(12):
            steered = adding(vectors[index // 4], scale=1.5) if index % 4 >= 2 else None
            stream = engine.client.stream(
                make_prompt(rng, int(rng.integers(1, 90))),
                max_tokens=int(rng.integers(10, 40)),
                ignore_eos=True,
                capture=ALL if index % 2 else None,
                steer=steered.steer if steered else (),
            )
            asked.append((stream, steered.changes if steered else {}))
    for index, (stream, changes) in enumerate(asked):
        for _ in stream:
            pass
        reply = stream.reply
        assert reference.shortfall(reply.prompt_token_ids, reply.token_ids, changes) < MAX_SHORTFALL
        assert reply.captured == bool(index % 2)
        if reply.captured:
            check_capture(engine, reference, reply, changes=changes)
        else:
            with pytest.raises(residuum.UnknownCapture):
                engine.client.manifest(reply.request_id)
    steps = engine.journal.steps_of(*(stream.request_id for stream, _ in asked))
    assert any(step.is_mixed and len(step.chunks) > 4 for step in steps)


def test_a_request_is_not_affected_by_its_neighbours(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """A steered and captured request among seven plain ones equals the same request run alone."""
    steered = adding(direction, scale=1.5)
    asked = {"max_tokens": 24, "ignore_eos": True, "capture": ALL, "steer": steered.steer}
    alone = engine.client.generate(PROMPT[:30], **asked)
    with engine.held():
        neighbours = [engine.client.stream(PROMPT[at : at + 40], max_tokens=60, ignore_eos=True) for at in range(7)]
        stream = engine.client.stream(PROMPT[:30], **asked)
    for running in (stream, *neighbours):
        for _ in running:
            pass
    together = stream.reply
    for neighbour in neighbours:
        reply = neighbour.reply
        assert reference.shortfall(reply.prompt_token_ids, reply.token_ids) < MAX_SHORTFALL, (
            "the plain requests are unaffected"
        )
    assert all(len(step.chunks) > 1 for step in engine.journal.steps_of(together.request_id)), "it shared every step"
    assert together.token_ids == alone.token_ids
    for reply in (alone, together):
        check_capture(engine, reference, reply, changes=steered.changes)
