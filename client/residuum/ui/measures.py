"""Measures of rows: one number for each row, and the grid of these numbers over layers and positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector
from residuum.ui.answers import invalid
from residuum.values.vector import Vector

MEASURES = ("norm", "projection", "cosine")

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Measure:
    """What is computed from each row.

    Attributes:
        name: "norm": the row's Euclidean norm. "projection": its dot product with the unit vector of a direction.
            "cosine": the cosine of the angle between them.
        units: For projection and cosine: the unit vector of each layer, float64 [hidden].
    """

    name: str
    units: Mapping[int, npt.NDArray[np.float64]] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, name: str, vectors: Mapping[int, Vector] | None = None) -> Measure:
        """Return a measure by its name, with the direction that it needs.

        Raises:
            InvalidRequest: There is no such measure, or it needs a direction.
            BadVector: A vector is zero.
        """
        if name not in MEASURES:
            raise invalid(f"There is no measure {name!r}. Choose among {', '.join(MEASURES)}.")
        if name == "norm":
            return cls(name)
        if not vectors:
            raise invalid(f"The measure {name!r} needs a direction. Choose one.")
        units = {}
        for layer, vector in vectors.items():
            if not vector.norm:
                raise BadVector(f"The direction of layer {layer} is zero, so nothing projects onto it.")
            units[layer] = vector.values.astype(np.float64) / vector.norm
        return cls(name, units)

    def values(self, layer: int, rows: npt.NDArray[Any]) -> FloatArray:
        """Return one number for each row of a layer; NaN where the direction has no vector for the layer.

        Args:
            layer: The layer.
            rows: [positions, width].

        Raises:
            BadVector: The rows have another width than the direction.
        """
        # In float64: a norm of the first token's row can be a thousand times that of the others.
        wide = np.asarray(rows, dtype=np.float64)
        if self.name == "norm":
            return _norms(wide).astype(np.float32)
        unit = self.units.get(layer)
        if unit is None:
            return np.full(len(wide), np.nan, np.float32)
        if wide.shape[1] != len(unit):
            raise BadVector(
                f"The rows have {wide.shape[1]} elements, but the direction has {len(unit)}. Choose another direction "
                "or site."
            )
        projection = wide @ unit
        if self.name == "projection":
            return projection.astype(np.float32)
        norms = _norms(wide)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(norms > 0, projection / norms, np.nan).astype(np.float32)


def _norms(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    norms: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return norms


class Grid:
    """The values of a measure at each layer and position: float32 [layers, positions], NaN where there is no row."""

    def __init__(self, layers: tuple[int, ...], positions: int) -> None:
        self.layers = layers
        self.values: FloatArray = np.full((len(layers), positions), np.nan, np.float32)
        self._row = {layer: index for index, layer in enumerate(layers)}

    def put(self, layer: int, positions: npt.NDArray[np.int64], values: FloatArray) -> None:
        """Store values. Those of positions past the end are dropped: the model may run a step too far."""
        inside = positions < self.values.shape[1]
        self.values[self._row[layer], positions[inside]] = values[inside]

    def row(self, layer: int) -> FloatArray:
        """Return the values of a layer, [positions].

        Raises:
            InvalidRequest: The grid does not have the layer.
        """
        if layer not in self._row:
            raise invalid(f"Layer {layer} was not captured. Choose among {list(self.layers)}.")
        row: FloatArray = self.values[self._row[layer]]
        return row

    def ranges(self) -> list[list[float | None]]:
        """Return the values below which 2% and 98% of a layer's values are: [low, high] for each layer.

        Colours span this range, because the whole range would show only the outliers. The first position is left out if
        there are others: many models attend to it when there is nothing else to attend to, and its norm is a hundred
        times that of the others.
        """
        found: list[list[float | None]] = []
        for row in self.values:
            there = row[1:][np.isfinite(row[1:])]
            there = there if len(there) else row[np.isfinite(row)]
            found.append([float(edge) for edge in np.quantile(there, (0.02, 0.98))] if len(there) else [None, None])
        return found

    def window(self, first: int, last: int, bins: int) -> FloatArray:
        """Return the values from one position to another in at most `bins` columns, float32 [layers, columns].

        A column that stands for several positions has the value that is largest by absolute value.

        Args:
            first: The first position.
            last: The last position, inclusive.
            bins: The most columns.
        """
        part = self.values[:, first : last + 1]
        count = part.shape[1]
        if count <= bins:
            return part
        edges = np.arange(bins) * count // bins
        high = np.fmax.reduceat(part, edges, axis=1)
        low = np.fmin.reduceat(part, edges, axis=1)
        extreme: FloatArray = np.where(high >= -low, high, low)
        return extreme


def statistics(row: npt.NDArray[Any]) -> dict[str, Any]:
    """Return facts about one row: its norm, the distribution of its elements, and the largest of them."""
    wide = np.asarray(row, dtype=np.float64)
    largest = np.argsort(-np.abs(wide), kind="stable")[:8]
    return {
        "width": len(wide),
        "norm": float(np.linalg.norm(wide)),
        "mean": float(wide.mean()),
        "std": float(wide.std()),
        "min": float(wide.min()),
        "max": float(wide.max()),
        "largest": [[int(index), float(wide[index])] for index in largest],
    }
