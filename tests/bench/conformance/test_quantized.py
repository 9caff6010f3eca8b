"""The weights that a checkpoint's format describes are close to those that were quantised."""

from __future__ import annotations

import pytest
import torch

from bench.conformance.quantized import QUANTIZATIONS

WEIGHT = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
"""[out, in]."""


def nibbles(words, order=range(8)):
    """Return the 4-bit values of int32s, the last dimension unpacked."""
    return torch.stack([(words >> (4 * order.index(place))) & 15 for place in range(8)], -1).flatten(-2)


def gptq(packed):
    values = nibbles(packed["qweight"].T).T
    zeros = nibbles(packed["qzeros"]) + 1
    group = packed["g_idx"].long()
    return ((values - zeros[group]) * packed["scales"].float()[group]).T


def awq(packed):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    group = torch.arange(128) // 64
    values, zeros = nibbles(packed["qweight"], order), nibbles(packed["qzeros"], order)
    return ((values - zeros[group]) * packed["scales"].float()[group]).T


def scaled(packed):
    return packed["weight"].float() * packed["weight_scale"]


@pytest.mark.parametrize(
    ("name", "dequantize", "error"),
    [("gptq", gptq, 0.2), ("awq", awq, 0.2), ("int8", scaled, 0.02), ("fp8-static", scaled, 0.05)],
)
def test_packed_weights_are_close_to_the_weights(name, dequantize, error):
    got = dequantize(QUANTIZATIONS[name].pack(WEIGHT))
    assert got.shape == WEIGHT.shape
    assert 0 < torch.linalg.norm(got - WEIGHT) / torch.linalg.norm(WEIGHT) < error
