"""Directions: one vector for each layer, with their origin."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest, UnknownLayer, UnknownSite
from residuum.values.captures.activations import Activations
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike, layer_list, selects_all
from residuum.values.selections.points import SITES
from residuum.values.steering.operations import Ablate, Add, Cap, Replace
from residuum.values.tensors.numbers import without_torch
from residuum.values.tensors.vector import Vector

Float64Array = npt.NDArray[np.float64]

_NOT_STEERED = frozenset(
    {"attn_in", "mlp_in", "q", "k", "v", "q_pre", "k_pre", "router_logits", "routing_weights", "final_norm"}
)
"""Sites at which rows can only be read."""


@dataclass(frozen=True)
class Origin:
    """How directions were made. Only `site` affects steering; unknown facts are empty or 0."""

    method: str = ""
    """The method: "difference_of_means", "pca_center", "pca_diff", or "control_vector" for GGUF files."""
    model: str = ""
    """The captured model; for a GGUF file, its `model_hint`, which names an architecture such as "llama"."""
    site: str = "resid_post"
    """The site of the examples' rows."""
    positions: str = ""
    """The positions of the examples' rows, such as "last_prompt"."""
    positive_examples: int = 0
    """Number of positive examples."""
    negative_examples: int = 0
    """Number of negative examples."""
    steered: bool = False
    """Whether the captured requests were steered."""


