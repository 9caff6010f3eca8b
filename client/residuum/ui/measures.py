"""Measures of rows: one number for each row, and the grid of these numbers over layers and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector
from residuum.ui.answers import invalid, number
from residuum.values.probes.probe import Probe
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector

FloatArray = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


class Measure(Protocol):
    """What is computed from each row.

    Attributes:
        quantiles: The shares of values below the lowest and the highest colour.
    """

    quantiles: tuple[float, float]

    def values(self, layer: int, rows: npt.NDArray[Any]) -> FloatArray:
        """Return one number for each row of a layer; NaN at layers that the measure cannot read.

        Args:
            layer: The layer.
            rows: [positions, width].

        Raises:
            BadVector: The rows have another width than the measure reads.
        """


_MIDDLE = (0.02, 0.98)
"""The whole range would show only the outliers."""


class Norm:
    """The Euclidean norm of a row."""

    quantiles = _MIDDLE

    def values(self, layer: int, rows: npt.NDArray[Any]) -> FloatArray:
        """Return the norms."""
        del layer
        # In float64: a norm of the first token's row can be a thousand times that of the others.
        return _norms(np.asarray(rows, dtype=np.float64)).astype(np.float32)


class Projection:
    """The dot product with the unit vector of a direction, or the cosine of the angle between them."""

    quantiles = _MIDDLE

    def __init__(self, vectors: Mapping[int, Vector], *, is_cosine: bool = False) -> None:
        """Project onto the vector of each layer.

        Raises:
            BadVector: A vector is zero.
        """
        self._is_cosine = is_cosine
        self._units: dict[int, Float64Array] = {}
        for layer, vector in vectors.items():
            if not vector.norm:
                raise BadVector(f"The direction of layer {layer} is zero, so nothing projects onto it.")
            self._units[layer] = vector.values.astype(np.float64) / vector.norm

    def values(self, layer: int, rows: npt.NDArray[Any]) -> FloatArray:
        """Return the projections or cosines; see `Measure`."""
        wide = np.asarray(rows, dtype=np.float64)
        unit = self._units.get(layer)
        if unit is None:
            return _nothing(len(wide))
        _check_width(wide, len(unit), "direction")
        projection = wide @ unit
        if not self._is_cosine:
            return projection.astype(np.float32)
        norms = _norms(wide)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(norms > 0, projection / norms, np.nan).astype(np.float32)


class ProbeScore:
    """One output of a probe, without smoothing."""

    quantiles = _MIDDLE

    def __init__(self, probe: Probe, output: int, *, at_all_layers: bool = False) -> None:
        """Score the rows of the probe's layer, or of all layers.

        Raises:
            InvalidRequest: The probe has no such output.
        """
        if output >= probe.num_outputs:
            raise invalid(f"The probe has no output {output}. Choose among 0 to {probe.num_outputs - 1}.")
        self._probe = probe
        self._output = output
        self._at_all_layers = at_all_layers

    def values(self, layer: int, rows: npt.NDArray[Any]) -> FloatArray:
        """Return the scores; see `Measure`."""
        if not self._at_all_layers and layer != self._probe.layer:
            return _nothing(len(rows))
        _check_width(rows, self._probe.width, "probe")
        scores: FloatArray = self._probe.score(rows).reshape(len(rows), -1)[:, self._output]
        return scores


class Feature:
    """A feature of a sparse autoencoder: in rows that consist of features, or computed from rows of one layer."""

    quantiles = (0.0, 1.0)  # most features are 0 nearly everywhere

    def __init__(self, feature: int, sae: SAE | None = None, layer: int | None = None) -> None:
        """Read a feature of the rows of all layers; with `sae`, compute it from the rows of one layer.

        Raises:
            BadSAE: There is no such feature.
        """
        self._feature = feature
        self._layer = layer
        self._sae = sae
        if sae is not None:
            sae.check_feature(feature)
            self._sae = sae if sae.activation == "topk" else _only(sae, feature)
            self._feature = feature if sae.activation == "topk" else 0

    def values(self, layer: int, rows: npt.NDArray[Any]) -> FloatArray:
        """Return the feature; see `Measure`."""
        if self._sae is None:
            return np.asarray(rows[:, self._feature], dtype=np.float32)
        if layer != self._layer:
            return _nothing(len(rows))
        _check_width(rows, self._sae.width, "sparse autoencoder")
        return np.asarray(self._sae.encode(rows)[:, self._feature], dtype=np.float32)


def _only(sae: SAE, feature: int) -> SAE:
    """Return an autoencoder with one feature. Only with "topk" does a feature depend on the others."""
    one = slice(feature, feature + 1)
    return SAE(
        sae.encoder[one], sae.decoder[one], encoder_bias=sae.encoder_bias[one], decoder_bias=sae.decoder_bias,
        activation="relu" if sae.threshold is None else "jumprelu",
        threshold=None if sae.threshold is None else sae.threshold[one], layer_norm=sae.layer_norm,
    )  # fmt: skip


def _check_width(rows: npt.NDArray[Any], width: int, what: str) -> None:
    if rows.shape[1] != width:
        raise BadVector(
            f"The rows have {rows.shape[1]} elements, but the {what} has {width}. Choose another {what} or site."
        )


def _nothing(count: int) -> FloatArray:
    return np.full(count, np.nan, np.float32)


def _norms(rows: Float64Array) -> Float64Array:
    norms: Float64Array = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return norms


class Grid:
    """The values of a measure at each layer and position: float32 [layers, positions], NaN where there is no row."""

    def __init__(
        self, layers: tuple[int, ...], positions: int, quantiles: tuple[float, float] = Norm.quantiles
    ) -> None:
        self.layers = layers
        self._quantiles = quantiles
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
        """Return the range of a layer's values that the colours span: [low, high] for each layer.

        The first position is left out if there are others: many models attend to it when there is nothing else to
        attend to, and its norm is a hundred times that of the others.
        """
        found: list[list[float | None]] = []
        for row in self.values:
            there = row[1:][np.isfinite(row[1:])]
            there = there if len(there) else row[np.isfinite(row)]
            found.append([float(edge) for edge in np.quantile(there, self._quantiles)] if len(there) else [None, None])
        return found

    def window(self, first: int, last: int, bins: int) -> FloatArray:
        """Return the values from one position to another in at most `bins` columns, float32 [layers, columns].

        A column that stands for several positions has the value that is largest by absolute value.

        Args:
            first: The first position.
            last: The last position, inclusive. Columns past the end have no values.
            bins: The most columns.
        """
        part = self.values[:, first : last + 1]
        part = np.pad(part, ((0, 0), (0, last + 1 - first - part.shape[1])), constant_values=np.nan)
        count = part.shape[1]
        if count <= bins:
            return part
        edges = np.arange(bins) * count // bins
        high = np.fmax.reduceat(part, edges, axis=1)
        low = np.fmin.reduceat(part, edges, axis=1)
        extreme: FloatArray = np.where(high >= -low, high, low)
        return extreme


def statistics(row: npt.NDArray[Any]) -> dict[str, Any]:
    """Return facts about one row: its norm, the distribution of its elements, and the largest of them.

    The numbers are those of the finite elements; `not_finite` counts the others.
    """
    wide = np.asarray(row, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(wide))
    kept = wide[finite] if len(finite) else np.full(1, np.nan)
    largest = finite[np.argsort(-np.abs(wide[finite]), kind="stable")[:8]]
    return {
        "width": len(wide),
        "not_finite": len(wide) - len(finite),
        "norm": number(float(np.linalg.norm(kept))),
        "mean": number(kept.mean()),
        "std": number(kept.std()),
        "min": number(kept.min()),
        "max": number(kept.max()),
        "largest": [[int(index), float(wide[index])] for index in largest],
    }
