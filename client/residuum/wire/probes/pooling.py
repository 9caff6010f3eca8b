"""The pooling of attention probes over positions. probe.proto defines it (`AttentionPooling`)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from residuum.v1 import probe_pb2

    FloatArray = npt.NDArray[np.float32]
    Exact = npt.NDArray[np.float64]

_STEP = 256.0
"""Weights are relative to exp(reference), where the reference is the largest multiple of this up to the largest logit.
So a weight is at most exp(256), and the largest one at least 1: no sum overflows or vanishes. A reference that depended
on where parts of the rows begin would make the last bits of a score depend on it."""


class AttentionPool:
    """Pools the outputs of consecutive rows, which may arrive in parts. The arithmetic is float64.

    The state of each head is a running softmax: the largest logit, the sum of the weights, and the weighted sum of the
    values. (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax".)
    """

    def __init__(self, probe: probe_pb2.Probe) -> None:
        """Begin before the sequence's first position.

        Args:
            probe: A valid probe with attention; see `problem_of_attention`.
        """
        heads = probe.attention.heads
        self._heads = heads
        self._slopes: Exact = np.array(probe.attention.position_weights or np.zeros(heads), dtype=np.float64)
        self._position = 0
        self._largest: Exact = np.full(heads, -np.inf)
        self._reference: Exact = np.full(heads, -np.inf)
        self._weights: Exact = np.zeros(heads)
        self._values: Exact = np.zeros((heads, len(probe.outputs) // heads - 1))

    def add(self, outputs: FloatArray) -> FloatArray:
        """Return the pooled outputs at the next positions, float32 [rows, pooled outputs].

        Args:
            outputs: The outputs of these positions' rows, float32 [rows, heads * (1 + pooled outputs)].
        """
        exact = outputs.astype(np.float64)
        positions = np.arange(self._position, self._position + len(exact), dtype=np.float64)
        self._position += len(exact)
        pooled: Exact = np.full((len(exact), self._values.shape[1]), np.nan)
        finite = np.isfinite(exact).all(axis=1)
        if finite.any():
            rows = exact[finite]
            logits = rows[:, : self._heads] + positions[finite, None] * self._slopes
            pooled[finite] = self._pooled(logits, rows[:, self._heads :].reshape(len(rows), *self._values.shape))
        with np.errstate(over="ignore"):
            return pooled.astype(np.float32)

    def _pooled(self, logits: Exact, values: Exact) -> Exact:
        """Return the pooled outputs, given the logits [rows, heads] and the values [rows, heads, pooled outputs]."""
        largest = np.maximum.accumulate(np.concatenate([self._largest[None], logits]))[1:]
        self._largest = largest[-1]
        references = np.floor(largest / _STEP) * _STEP
        pooled = np.empty((len(logits), values.shape[2]))
        for part in _runs_of_equal(references):
            reference = references[part.start]
            scale = np.exp(self._reference - reference)
            weights = np.exp(logits[part] - reference)
            self._reference = reference
            sums = _running(self._weights * scale, weights)
            totals = _running(self._values * scale[:, None], weights[..., None] * values[part])
            self._weights, self._values = sums[-1], totals[-1]
            pooled[part] = (totals / sums[..., None]).sum(axis=1)
        return pooled


def _running(before: Exact, items: Exact) -> Exact:
    """Return the running sums of items, which continue a sum."""
    found: Exact = np.add.accumulate(np.concatenate([before[None], items]))[1:]
    return found


def _runs_of_equal(rows: Exact) -> Iterator[slice]:
    """Yield the longest runs of consecutive equal rows."""
    changes = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
    bounds = [0, *changes.tolist(), len(rows)]
    for first, last in pairwise(bounds):
        yield slice(first, last)
