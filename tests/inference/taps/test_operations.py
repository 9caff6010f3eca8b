"""The arithmetic of steering, against float64 and the formulas of steering.proto."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inference_svc.taps.bank import VectorBank
from inference_svc.taps.operations import OperationBatch, apply_batch
from inference_svc.taps.plan import STEERING_KINDS, Kind, Operation
from tests.inference.taps_support import CPU, select, steer

HIDDEN = 16
numbers = st.floats(-100, 100, width=32)


@st.composite
def batches(draw):
    """Rows with one operation and one vector each. There are few vectors, so some rows share one."""
    rows = draw(st.integers(1, 64))
    x = draw(arrays.arrays(np.float32, (rows, HIDDEN), elements=numbers, fill=numbers))
    vectors = draw(arrays.arrays(np.float32, (8, HIDDEN), elements=st.floats(-10, 10, width=32).filter(is_no_dust)))
    operations = draw(st.lists(operation(vectors), min_size=rows, max_size=rows))
    return x, vectors, operations


def is_no_dust(value):
    """The direction of a vector whose squares underflow in float32 has no defined precision."""
    return not 0 < abs(value) < 1e-3


@st.composite
def operation(draw, vectors):
    row = draw(st.integers(0, len(vectors) - 1))
    kind = draw(st.sampled_from(STEERING_KINDS)) if vectors[row].any() else Kind.ADD
    low, high = sorted(draw(st.tuples(numbers, numbers)))
    low, high = draw(st.sampled_from([(low, high), (-math.inf, high), (low, math.inf)]))
    return Operation(kind, row, (0,), select(), draw(numbers), low, high, draw(st.booleans()))


def run(x, vectors, operations):
    bank = VectorBank(len(vectors), HIDDEN, CPU)
    bank.load((row, vector.tobytes()) for row, vector in enumerate(vectors))
    batch = OperationBatch(
        rows=torch.arange(len(x)),
        vectors=torch.tensor([operation.row for operation in operations]),
        kinds=torch.tensor([int(operation.kind) for operation in operations]),
        scales=torch.tensor([operation.scale for operation in operations]),
        lows=torch.tensor([operation.low for operation in operations]),
        highs=torch.tensor([operation.high for operation in operations]),
        keeps_norm=torch.tensor([operation.keep_norm for operation in operations]),
    )
    return apply_batch(torch.from_numpy(x), bank.vectors[batch.vectors], bank.inverse_norms[batch.vectors], batch)


@settings(deadline=None)
@given(batches())
def test_each_row_gets_its_own_operation(case):
    x, vectors, operations = case
    result = run(x, vectors, operations).numpy()
    for row, operation in enumerate(operations):
        vector = vectors[operation.row].astype(np.float64)
        expected = steer(x[row].astype(np.float64), operation, vectors)
        # The precision of float32: seven digits of the largest number involved.
        size = np.abs(x[row]).sum() + max(abs(operation.scale), 1) * (np.abs(vector).max() + np.abs(x[row]).sum())
        size += max((abs(bound) for bound in (operation.low, operation.high) if math.isfinite(bound)), default=0)
        if operation.kind == Kind.MULTIPLY:
            size += np.abs(vector).max() * np.abs(x[row]).max()
        if operation.keep_norm:
            # If little is left of the row, rescaling also scales up its error.
            left = np.linalg.norm(steer(x[row].astype(np.float64), replace(operation, keep_norm=False), vectors))
            size *= max(np.linalg.norm(x[row]) / left, 1) if left > 1e-3 * size else np.inf
        np.testing.assert_allclose(result[row], expected, rtol=1e-5, atol=2e-6 * size)


@pytest.mark.parametrize("kind", STEERING_KINDS)
def test_rows_keep_their_norm(kind):
    x = np.random.default_rng(0).standard_normal((4, HIDDEN)).astype(np.float32)
    vector = np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float32)
    operation = Operation(kind, 0, (0,), select(), 1.5, 3.0, 3.0, keep_norm=True)
    plain = run(x, vector, [replace(operation, keep_norm=False)] * 4).numpy()
    kept = run(x, vector, [operation] * 4).numpy()
    np.testing.assert_allclose(np.linalg.norm(kept, axis=1), np.linalg.norm(x, axis=1), rtol=1e-6)
    cosines = (kept * plain).sum(1) / np.linalg.norm(kept, axis=1) / np.linalg.norm(plain, axis=1)
    np.testing.assert_allclose(cosines, 1, atol=1e-6)
    assert np.abs(np.linalg.norm(plain, axis=1) - np.linalg.norm(x, axis=1)).max() > 0.01


def test_a_row_that_becomes_zero_stays_zero():
    vector = np.eye(1, HIDDEN, dtype=np.float32)
    result = run(vector * 3, vector, [Operation(Kind.ABLATE, 0, (0,), select(), keep_norm=True)])
    assert not result.any()


def test_the_zero_vector_can_be_added():
    x = np.ones((1, HIDDEN), np.float32)
    result = run(x, np.zeros((1, HIDDEN), np.float32), [Operation(Kind.ADD, 0, (0,), select(), 5.0)])
    assert torch.equal(result, torch.ones(1, HIDDEN))


@pytest.mark.parametrize("kind", [Kind.ADD, Kind.ABLATE])
def test_scale_zero_moves_nothing(kind):
    x = np.random.default_rng(0).standard_normal((4, HIDDEN)).astype(np.float32)
    vector = np.full((1, HIDDEN), 3.0, np.float32)
    result = run(x, vector, [Operation(kind, 0, (0,), select(), 0.0)] * 4)
    assert torch.equal(result, torch.from_numpy(x))


def test_ablation_leaves_nothing_along_the_direction():
    x = np.random.default_rng(0).standard_normal((4, HIDDEN)).astype(np.float32)
    vector = np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float32) * 100
    result = run(x, vector, [Operation(Kind.ABLATE, 0, (0,), select())] * 4)
    np.testing.assert_allclose(result.numpy() @ vector[0], 0, atol=1e-3)


def test_a_new_vector_in_a_row_brings_its_own_norm():
    bank = VectorBank(2, 2, CPU)
    bank.load([(1, np.array([3, 4], "<f4").tobytes())])
    assert bank.inverse_norms.tolist() == pytest.approx([0, 1 / 5])
    bank.load([(1, np.array([0, 0], "<f4").tobytes())])
    assert bank.inverse_norms.tolist() == [0, 0]
    assert bank.vectors.tolist() == [[0, 0], [0, 0]]
