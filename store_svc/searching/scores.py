"""Scores rows against the vector of a search: quickly in float32, and exactly in float64."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from residuum.v1 import store_pb2

COSINE = store_pb2.SEARCH_MEASURE_COSINE
LEAST, ABSOLUTE = store_pb2.SEARCH_ORDER_LEAST, store_pb2.SEARCH_ORDER_ABSOLUTE

_SAFE_SQUARES = (1e-30, 1e30)
"""Squared norms in float32 that neither overflowed nor lost precision."""

_Float = TypeVar("_Float", np.float32, np.float64)


class Scorer:
    """Scores rows. A *rank* is a number that is larger for rows that come first.

    The sums over a row are numpy's own, not those of BLAS. So equal rows have equal scores, wherever they are in a
    block. And BLAS would start threads of its own.
    """

    def __init__(
        self,
        vector: npt.NDArray[np.float32],
        measure: store_pb2.SearchMeasure.ValueType,
        order: store_pb2.SearchOrder.ValueType,
    ) -> None:
        """Score rows against a vector, float32 [width], which is finite and not zero."""
        self._vector = vector.astype(np.float64)
        self._norm = float(np.sqrt((self._vector**2).sum()))
        self._unit = (self._vector / self._norm).astype(np.float32)  # its products overflow later than the vector's
        self._is_cosine = measure == COSINE
        self._order = order
        self.width = len(vector)
        """Elements of the vector."""

    def rough_ranks(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the ranks of rows [rows, width] in float32 [rows], up to a factor that is the same for all rows.

        A rank is NaN if it needs float64, or if the row has no finite score.
        """
        with np.errstate(all="ignore"):
            products = np.einsum("ij,j->i", rows, self._unit)
            if self._is_cosine:
                squares = np.einsum("ij,ij->i", rows, rows)
                low, high = _SAFE_SQUARES
                products /= np.sqrt(np.where((squares > low) & (squares < high), squares, np.nan))
            products[~np.isfinite(products)] = np.nan
        return self.ranks(products)

    def scores(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return the scores of rows [rows, width] in float64 [rows]. Rows without a score have NaN or infinity."""
        exact = rows.astype(np.float64)
        with np.errstate(all="ignore"):
            scores: npt.NDArray[np.float64] = (exact * self._vector).sum(axis=1)
            if self._is_cosine:
                scores /= np.sqrt((exact**2).sum(axis=1)) * self._norm
        return scores

    def ranks(self, scores: npt.NDArray[_Float]) -> npt.NDArray[_Float]:
        """Return the ranks of scores."""
        if self._order == LEAST:
            return -scores
        return np.abs(scores) if self._order == ABSOLUTE else scores