class Directions(Mapping[int, Vector]):
    """An immutable map from layer to direction. All its vectors have the model's hidden size.

    Args:
        vectors: Layer -> a Vector, or anything that `Vector.from_array` takes, [hidden].
        origin: How the directions were made.

    Raises:
        InvalidRequest: There are no vectors.
        BadVector: A vector cannot be used, or their lengths differ; the message names the layer.
        UnknownLayer: A layer is below 0.
        UnknownSite: The origin's site does not exist.

    Example:
        >>> joy
        Directions(30 layers × 576, difference_of_means of 8 + 8 examples, resid_post of 'SmolLM2-135M-Instruct')
        >>> joy[12]
        Vector(576 elements, norm 3.21, digest 5c0ffee0…)
        >>> client.put_vectors(joy)  # optional: sends them now instead of with the first request that uses them
    """

    def __init__(self, vectors: Mapping[int, Vector | npt.ArrayLike], *, origin: Origin | None = None) -> None:
        if not vectors:
            raise InvalidRequest("Directions need at least one layer, but none is given.", reason="INVALID_FIELD")
        self._origin = origin or Origin()
        if self._origin.site not in SITES:
            raise UnknownSite(f"{self._origin.site!r} is not a site; choose among {', '.join(SITES)}.")
        self._vectors = {layer: _vector(layer, vectors[layer]) for layer in layer_list(vectors)}
        first, *others = self._vectors.items()
        for layer, vector in others:
            if len(vector) != len(first[1]):
                raise BadVector(
                    f"The direction of layer {layer} has {len(vector)} elements, but that of layer {first[0]} has "
                    f"{len(first[1])}. All must be equally long.",
                    reason="WRONG_LENGTH",
                )

    @property
    def origin(self) -> Origin:
        """How the directions were made."""
        return self._origin

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        return tuple(self._vectors)

    @property
    def hidden_size(self) -> int:
        """Number of elements of each vector."""
        return len(next(iter(self._vectors.values())))

    def normalized(self) -> Directions:
        """Return the same directions scaled to length 1, so that `scale` is a length in units of the residual stream.

        Raises:
            BadVector: A vector is zero; the message names its layer.
        """
        return Directions({layer: self._unit(layer) for layer in self}, origin=self._origin)

    def project(self, rows: Mapping[int, npt.ArrayLike]) -> dict[int, Float64Array]:
        """Return the projections of rows onto the directions: x·v̂, with v̂ = v / |v|, in the units of the rows.

        Projections show how well a layer separates examples, which bounds suit `cap`, and what steering changed.

        Args:
            rows: Activations, or a mapping layer -> [..., hidden].

        Returns:
            Layer -> float64 [...], for each layer that both have. NaN for rows that a partial capture lacks.

        Raises:
            TypeError: The rows are a bare array, which does not name its layer.
            InvalidRequest: Directions and rows have no layer in common, or the activations have another site selected
                or an encoding that does not keep rows.
            BadVector: The hidden sizes differ, or a direction is zero.

        Example:
            >>> joy.project(acts)[12].round(1)
            array([-0.3,  0.9,  1.4])
        """
        if not isinstance(rows, Mapping):
            raise TypeError(f"project() takes Activations, or a mapping layer -> rows, not {type(rows).__name__}.")
        if isinstance(rows, Activations) and rows.site != self._origin.site:
            raise InvalidRequest(
                f"The directions are for the site {self._origin.site}, but the activations have {rows.site} selected. "
                f"Use acts.select(site={self._origin.site!r}).",
                reason="INVALID_FIELD",
            )
        if isinstance(rows, Activations) and not rows.manifest.format_at(rows.site).decodes_to_rows:
            raise InvalidRequest(
                f"{rows.manifest.capture_id} has no rows to project: its encoding {rows.encoding} keeps {rows.width} "
                "other numbers for each. Capture them as raw.",
                reason="INVALID_FIELD",
            )
        layers = [layer for layer in self if layer in rows]
        if not layers:
            raise InvalidRequest(
                f"There are directions for the layers {list(self)}, but rows of none of these.", reason="INVALID_FIELD"
            )
        return {layer: self._projection(layer, rows[layer]) for layer in layers}

    def add(
        self,
        scale: float | Mapping[int, float] = 1.0,
        *,
        layers: LayersLike | None = None,
        positions: PositionsLike = None,
        keep_norm: bool = False,
    ) -> list[Add]:
        """Return operations for `steer=` that add each direction at its own layer: x + scale·v.

        Layers with the same scale share one operation. With one scale for all layers, this is
        `[residuum.Add(joy, scale=scale)]`.

        What one layer adds stays in the stream of later layers, so the effects of many layers add up: choose few layers
        or a small scale. With a difference of means, scale=1 at one layer moves the mean of the negative examples to
        the mean of the positive examples.

        Steering is applied after a layer. So directions of resid_post, resid_mid, attn_out and mlp_out apply after
        their own layer. Those of resid_pre, the stream before a layer, apply after the previous layer. Those of attn_in
        and mlp_in cannot be applied: their rows have passed a norm, and are not on the scale of the stream.

        Args:
            scale: The factor, for all layers or by layer; a negative factor steers away.
            layers: Use only these layers; None means all layers with a direction.
            positions: The positions at which it is applied; see `Positions.of`.
            keep_norm: Scale each row back to the norm that it had before the operation.

        Raises:
            UnknownLayer: A layer has no direction, or its direction applies before the first layer, which cannot be
                steered.
            UnknownSite: The directions are of attn_in or mlp_in.

        Example:
            >>> client.generate("Hello", steer=joy.add(0.5, layers=range(10, 15)))
        """
        return [
            Add(vectors, scale=own, positions=positions, keep_norm=keep_norm, site=self.steering_site)
            for (own,), vectors in self._alike(layers, scale=scale)
        ]

    def ablate(
        self,
        scale: float | Mapping[int, float] = 1.0,
        *,
        layers: LayersLike | None = None,
        positions: PositionsLike = None,
        keep_norm: bool = False,
    ) -> list[Ablate]:
        """Return operations for `steer=` that remove each direction at its own layer: x - scale·(x·v̂)v̂.

        Arditi et al. (arXiv:2406.11717) instead remove the direction of one layer from all layers, as
        `residuum.Ablate(refusal[15], layers="all")` does.

        Args:
            scale: The fraction of the projection to remove, for all layers or by layer.
            layers: Use only these layers; None means all layers with a direction. `add` says where they apply.
            positions: The positions at which it is applied; see `Positions.of`.
            keep_norm: As for `add`.

        Raises:
            UnknownLayer: As for `add`.
            BadVector: A direction is zero.
        """
        return [
            Ablate(vectors, scale=own, positions=positions, keep_norm=keep_norm, site=self.steering_site)
            for (own,), vectors in self._alike(layers, scale=scale)
        ]

    def cap(
        self,
        *,
        min: float | Mapping[int, float] | None = None,  # noqa: A002 - as residuum.Cap calls it
        max: float | Mapping[int, float] | None = None,  # noqa: A002 - as above
        layers: LayersLike | None = None,
        positions: PositionsLike = None,
        keep_norm: bool = False,
    ) -> list[Cap]:
        """Return operations for `steer=` that keep the projection onto each direction within bounds.

        Projections differ between layers, and so should bounds. Use `project` to find typical values.

        Args:
            min: The lower bound of the projection x·v̂, in units of x; for all layers or by layer.
            max: The upper bound.
            layers: Use only these layers; None means all layers with a direction. `add` says where they apply.
            positions: The positions at which it is applied; see `Positions.of`.
            keep_norm: As for `add`.

        Raises:
            UnknownLayer: As for `add`.
            InvalidRequest: There is no bound, or max is below min.
            BadVector: A direction is zero.

        Example:
            >>> usual = joy.project(acts)
            >>> joy.cap(max={layer: usual[layer].max() for layer in usual})
        """
        return [
            Cap(vectors, min=low, max=high, positions=positions, keep_norm=keep_norm, site=self.steering_site)
            for (low, high), vectors in self._alike(layers, min=min, max=max)
        ]

    def replace(
        self,
        value: float | Mapping[int, float],
        *,
        layers: LayersLike | None = None,
        positions: PositionsLike = None,
        keep_norm: bool = False,
    ) -> list[Replace]:
        """Return operations for `steer=` that set the projection onto each direction: x + (value - x·v̂)v̂.

        Use `project` to find typical values of a layer.

        Args:
            value: The new projection x·v̂, in units of x; for all layers or by layer.
            layers: Use only these layers; None means all layers with a direction. `add` says where they apply.
            positions: The positions at which it is applied; see `Positions.of`.
            keep_norm: As for `add`.

        Raises:
            UnknownLayer: As for `add`.
            BadVector: A direction is zero.

        Example:
            >>> joyful = joy.project(happy_acts)
            >>> joy.replace({layer: joyful[layer].mean() for layer in joyful})
        """
        return [
            Replace(vectors, value=own, positions=positions, keep_norm=keep_norm, site=self.steering_site)
            for (own,), vectors in self._alike(layers, value=value)
        ]

    @property
    def steering_site(self) -> str:
        """The site at which the directions apply: "resid_post", or their own for "z" and "mlp_act"."""
        return self._origin.site if self._origin.site in {"z", "mlp_act"} else "resid_post"

    def placed(self, layers: LayersLike | None = None) -> list[tuple[int, int, Vector]]:
        """Return (layer, the layer after which it applies, vector) for some layers; `add` explains the difference.

        Args:
            layers: The layers; None means all layers with a direction.

        Raises:
            UnknownLayer: As for `add`.
        """
        chosen = list(self) if layers is None or selects_all(layers) else layer_list(layers)
        missing = [layer for layer in chosen if layer not in self._vectors]
        if missing:
            raise UnknownLayer(
                f"There is no direction for the layers {missing}. Choose among {list(self)}.", reason="UNKNOWN_LAYER"
            )
        if self._origin.site in _NOT_STEERED:
            raise UnknownSite(
                f"Directions of {self._origin.site} cannot be applied: rows at this site cannot be steered. Compute "
                "the directions from resid_pre, resid_mid or resid_post.",
                reason="UNKNOWN_SITE",
            )
        shift = 1 if self._origin.site == "resid_pre" else 0
        if shift and chosen[0] == 0:
            raise UnknownLayer(
                "The direction of layer 0 cannot be applied: resid_pre of layer 0 is the stream before the first "
                "layer, and steering applies after layers. Leave layer 0 out with layers=.",
                reason="UNKNOWN_LAYER",
            )
        return [(layer, layer - shift, self._vectors[layer]) for layer in chosen]

    def _alike(
        self, layers: LayersLike | None, **numbers: float | Mapping[int, float] | None
    ) -> list[tuple[tuple[Any, ...], dict[int, Vector]]]:
        """Group the layers by their numbers: return (numbers, the layer after which it applies -> vector)."""
        alike: dict[str, tuple[tuple[Any, ...], dict[int, Vector]]] = {}
        for layer, place, vector in self.placed(layers):
            own = tuple(_of_layer(name, given, layer) for name, given in numbers.items())
            # Group by repr, because values that are not numbers may not be hashable; the operation refuses them later.
            alike.setdefault(repr(own), (own, {}))[1][place] = vector
        return list(alike.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: a tensor `SITE.LAYER`, float32 [hidden], for each layer.

        The metadata holds the origin. safetensors' own loaders and `residuum.load_vectors` can also read the file.

        Raises:
            OSError: The file cannot be written.
        """
        from residuum.directions.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Directions:
        """Read a file that `save` wrote. The vectors and the origin are exactly those that were saved.

        Raises:
            FileNotFoundError: The file does not exist.
            InvalidRequest: `save` did not write the file; BadVector if its vectors cannot be used.
        """
        from residuum.directions.files import load

        return load(path)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Directions:
        """Read a control vector that repeng or llama.cpp wrote. Needs the extra `gguf`.

        `direction.N` becomes layer N, the stream after layer N, counted from 0. Both repeng (`set_control`, which wraps
        `model.layers[N]`) and llama.cpp (`build_cvec`, on `l_out-N`) add it there, so `add(scale)` has the same effect
        as the same strength in these programs. repeng also computes its directions from rows at this place, except for
        the last layer: those rows it takes after the model's final norm, as transformers returns them.

        Raises:
            FileNotFoundError: The file does not exist.
            InvalidRequest: It is not a control vector; BadVector if its vectors cannot be used.
            ImportError: The package gguf is not installed.

        Example:
            >>> trippy = residuum.Directions.from_gguf("trippy.gguf")
            >>> client.generate("Pitch me a show.", steer=trippy.add(1.5, layers=range(14, 27)))
        """
        from residuum.directions.files import from_gguf

        return from_gguf(path)

    def to_gguf(self, path: str | os.PathLike[str], *, layers: LayersLike | None = None, model_hint: str = "") -> None:
        """Write a control vector that repeng and llama.cpp read. Needs the extra `gguf`.

        Each direction becomes `direction.N`, where N is the layer after which `add` would apply it.

        Args:
            path: The file.
            layers: Use only these layers; None means all layers with a direction.
            model_hint: The model's architecture as transformers names it (`config.model_type`), such as "llama".
                repeng warns if the hints of two vectors differ. By default the origin's model, or "unknown", because
                repeng does not read files without a hint.

        Raises:
            OSError: The file cannot be written.
            UnknownLayer: As for `add`; or a direction applies after layer 0, and llama.cpp would refuse the file.
            UnknownSite: As for `add`; or the directions are of z or mlp_act, and these programs steer only the stream.
            ImportError: The package gguf is not installed.
        """
        from residuum.directions.files import to_gguf

        to_gguf(self, path, layers, model_hint or self._origin.model or "unknown")

    def __getitem__(self, layer: int) -> Vector:
        try:
            return self._vectors[layer]
        except (KeyError, TypeError):
            message = f"There is no direction for layer {layer!r}. Choose among {list(self._vectors)}"
            raise KeyError(message) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __contains__(self, layer: object) -> bool:
        return layer in self._vectors

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Directions):
            return NotImplemented
        return self._origin == other._origin and self._vectors == other._vectors

    def __hash__(self) -> int:
        return hash((self._origin, tuple(self._vectors.items())))

    def __repr__(self) -> str:
        origin = self._origin
        examples = f"{origin.positive_examples} + {origin.negative_examples} examples"
        counts = f" of {examples}" if origin.positive_examples else ""
        made = f", {origin.method}{counts}" if origin.method else ""
        model = f" of {origin.model!r}" if origin.model else ""
        return f"Directions({len(self)} layers × {self.hidden_size}{made}, {origin.site}{model})"

    def _unit(self, layer: int) -> Float64Array:
        vector = self._vectors[layer]
        if not vector.norm:
            raise BadVector(
                f"The direction of layer {layer} is zero, so nothing projects onto it.", reason="BAD_VALUES"
            )
        unit: Float64Array = vector.values.astype(np.float64) / vector.norm
        return unit

    def _projection(self, layer: int, rows: npt.ArrayLike) -> Float64Array:
        values = np.asarray(without_torch(rows), dtype=np.float64)
        if not values.ndim or values.shape[-1] != self.hidden_size:
            raise BadVector(
                f"The rows of layer {layer} have the shape {list(values.shape)}, but must have [..., "
                f"{self.hidden_size}], as the direction has {self.hidden_size} elements.",
                reason="WRONG_LENGTH",
            )
        projection: Float64Array = np.asarray(values @ self._unit(layer))
        return projection


def _vector(layer: int, given: Vector | npt.ArrayLike) -> Vector:
    if isinstance(given, Vector):
        return given
    try:
        return Vector.from_array(given)
    except BadVector as error:
        raise BadVector(f"The direction of layer {layer}: {error}", reason=error.reason) from None


def _of_layer(name: str, given: float | Mapping[int, float] | None, layer: int) -> float | None:
    if not isinstance(given, Mapping):
        return given
    if layer not in given:
        raise InvalidRequest(
            f"{name} has no entry for layer {layer}. Add one, or choose other layers with layers=.",
            reason="INVALID_FIELD",
        )
    return given[layer]
