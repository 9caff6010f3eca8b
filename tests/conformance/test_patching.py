"""The scores of a patch sweep are those of the reference with the same rows put in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import residuum
from tests.conformance.rows import make_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]


@pytest.mark.parametrize("site", ["resid_post", "z"])
def test_a_sweep_has_the_scores_of_the_reference(engine: Engine, reference: Reference, site: str) -> None:
    rng = np.random.default_rng(70)
    clean = make_prompt(rng, 6)
    corrupted = [*clean[:3], *make_prompt(rng, 1), *clean[4:]]
    sweep = engine.client.patch_sweep(
        clean, corrupted, layers=[0, 2, 3], positions=slice(2, 6), site=site, answer=11, other=12, progress=False
    )
    assert (sweep.layers, sweep.positions) == ((0, 2, 3), (2, 3, 4, 5))
    rows = torch.from_numpy(reference.rows(clean)[site].copy())

    def putting(layer: int, position: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[position] = rows[layer, position]
            return x

        return change

    def score(prompt: list[int], changes: dict[tuple[str, int], Callable[[torch.Tensor], torch.Tensor]]) -> float:
        logits = reference.logits(prompt, changes)[-1]
        return float(logits[11] - logits[12])

    assert sweep.clean == pytest.approx(score(clean, {}), abs=1e-4)
    assert sweep.corrupted == pytest.approx(score(corrupted, {}), abs=1e-4)
    expected = [[score(corrupted, {(site, at): putting(at, place)}) for place in range(2, 6)] for at in (0, 2, 3)]
    np.testing.assert_allclose(sweep.scores, expected, atol=1e-4)
    assert np.ptp(sweep.scores) > 0.01
    if site == "resid_post":
        assert sweep.recovered[-1, -1] == pytest.approx(1.0, abs=1e-3), "the last row decides the answer"
        assert sweep.recovered[-1, 0] == pytest.approx(0.0, abs=1e-3), "nothing reads an earlier row of the last layer"


@pytest.mark.parametrize("site", ["resid_post", "z"])
def test_a_stored_row_steers_as_the_vector_with_its_values(engine: Engine, reference: Reference, site: str) -> None:
    rng = np.random.default_rng(71)
    clean, corrupted = make_prompt(rng, 6), make_prompt(rng, 6)
    name = f"stored-row-{engine.name}-{site}"
    points = residuum.Capture(points=[f"{site}.1", f"{site}.3"])
    engine.client.generate(clean, max_tokens=1, request_id=name, capture=points)
    values = engine.client.activations(name, layers=[1], sites=[site])[1][4]
    np.testing.assert_allclose(values, reference.rows(clean)[site][1, 4], rtol=1e-3, atol=1e-4)
    capture = residuum.Capture(points=[f"{site}.1", "resid_post.3"])
    rows = []
    for row in (residuum.StoredRow(name, layer=1, position=4, site=site), residuum.Vector(values)):
        steer = [
            residuum.Set(row, layer=1, positions=[2], site=site),
            residuum.Add(row, layer=1, positions=[3], site=site, scale=0.5, keep_norm=True),
        ]
        reply = engine.client.generate(corrupted, max_tokens=1, steer=steer, capture=capture)
        rows.append(engine.client.activations(reply))
    stored, given = rows
    np.testing.assert_allclose(stored.at(f"{site}.1")[2], values, rtol=1e-5, atol=1e-5)  # the change is rounded
    for point in (f"{site}.1", "resid_post.3"):  # float32 rounds otherwise in another batch
        np.testing.assert_allclose(stored.at(point), given.at(point), rtol=1e-4, atol=1e-4)
    engine.client.delete(name)
