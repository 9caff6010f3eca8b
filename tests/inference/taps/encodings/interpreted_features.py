"""Runs the GPU's kernel for the strongest features on the CPU, in Triton's interpreter, and fails if it is wrong.

It is a separate program, because Triton decides on import whether it interprets kernels.
"""

from __future__ import annotations

import tests.triton_interpreter  # noqa: F401

# isort: split

from collections.abc import Iterator
from itertools import product
from unittest import mock

import torch
from torch import Tensor

from inference_svc.taps.gpu.kernels import features

SIZES = (
    {"_CHUNK": 4096, "_FEW": 1024, "_RANKED": 256, "_COMPARED": 32},
    {"_CHUNK": 32, "_FEW": 1024, "_RANKED": 16, "_COMPARED": 8},  # several chunks
    {"_CHUNK": 32, "_FEW": 16, "_RANKED": 16, "_COMPARED": 8},  # and more candidates than are few
)
COUNTS = ((1, 1), (6, 6), (20, 20), (20, 7))
"""How many features are kept, and how many may be above 0."""
GUARD = -99


def main() -> None:
    """Check every kind of outputs with every size."""
    for sizes in SIZES:
        with mock.patch.multiple(features, **sizes):
            for num_features, (count, wanted), has_threshold in product((20, 32, 333), COUNTS, (False, True)):
                for outputs, biases in kinds(num_features):
                    # Whole numbers, so that some outputs equal them.
                    threshold = torch.randint(-2, 3, (num_features,)).float() if has_threshold else None
                    check(outputs, biases, threshold, count, wanted)
    with mock.patch.multiple(features, **SIZES[1]):
        assert features.candidate_numbers(32_000, 6) == 2 * (1000 * 5 + 6)


def kinds(num_features: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs of three rows, and biases."""
    torch.manual_seed(num_features)
    yield torch.randn(3, num_features), torch.randn(num_features)
    yield torch.randint(-2, 3, (3, num_features)).float(), torch.zeros(num_features)
    special = torch.randn(3, num_features)
    special[0, 3], special[0, 4] = torch.nan, -torch.nan
    special[1, 5], special[1, 6] = torch.inf, -torch.inf
    special[2] = -5
    yield special, torch.zeros(num_features)
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as GPUs of NVIDIA return it
    many = torch.rand(3, num_features) + 1
    many[0] = nan
    many[1, torch.arange(num_features) % 32 < 3] = nan
    many[2, 1::2] = -nan
    yield many, torch.zeros(num_features)
    same_lanes = torch.rand(3, num_features) * (torch.arange(num_features) % 32 < 5)
    same_lanes[1].clamp_(0, 0.5)
    yield same_lanes, torch.zeros(num_features)


def check(outputs: Tensor, biases: Tensor, threshold: Tensor | None, count: int, wanted: int) -> None:
    """Compare the kept features with torch's."""
    rows, num_features = outputs.shape
    y = outputs + biases
    if threshold is not None:
        y = y.masked_fill(y <= threshold, 0.0)
    strongest = torch.zeros(rows, count)
    found = y.topk(min(wanted, num_features), dim=1).values.relu()
    strongest[:, : found.shape[1]] = found
    out = torch.full((rows, 2, count), GUARD, dtype=torch.int32)
    each = features.candidate_numbers(num_features, wanted)
    size = rows * each
    candidates = torch.full((size + 8,), GUARD, dtype=torch.int32)
    features.keep_strongest(outputs.clone(), biases, threshold, candidates, out, wanted)
    assert (candidates[size:] == GUARD).all(), "more candidates than there may be"
    numbers, values = out[:, 0].long(), out[:, 1].clone().view(torch.float32)
    assert torch.equal(comparable(values), comparable(strongest))
    own = torch.cat([y, torch.zeros(rows, 1)], dim=1).gather(1, numbers)
    assert torch.equal(comparable(own), comparable(values)), "a value of another feature"
    assert torch.equal(numbers == num_features, values == 0)
    for row in numbers:
        kept = row[row < num_features].tolist()
        assert len(kept) == len(set(kept)), "a feature is kept twice"
    for own_keys, pairs in zip(keys_of(y).tolist(), candidates[:size].view(rows, each // 2, 2).tolist(), strict=True):
        written = [pair for pair in pairs if pair != [GUARD, GUARD]]
        assert all(own_keys[number] == key for key, number in written), "a candidate of another row"


def keys_of(values: Tensor) -> Tensor:
    """Return the bits of values, 0 for those that are not above 0, and the same for every NaN."""
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32).clamp(min=0)).int()


def comparable(values: Tensor) -> Tensor:
    """Return values with a number in place of NaN."""
    return values.nan_to_num(nan=1e38, posinf=1e37)


if __name__ == "__main__":
    main()
