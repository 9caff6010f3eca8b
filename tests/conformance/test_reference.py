"""The reference of the conformance tests, checked by arithmetic: a layer's input plus additions is its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench.conformance.architectures import ARCHITECTURES, HIDDEN, LAYERS, VOCABULARY
from bench.conformance.models import make_model
from bench.conformance.reference import Reference, adding

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = [int(token) for token in np.random.default_rng(2).integers(3, VOCABULARY, size=70)]
PUSH = np.random.default_rng(3).standard_normal(HIDDEN).astype(np.float32)


def relative(difference: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(difference, axis=-1) / np.linalg.norm(rows, axis=-1)


@pytest.mark.parametrize("name", [name for name, served in ARCHITECTURES.items() if not served.refused_stream])
def test_the_sites_of_a_layer_add_up(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    reference = Reference(architecture, make_model(architecture, tmp_path))
    rows = reference.rows(TOKENS)
    post = rows["resid_post"]
    assert post.shape == (LAYERS, len(TOKENS), HIDDEN)
    np.testing.assert_array_equal(rows["resid_pre"][1:], post[:-1])
    assert relative(np.diff(post, axis=0), post[1:]).min() > 0.05, "the rows of neighbouring layers differ clearly"
    if not architecture.attention:
        assert architecture.refused
        return
    assert relative(rows["resid_pre"] + rows["attn_out"] + rows["mlp_out"] - post, post).max() < 1e-6
    assert (np.linalg.norm(rows["attn_out"], axis=-1) > 0.01).all()
    assert architecture.mlp == () or (np.linalg.norm(rows["mlp_out"], axis=-1) > 0.01).all()


def test_a_push_is_added_after_its_layer_and_reaches_the_next(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama"]
    reference = Reference(architecture, make_model(architecture, tmp_path))
    plain, pushed = reference.rows(TOKENS), reference.rows(TOKENS, {1: adding(PUSH)})
    np.testing.assert_array_equal(pushed["resid_post"][0], plain["resid_post"][0])
    np.testing.assert_allclose(pushed["resid_post"][1], plain["resid_post"][1] + PUSH, rtol=1e-6)
    np.testing.assert_array_equal(pushed["resid_pre"][2], pushed["resid_post"][1])
    np.testing.assert_array_equal(pushed["mlp_out"][1], plain["mlp_out"][1])
    assert relative(pushed["mlp_out"][2] - plain["mlp_out"][2], plain["mlp_out"][2]).min() > 0.01


def test_a_model_is_the_same_each_time(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["gpt2"]
    first, second = (
        Reference(architecture, make_model(architecture, tmp_path / name)).rows(TOKENS[:5])["resid_post"]
        for name in ("first", "second")
    )
    np.testing.assert_array_equal(first, second)
