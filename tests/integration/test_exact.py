"""Captured and steered rows of a compiled float32 model, against transformers steered by its own hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import residuum
from tests.integration.hf import Reference, relative_error
from tests.integration.tiny import HIDDEN, LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.engine

MAX_ERROR = 2e-4
"""Both sides compute in float32, in another order; rows of another token differ by about 1."""

PROMPT = [int(token) for token in np.random.default_rng(3).integers(10, 40_000, size=150)]
"""Longer than a prefill chunk (64 tokens), and no multiple of a block."""


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(str(tiny_llama))


@pytest.fixture(scope="module")
def direction() -> residuum.Vector:
    return residuum.Vector.from_array(np.random.default_rng(4).standard_normal(HIDDEN).astype(np.float32))


def test_every_row_of_a_chunked_prompt_and_its_reply(exact_client: residuum.Client, reference: Reference) -> None:
    reply = exact_client.generate(PROMPT, max_tokens=70, ignore_eos=True, capture=residuum.Capture(layers="all"))
    acts = exact_client.activations(reply.request_id)
    assert acts.manifest.state == "complete"
    assert acts.token_ids.tolist() == (PROMPT + list(reply.token_ids))[:-1]
    assert acts.positions.tolist() == list(range(len(PROMPT) + 70 - 1))
    assert relative_error(acts.stack(), reference.rows(acts.token_ids)) < MAX_ERROR


def test_rows_are_those_of_their_layer(exact_client: residuum.Client, reference: Reference) -> None:
    reply = exact_client.generate(PROMPT[:20], max_tokens=4, ignore_eos=True, capture=residuum.Capture(layers=[1, 3]))
    acts = exact_client.activations(reply.request_id)
    expected = reference.rows(acts.token_ids)
    assert acts.layers == (1, 3)
    assert relative_error(acts[1], expected[1]) < MAX_ERROR
    assert relative_error(acts[3], expected[3]) < MAX_ERROR
    assert relative_error(acts[1], expected[2]) > 0.01, "the layers differ, so a wrong one would show"


def _add(v: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + 0.7 * v


def _ablate(v: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    unit = v / v.norm()
    return lambda x: x - (x @ unit)[:, None] * unit


def _cap(v: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    unit = v / v.norm()
    return lambda x: x + ((x @ unit).clamp(-0.5, 0.5) - x @ unit)[:, None] * unit


WAYS = {
    "add": (lambda v: residuum.Add(v, layer=1, scale=0.7), _add),
    "ablate": (lambda v: residuum.Ablate(v, layer=1), _ablate),
    "cap": (lambda v: residuum.Cap(v, layer=1, min=-0.5, max=0.5), _cap),
}


@pytest.mark.parametrize("way", WAYS)
def test_steering_is_what_it_says(
    exact_client: residuum.Client, reference: Reference, direction: residuum.Vector, way: str
) -> None:
    operation, change = WAYS[way]
    reply = exact_client.generate(
        PROMPT[:40],
        max_tokens=10,
        ignore_eos=True,
        capture=residuum.Capture(layers="all"),
        steer=[operation(direction)],
    )
    acts = exact_client.activations(reply.request_id)
    expected = reference.rows(acts.token_ids, {1: change(torch.from_numpy(direction.values.copy()))})
    assert relative_error(acts.stack(), expected) < MAX_ERROR
    assert relative_error(acts[1], reference.rows(acts.token_ids)[1]) > 0.01, "it did something"


def test_operations_are_applied_in_their_order(
    exact_client: residuum.Client, reference: Reference, direction: residuum.Vector
) -> None:
    v = torch.from_numpy(direction.values.copy())
    capture = residuum.Capture(layers="all")
    operations = [residuum.Add(direction, layer=2, scale=0.7), residuum.Ablate(direction, layer=2)]
    rows = {}
    for name, steer in {"forward": operations, "backward": operations[::-1]}.items():
        reply = exact_client.generate(PROMPT[:12], max_tokens=2, ignore_eos=True, capture=capture, steer=steer)
        rows[name] = exact_client.activations(reply.request_id)
    forward = reference.rows(rows["forward"].token_ids, {2: lambda x: _ablate(v)(_add(v)(x))})
    backward = reference.rows(rows["backward"].token_ids, {2: lambda x: _add(v)(_ablate(v)(x))})
    assert relative_error(rows["forward"].stack(), forward) < MAX_ERROR
    assert relative_error(rows["backward"].stack(), backward) < MAX_ERROR


def test_steering_of_the_generated_part_alone(
    exact_client: residuum.Client, reference: Reference, direction: residuum.Vector
) -> None:
    prompt = PROMPT[:40]

    def change(x: torch.Tensor) -> torch.Tensor:
        steered = x.clone()
        steered[len(prompt) :] += 0.7 * torch.from_numpy(direction.values.copy())
        return steered

    reply = exact_client.generate(
        prompt,
        max_tokens=10,
        ignore_eos=True,
        capture=residuum.Capture(layers="all"),
        steer=[residuum.Add(direction, layer=1, scale=0.7, positions="generated")],
    )
    acts = exact_client.activations(reply.request_id)
    assert relative_error(acts.stack(), reference.rows(acts.token_ids, {1: change})) < MAX_ERROR


def test_rows_before_steering(exact_client: residuum.Client, reference: Reference, direction: residuum.Vector) -> None:
    v = torch.from_numpy(direction.values.copy())
    reply = exact_client.generate(
        PROMPT[:12],
        max_tokens=2,
        ignore_eos=True,
        capture=residuum.Capture(layers=[1], before_steering=True),
        steer=[residuum.Add(direction, layer=1, scale=0.7)],
    )
    acts = exact_client.activations(reply.request_id)
    after = reference.rows(acts.token_ids, {1: _add(v)})[1]
    assert relative_error(acts[1] + 0.7 * direction.values, after) < MAX_ERROR


def test_a_warm_prefix_cache_leaves_no_row_out(exact_client: residuum.Client, reference: Reference) -> None:
    for _ in range(2):  # without a capture: the second finds the first one's prompt in the cache
        exact_client.generate(PROMPT, max_tokens=1)
    reply = exact_client.generate(PROMPT, max_tokens=1, capture=residuum.Capture(layers="all"))
    acts = exact_client.activations(reply.request_id)
    assert len(acts.positions) == len(PROMPT)
    assert relative_error(acts.stack(), reference.rows(PROMPT)) < MAX_ERROR


def test_steering_and_the_prefix_cache(
    exact_client: residuum.Client, reference: Reference, direction: residuum.Vector
) -> None:
    prompt = PROMPT[5:]
    greedy = reference.greedy(prompt, 3)
    other = residuum.Vector.from_array(-direction.values)
    steered = [
        exact_client.generate(
            prompt, max_tokens=3, ignore_eos=True, steer=[residuum.Add(v, layer=0, scale=5.0)]
        ).token_ids
        for v in (direction, other, direction)
    ]
    unsteered = exact_client.generate(prompt, max_tokens=3, ignore_eos=True).token_ids
    assert list(unsteered) == greedy, "an unsteered request must not read a steered one's cache"
    assert steered[0] == steered[2], "equal steering, equal reply"
    assert steered[0] != unsteered
    assert steered[0] != steered[1], "another vector must not read the first one's cache"


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65])
def test_prompt_lengths_around_blocks_and_chunks(
    exact_client: residuum.Client, reference: Reference, length: int
) -> None:
    reply = exact_client.generate(
        PROMPT[:length], max_tokens=33, ignore_eos=True, capture=residuum.Capture(layers="all")
    )
    acts = exact_client.activations(reply.request_id)
    assert acts[0].shape == (length + 32, HIDDEN)
    assert relative_error(acts.stack(), reference.rows(acts.token_ids)) < MAX_ERROR


def test_many_requests_with_different_layers_at_once(exact_client: residuum.Client, reference: Reference) -> None:
    rng = np.random.default_rng(5)
    prompts = [[int(token) for token in rng.integers(10, 40_000, size=size)] for size in rng.integers(1, 90, size=40)]
    layer_sets = [sorted({int(layer) for layer in rng.integers(0, LAYERS, size=3)}) for _ in prompts]
    streams = []
    for prompt, layers in zip(prompts, layer_sets, strict=True):
        capture = residuum.Capture(layers=layers)
        streams.append(exact_client.stream(prompt, max_tokens=20, ignore_eos=True, capture=capture))
    for stream, layers in zip(streams, layer_sets, strict=True):
        for _ in stream:
            pass
        acts = exact_client.activations(stream.reply.request_id)
        assert list(acts.layers) == layers
        assert relative_error(acts.stack(), reference.rows(acts.token_ids)[layers]) < MAX_ERROR


def test_a_request_is_not_touched_by_its_neighbours(exact_client: residuum.Client, direction: residuum.Vector) -> None:
    """Steered and captured among seven that are neither, it equals the same request run alone."""
    asked = {
        "max_tokens": 24,
        "ignore_eos": True,
        "capture": residuum.Capture(layers="all"),
        "steer": [residuum.Add(direction, layer=1, scale=1.5)],
    }
    alone = exact_client.generate(PROMPT[:30], **asked)
    neighbours = [exact_client.stream(PROMPT[at : at + 40], max_tokens=60, ignore_eos=True) for at in range(7)]
    for neighbour in neighbours:
        next(iter(neighbour))  # they are running
    together = exact_client.generate(PROMPT[:30], **asked)
    for neighbour in neighbours:
        for _ in neighbour:
            pass
    assert together.token_ids == alone.token_ids
    rows = [exact_client.activations(reply.request_id).stack() for reply in (together, alone)]
    assert relative_error(*rows) < MAX_ERROR
