"""Directions from captures of a real model, and the effect of steering along them on that model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

SUBJECTS = ("this film", "my new job", "the weather today", "our holiday", "that restaurant", "the new phone")
HAPPY = tuple(f"I love {subject}, it makes me so happy and I" for subject in SUBJECTS)
SAD = tuple(f"I hate {subject}, it makes me so sad and I" for subject in SUBJECTS)
UNSEEN = (
    ("I love her cat, it makes me so happy and I", "I hate her cat, it makes me so sad and I"),
    ("I love my dog and I", "I hate my dog and I"),
)
NEUTRAL = "When I opened the door, I saw"
LAST = residuum.Capture(layers="all", positions="last_prompt")
LAYER = 15


def capture(client: residuum.Client, prompts: tuple[str, ...], **how: object) -> list[residuum.Activations]:
    replies = client.generate_many(prompts, max_tokens=1, capture=LAST, progress=False, **how)
    return [client.activations(reply) for reply in replies]


@pytest.mark.parametrize("method", [residuum.directions.difference_of_means, residuum.directions.pca])
def test_steering_along_a_direction_moves_the_model_along_it(
    client: residuum.Client, tmp_path: Path, method: object
) -> None:
    made = method(capture(client, HAPPY), capture(client, SAD))  # type: ignore[operator]
    made.save(tmp_path / "joy.safetensors")
    joy = residuum.Directions.load(tmp_path / "joy.safetensors")
    assert joy == made
    assert joy.layers == tuple(range(30))
    assert joy.origin.model == client.info().model

    for happy, sad in UNSEEN:
        above, below = (joy.project(acts)[LAYER][0] for acts in capture(client, (happy, sad)))
        assert above > below, "the direction separates prompts that it was not computed from"

    (plain,) = capture(client, (NEUTRAL,))
    before = {layer: rows[0] for layer, rows in joy.project(plain).items()}

    def steered(operations: object) -> dict[int, float]:
        (acts,) = capture(client, (NEUTRAL,), steer=operations)
        return {layer: rows[0] for layer, rows in joy.project(acts).items()}

    length = 0.3 * float(np.linalg.norm(plain[LAYER]))
    scale = length / joy[LAYER].norm
    up, down = (steered(joy.add(sign * scale, layers=LAYER)) for sign in (1, -1))
    # Earlier tokens are steered too, but do not affect this row within the layer: it moves by exactly the added vector.
    assert up[LAYER] - before[LAYER] == pytest.approx(length, rel=0.02)
    assert down[LAYER] - before[LAYER] == pytest.approx(-length, rel=0.02)
    for layer in range(LAYER + 1, 30):
        assert down[layer] < before[layer] < up[layer], "the steering affects later layers"
    assert up[LAYER - 1] == pytest.approx(before[LAYER - 1], abs=0.02 * length), (
        "the steering does not affect earlier layers"
    )

    assert steered(joy.ablate(layers=LAYER))[LAYER] == pytest.approx(0, abs=0.02 * length)
    bound = before[LAYER] - length
    assert steered(joy.cap(max=bound, layers=[LAYER]))[LAYER] == pytest.approx(bound, abs=0.02 * length)
