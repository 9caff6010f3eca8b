"""Random projections follow the contract's rule, and preserve norms and inner products as it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residuum.wire.rows.projection import projection_factor, projection_matrix, projection_signs

FILE = Path(__file__).parents[3] / "protos" / "residuum" / "v1" / "projection_signs.json"
VECTORS = json.loads(FILE.read_text())
MODULUS = 1 << 64


def splitmix64(seed: int, count: int) -> list[int]:
    """The rule of capture.proto, in Python's integers."""
    numbers = []
    for n in range(1, count + 1):
        z = (seed + n * 0x9E3779B97F4A7C15) % MODULUS
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
        numbers.append(z ^ (z >> 31))
    return numbers


def signs_in_words(seed: int, width: int, dimensions: int) -> list[list[int]]:
    """The rule of capture.proto, entry by entry."""
    groups = [splitmix64(group, width) for group in splitmix64(seed, -(-dimensions // 64))]
    return [[-1 if groups[j // 64][i] >> (j % 64) & 1 else 1 for j in range(dimensions)] for i in range(width)]


def test_the_generator_is_splitmix64():
    first = [int(number) for number in VECTORS["splitmix64"]["first"]]
    assert first[0] == 6457827717110365317  # published with the generator, for this seed
    assert splitmix64(int(VECTORS["splitmix64"]["seed"]), len(first)) == first


@pytest.mark.parametrize("case", VECTORS["projections"], ids=lambda case: case["name"])
def test_vectors_of_the_contract(case):
    signs = projection_signs(int(case["seed"]), case["width"], case["dimensions"])
    assert signs.dtype == np.int8
    assert ["".join("+" if sign > 0 else "-" for sign in row) for row in signs] == case["signs"]


@given(st.integers(0, MODULUS - 1), st.integers(1, 9), st.integers(1, 200))
def test_the_rule_in_words(seed, width, dimensions):
    assert projection_signs(seed, width, dimensions).tolist() == signs_in_words(seed, width, dimensions)


def test_a_smaller_projection_is_a_corner_of_a_larger_one():
    np.testing.assert_array_equal(projection_signs(7, 20, 65), projection_signs(7, 50, 300)[:20, :65])


def test_the_matrix_is_the_signs_by_the_factor():
    assert projection_factor(512) == np.float32(1 / math.sqrt(512))
    matrix = projection_matrix(3, 10, 512)
    assert matrix.dtype == np.float32
    np.testing.assert_array_equal(matrix, projection_signs(3, 10, 512) / np.float32(math.sqrt(512)))


@pytest.mark.parametrize("seed", [0, 1, MODULUS - 1])
def test_signs_are_as_independent_as_coins(seed):
    """All 20000 means of rows, columns and products of adjacent entries lie within six standard deviations of 0."""
    signs = projection_signs(seed, 1024, 512).astype(np.float64)
    for products in (
        signs,
        signs[1:] * signs[:-1],
        signs[:, 1:] * signs[:, :-1],
        signs[:, 64:] * signs[:, :-64],
        signs * projection_signs(seed ^ 1, 1024, 512),
    ):
        for means in (products.mean(axis=0), products.mean(axis=1), products.mean(keepdims=True)):
            assert np.abs(means).max() * math.sqrt(products.size / means.size) < 6


@pytest.mark.parametrize("dimensions", [64, 512])
def test_norms_and_inner_products_are_kept_as_the_contract_says(dimensions):
    """Johnson and Lindenstrauss: unbiased, with the variances of capture.proto, and tails below its bound."""
    width, trials = 576, 2000
    rng = np.random.default_rng(5)
    one, other = rng.standard_normal((2, width)) * np.exp(rng.standard_normal((2, width)))
    other = 0.6 * one / np.linalg.norm(one) + 0.8 * other / np.linalg.norm(other)
    pair = np.stack([one / np.linalg.norm(one), other / np.linalg.norm(other)])
    projected = np.stack([pair @ projection_matrix(seed, width, dimensions) for seed in range(trials)])
    squares = (projected**2).sum(axis=2)
    products = (projected[:, 0] * projected[:, 1]).sum(axis=1)
    cosine = float(pair[0] @ pair[1])

    limits = 2 / dimensions, (1 + cosine**2) / dimensions
    for values, mean, limit in [
        (squares[:, 0], 1, limits[0]),
        (squares[:, 1], 1, limits[0]),
        (products, cosine, limits[1]),
    ]:
        assert abs(values.mean() - mean) < 5 * math.sqrt(limit / trials)
        assert values.var() < limit * 1.2  # the variance of 2000 trials has a standard error of 3 %
    for part in (0.1, 0.3, 0.5):
        bound = 2 * math.exp(-dimensions * (part**2 / 4 - part**3 / 6))
        share = (np.abs(squares - 1) > part).mean()
        assert share <= bound + 5 * math.sqrt(bound / squares.size)
