"""Gated steering changes the rows that open the gate, as far as it is open, and no other row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import residuum
from tests.conformance.rows import ALL, check_capture, make_prompt
from tests.conformance.steering import ablate, add, in_turn, keeping_norm, replace, tensor
from tests.reference.hf import relative_error

if TYPE_CHECKING:
    from bench.conformance.reference import Change
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(90), 80)


def make_vector(engine: Engine, seed: int, site: str = "resid_post") -> residuum.Vector:
    width = engine.client.info().site_widths[site]
    return residuum.Vector(np.random.default_rng(seed).standard_normal(width).astype(np.float32))


def measured(x: torch.Tensor, gate: residuum.Gate) -> torch.Tensor:
    """Return what a gate with one vector measures of rows, [rows]."""
    assert isinstance(gate.vector, residuum.Vector)
    v = tensor(gate.vector)
    product = x @ v
    return {
        "projection": product / v.norm(),
        "inner_product": product,
        "cosine": product / v.norm() / x.norm(dim=-1),
    }[gate.measure]


def gated(change: Change, gate: residuum.Gate) -> Change:
    """Apply a change only as far as a gate is open."""

    def changed(x: torch.Tensor) -> torch.Tensor:
        above = measured(x, gate) + gate.bias - gate.threshold
        above = -above if gate.below else above
        opening = (above > 0).float() if gate.sharpness is None else torch.sigmoid(gate.sharpness * above)
        return x + opening[:, None] * (change(x) - x)

    return changed


def middle(x: torch.Tensor, gate: residuum.Gate) -> float:
    """Return a threshold that half of the rows pass."""
    scores = measured(x, gate).sort().values
    return float(scores[len(scores) // 2 - 1 : len(scores) // 2 + 1].mean())


@pytest.fixture(scope="module")
def unsteered(reference: Reference) -> dict[str, np.ndarray]:
    """The rows of the prompt without steering, by site, [layers, positions, width]."""
    return reference.rows(PROMPT)


KINDS = {
    "hard": {},
    "hard, below": {"below": True, "measure": "inner_product", "bias": 0.5},
    "hard, by the cosine": {"measure": "cosine"},
    "soft": {"sharpness": 0.3},
    "soft, below, by the cosine": {"sharpness": 30.0, "measure": "cosine", "below": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_gated_steering_agrees_with_its_definition(
    engine: Engine, reference: Reference, unsteered: dict[str, np.ndarray], kind: str
) -> None:
    """Each layer has another operation, with a gate of its own."""
    v = make_vector(engine, 1)
    direction = tensor(v)
    gates = []
    for layer in range(4):
        gate = residuum.Gate(make_vector(engine, 10 + layer), **KINDS[kind])
        threshold = middle(torch.from_numpy(unsteered["resid_post"][layer]), gate) + gate.bias
        gates.append(residuum.Gate(gate.vector, threshold, **KINDS[kind]))
    steer = [
        residuum.Add(v, layer=0, scale=0.7, gate=gates[0]),
        residuum.Ablate(v, layer=1, gate=gates[1], keep_norm=True),
        residuum.Replace(v, layer=2, value=0.8, gate=gates[2]),
        residuum.Set(v, layer=3, gate=gates[3]),
        residuum.Multiply(v, layer=3, gate=gates[3], keep_norm=True),
    ]
    set_and_multiply = (
        gated(direction.expand_as, gates[3]),
        keeping_norm(gated(lambda x: x * direction, gates[3])),
    )
    changes = {
        0: gated(add(direction, 0.7), gates[0]),
        1: keeping_norm(gated(ablate(direction), gates[1])),
        2: gated(replace(direction, 0.8), gates[2]),
        3: lambda x: set_and_multiply[1](set_and_multiply[0](x)),
    }
    reply = engine.client.generate(PROMPT, max_tokens=6, ignore_eos=True, capture=ALL, steer=steer)
    check_capture(engine, reference, reply, changes=changes)
    acts = engine.client.activations(reply)
    ungated = reference.rows(acts.token_ids, {**changes, 0: add(direction, 0.7)})
    never = reference.rows(acts.token_ids, {layer: change for layer, change in changes.items() if layer})
    for other in (ungated, never):
        assert relative_error(acts.select(site="resid_post")[0], other["resid_post"][0]) > 0.01, "the gate matters"
    records = [record.gate for record in acts.manifest.steering]
    assert [record.digests for record in records[:4]] == [(gate.vector.hexdigest,) for gate in gates]
    assert {(record.measure, record.below) for record in records} == {(gates[0].measure, gates[0].below)}


def test_rows_whose_gate_is_closed_keep_their_bits(engine: Engine, unsteered: dict[str, np.ndarray]) -> None:
    gate = residuum.Gate(make_vector(engine, 20))
    rows = torch.from_numpy(unsteered["resid_post"][1])
    threshold = middle(rows, gate)
    steer = residuum.Add(make_vector(engine, 21), layer=1, gate=residuum.Gate(gate.vector, threshold))
    asked = {"max_tokens": 0, "capture": ALL}
    plain, steered = (
        engine.client.activations(engine.client.generate(PROMPT, steer=operations, **asked)).select(site="resid_post")
        for operations in ((), steer)
    )
    is_open = (measured(rows, gate) > threshold).numpy()
    assert is_open.sum() == len(PROMPT) // 2
    np.testing.assert_array_equal(steered[1][~is_open], plain[1][~is_open])
    assert (steered[1][is_open] != plain[1][is_open]).mean() > 0.99


def test_gates_inside_the_layers_and_by_layer(
    engine: Engine, reference: Reference, unsteered: dict[str, np.ndarray]
) -> None:
    """Rows of another width, a gate with a vector for each layer, and only some positions."""
    steer: list[residuum.Operation] = []
    changes = {}
    for layer, site in enumerate(("z", "mlp_act", "attn_out", "resid_mid")):
        gate = residuum.Gate(make_vector(engine, 30 + layer, site))
        gate = residuum.Gate(gate.vector, middle(torch.from_numpy(unsteered[site][layer]), gate))
        v = make_vector(engine, 40 + layer, site)
        steer.append(residuum.Add(v, layer=layer, site=site, scale=0.7, gate=gate))
        changes[site, layer] = gated(add(tensor(v), 0.7), gate)
    by_layer = {layer: make_vector(engine, 50 + layer) for layer in (0, 2)}
    v = make_vector(engine, 60)
    steer.append(residuum.Add(v, layers=[0, 2], gate=residuum.Gate(by_layer, 0.1), positions="generated"))
    for layer, vector in by_layer.items():
        later = gated(add(tensor(v), 1.0), residuum.Gate(vector, 0.1))
        changes[layer] = in_turn([(len(PROMPT), later)])
    reply = engine.client.generate(PROMPT, max_tokens=12, ignore_eos=True, capture=ALL, steer=steer)
    check_capture(engine, reference, reply, changes=changes)


def test_gated_and_other_requests_in_one_batch(
    engine: Engine, reference: Reference, unsteered: dict[str, np.ndarray]
) -> None:
    """Ten requests at once: plain ones, ones with one operation, gated or not, and ones with both."""
    rng = np.random.default_rng(91)
    v, gate = make_vector(engine, 70), residuum.Gate(make_vector(engine, 71))
    gate = residuum.Gate(gate.vector, middle(torch.from_numpy(unsteered["resid_post"][1]), gate))
    change = add(tensor(v), 0.7)
    only_gated = residuum.Add(v, layer=1, scale=0.7, gate=gate)
    always = residuum.Add(v, layer=1, scale=0.7)
    ways = [
        ((), {}),
        (only_gated, {1: gated(change, gate)}),
        (always, {1: change}),
        ([always, only_gated], {1: lambda x: gated(change, gate)(change(x))}),
        ([only_gated, always], {1: lambda x: change(gated(change, gate)(x))}),
    ]
    asked = []
    with engine.held(v, gate.vector):
        for index in range(10):
            steer, changes = ways[index % len(ways)]
            prompt = make_prompt(rng, int(rng.integers(5, 60)))
            stream = engine.client.stream(prompt, max_tokens=12, ignore_eos=True, capture=ALL, steer=steer)
            asked.append((stream, changes))
    for stream, changes in asked:
        for _ in stream:
            pass
        check_capture(engine, reference, stream.reply, changes=changes)
    steps = engine.journal.steps_of(*(stream.request_id for stream, _ in asked))
    assert any(len(step.chunks) > 4 for step in steps)


def test_a_gate_is_added_and_moved_while_a_request_generates(engine: Engine, reference: Reference) -> None:
    v, w = make_vector(engine, 80), make_vector(engine, 81)
    always, low, high = add(tensor(v), 0.7), residuum.Gate(w, -0.2), residuum.Gate(w, 0.2, below=True)
    steer = residuum.Add(v, layer=1, scale=0.7)
    with engine.paced():
        stream = engine.client.stream(
            PROMPT[:30], max_tokens=150, ignore_eos=True, capture=ALL, steer=steer, updatable=True
        )
        positions = [0]
        for gate in (low, high):
            read = 0
            while read < 5:
                read += len(next(stream).token_ids)
            positions += stream.update_steering(residuum.Add(v, layer=1, scale=0.7, gate=gate))
    for _ in stream:
        pass
    turns = zip(positions, (always, gated(always, low), gated(always, high)), strict=True)
    check_capture(engine, reference, stream.reply, changes={1: in_turn(list(turns))})
    manifest = engine.client.manifest(stream.request_id)
    assert [change.steering[0].gate.threshold for change in manifest.steering_changes] == pytest.approx([-0.2, 0.2])


def test_a_gate_of_another_width_is_refused(engine: Engine) -> None:
    v = make_vector(engine, 1)
    short = residuum.Vector(np.ones(len(v) - 1, np.float32))
    with pytest.raises(residuum.BadVector) as caught:
        engine.client.generate(PROMPT, max_tokens=1, steer=residuum.Add(v, layer=1, gate=residuum.Gate(short)))
    assert caught.value.reason == "WRONG_LENGTH"
    assert engine.client.info().gate_measures == ("projection", "inner_product", "cosine")
