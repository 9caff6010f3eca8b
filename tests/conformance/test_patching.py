"""The scores of a patch sweep are those of the reference with the same rows put in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

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
