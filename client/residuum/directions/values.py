"""Directions: one vector for each layer, with where they came from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest, UnknownLayer, UnknownSite
from residuum.values.activations import Activations
from residuum.values.capture import SITES
from residuum.values.selections import LayersLike, PositionsLike, layer_list
from residuum.values.steering import Ablate, Add, Cap, Replace
from residuum.values.vector import Vector

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Origin:
    """Where directions came from. Everything but `site` is for people; unknown facts are empty or 0."""

    method: str = ""
    """How they were made: "difference_of_means", "pca_center", "pca_diff", or "control_vector" if read from GGUF."""
    model: str = ""
    """The model that was captured; of a GGUF file its `model_hint`, which names an architecture, such as "llama"."""
    site: str = "resid_post"
    """The site whose rows they were made of."""
    positions: str = ""
    """The positions whose rows they were made of, such as "last_prompt"."""
    positive_examples: int = 0
    """How many positive examples there were."""
    negative_examples: int = 0
    """How many negative examples there were."""
    steered: bool = False
    """Whether the captured requests were steered."""


class Directions(Mapping[int, Vector]):
    """One direction for each of some layers: layer -> Vector, all of one length. Immutable.

    Args:
        vectors: By layer: a Vector, or anything that `Vector.from_array` takes, [hidden].
        origin: Where they came from.

    Raises:
        BadVector: A vector cannot be used, or they differ in length; the message names the layer.
        UnknownLayer: A layer is below 0.
        UnknownSite: The origin's site does not exist.

    Example:
        >>> joy
        Directions(30 layers × 576, difference_of_means of 8 + 8 examples, resid_post of 'SmolLM2-135M-Instruct')
        >>> joy[12]
        Vector(576 elements, norm 3.21, digest 5c0ffee0…)
        >>> client.put_vectors(joy)  # before they are needed; otherwise they are sent when they first are
    """

    def __init__(self, vectors: Mapping[int, Vector | npt.ArrayLike], *, origin: Origin | None = None) -> None:
        if not vectors:
            raise InvalidRequest("Directions have at least one layer, and none is given.", reason="INVALID_FIELD")
        self._origin = origin or Origin()
        if self._origin.site not in SITES:
            raise UnknownSite(f"{self._origin.site!r} is not a site; there are {', '.join(SITES)}.")
        self._vectors = {layer: _vector(layer, vectors[layer]) for layer in layer_list(vectors)}
        first, *others = self._vectors.items()
        for layer, vector in others:
            if len(vector) != len(first[1]):
                raise BadVector(
                    f"The direction of layer {layer} has {len(vector)} elements, and that of layer {first[0]} has "
                    f"{len(first[1])}; all must have the model's hidden size.",
                    reason="WRONG_LENGTH",
                )

    @property
    def origin(self) -> Origin:
        """Where they came from."""
        return self._origin

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        return tuple(self._vectors)

    @property
    def hidden_size(self) -> int:
        """Elements of each vector."""
        return len(next(iter(self._vectors.values())))

    def normalized(self) -> Directions:
        """Return the same directions with length 1 in every layer, so that `scale` is a length in units of the stream.

        Raises:
            BadVector: A vector is zero; the message names its layer.
        """
        return Directions({layer: self._unit(layer) for layer in self}, origin=self._origin)

    def project(self, rows: Mapping[int, npt.ArrayLike]) -> dict[int, Float64Array]:
        """Return how far rows lie along the directions: x·v̂, with v̂ = v / |v|, in the units of the rows.

        It tells how well a layer separates examples, what a sensible bound of `cap` is, and what steering did.

        Args:
            rows: Activations, or a mapping layer -> [..., hidden].

        Returns:
            By layer, float64 [...]: for each layer that both have. NaN for rows that a partial capture lacks.

        Raises:
            TypeError: The rows are a bare array, which does not say of which layer.
            InvalidRequest: They have no layer in common, or the activations are of another site.
            BadVector: Their hidden sizes differ, or a direction is zero.

        Example:
            >>> joy.project(acts)[12].round(1)
            array([-0.3,  0.9,  1.4])
        """
        if not isinstance(rows, Mapping):
            raise TypeError(f"project() takes Activations, or a mapping layer -> rows, not {type(rows).__name__}.")
        if isinstance(rows, Activations) and rows.site != self._origin.site:
            raise InvalidRequest(
                f"These are directions of {self._origin.site}, and the activations have {rows.site} selected; use "
                f"acts.select(site={self._origin.site!r}).",
                reason="INVALID_FIELD",
            )
        layers = [layer for layer in self if layer in rows]
        if not layers:
            raise InvalidRequest(
                f"There are directions for the layers {list(self)}, and rows of none of them.", reason="INVALID_FIELD"
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

        Layers of the same scale are one operation: with one scale for all of them, this is
        `[residuum.Add(joy, scale=scale)]`.

        What is added at one layer is still there in those after it, so that many layers add up: name a few, or take
        a small scale. With a difference of means, scale=1 at one layer moves the mean of the negative examples to that
        of the positive ones.

        Rows are steered after a layer. So directions of resid_post, attn_out and mlp_out are placed after their own
        layer, and those of resid_pre, the stream before it, after the layer before.

        Args:
            scale: The factor, for all layers or by layer; below 0 it steers away.
            layers: Only these layers; None means all that there are.
            positions: Where it is applied; see `Positions.of`.
            keep_norm: Scale each row, after the operation, to the norm that it had before.

        Raises:
            UnknownLayer: There is no direction for a layer, or it stands for the stream before the first layer, which
                cannot be steered.

        Example:
            >>> client.generate("Hello", steer=joy.add(0.5, layers=range(10, 15)))
        """
        return [
            Add(vectors, scale=own, positions=positions, keep_norm=keep_norm)
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

        Arditi et al. (arXiv:2406.11717) remove the direction of one layer from all of them instead: that is
        `residuum.Ablate(refusal[15], layers="all")`.

        Args:
            scale: How much of the projection is removed, for all layers or by layer.
            layers: Only these layers; None means all that there are. `add` says after which layer they work.
            positions: Where it is applied; see `Positions.of`.
            keep_norm: As for `add`.

        Raises:
            UnknownLayer: As for `add`.
            BadVector: A direction is zero.
        """
        return [
            Ablate(vectors, scale=own, positions=positions, keep_norm=keep_norm)
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

        Projections differ from layer to layer, and so should bounds: `project` tells what is usual.

        Args:
            min: The least projection x·v̂ that stays as it is, in units of x; for all layers or by layer.
            max: The greatest one.
            layers: Only these layers; None means all that there are. `add` says after which layer they work.
            positions: Where it is applied; see `Positions.of`.
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
            Cap(vectors, min=low, max=high, positions=positions, keep_norm=keep_norm)
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

        Whatever a row said along the direction, it then says `value`; `project` tells what is usual in a layer.

        Args:
            value: What the projection x·v̂ becomes, in units of x; for all layers or by layer.
            layers: Only these layers; None means all that there are. `add` says after which layer they work.
            positions: Where it is applied; see `Positions.of`.
            keep_norm: As for `add`.

        Raises:
            UnknownLayer: As for `add`.
            BadVector: A direction is zero.

        Example:
            >>> joyful = joy.project(happy_acts)
            >>> joy.replace({layer: joyful[layer].mean() for layer in joyful})
        """
        return [
            Replace(vectors, value=own, positions=positions, keep_norm=keep_norm)
            for (own,), vectors in self._alike(layers, value=value)
        ]

    def placed(self, layers: LayersLike | None = None) -> list[tuple[int, int, Vector]]:
        """Return (layer, the layer after which it is steered, vector) for some layers; `add` explains the places.

        Args:
            layers: Which; None means all that there are.

        Raises:
            UnknownLayer: As for `add`.
        """
        chosen = list(self) if layers is None or layers == "all" else layer_list(_not_a_word(layers))
        missing = [layer for layer in chosen if layer not in self._vectors]
        if missing:
            raise UnknownLayer(
                f"There is no direction for the layers {missing}; there are {list(self)}.", reason="UNKNOWN_LAYER"
            )
        shift = 1 if self._origin.site == "resid_pre" else 0
        if shift and chosen[0] == 0:
            raise UnknownLayer(
                "resid_pre of layer 0 is the stream before the first layer, where nothing can be steered; leave layer "
                "0 out with layers=.",
                reason="UNKNOWN_LAYER",
            )
        return [(layer, layer - shift, self._vectors[layer]) for layer in chosen]

    def _alike(
        self, layers: LayersLike | None, **numbers: float | Mapping[int, float] | None
    ) -> list[tuple[tuple[Any, ...], dict[int, Vector]]]:
        """Return the layers with equal numbers together: (their numbers, place -> vector)."""
        alike: dict[str, tuple[tuple[Any, ...], dict[int, Vector]]] = {}
        for layer, place, vector in self.placed(layers):
            own = tuple(_of_layer(name, given, layer) for name, given in numbers.items())
            # By how they are written: what is no number at all is told by the operation, in its own words.
            alike.setdefault(repr(own), (own, {}))[1][place] = vector
        return list(alike.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: a tensor `SITE.LAYER`, float32 [hidden], for each layer.

        The origin stands in its metadata. safetensors' own loaders and `residuum.load_vectors` read it, too.

        Raises:
            OSError: The file cannot be written.
        """
        from residuum.directions.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Directions:
        """Read a file that `save` wrote: the same vectors, bit for bit, and the same origin.

        Raises:
            FileNotFoundError: There is no such file.
            InvalidRequest: It is not such a file; BadVector if its vectors cannot be used.
        """
        from residuum.directions.files import load

        return load(path)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Directions:
        """Read a control vector that repeng or llama.cpp wrote. Needs the extra `gguf`.

        `direction.N` becomes layer N, the stream after layer N counted from 0: there both repeng (`set_control`, which
        wraps `model.layers[N]`) and llama.cpp (`build_cvec`, on `l_out-N`) add it, so that `add(scale)` does what
        their strength of the same number does. repeng takes its rows there, too, but for the last layer: those it
        takes behind the model's final norm, as transformers hands them out.

        Raises:
            FileNotFoundError: There is no such file.
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

        Each direction becomes `direction.N`, N being the layer after which `add` would place it.

        Args:
            path: The file.
            layers: Only these layers; None means all that there are.
            model_hint: The model's architecture as transformers calls it (`config.model_type`), such as "llama";
                repeng warns when those of two vectors differ. By default the origin's model, or "unknown": repeng
                reads no file without.

        Raises:
            OSError: The file cannot be written.
            UnknownLayer: As for `add`; or it would be placed after layer 0, for which llama.cpp refuses a whole file.
            ImportError: The package gguf is not installed.
        """
        from residuum.directions.files import to_gguf

        to_gguf(self, path, layers, model_hint or self._origin.model or "unknown")

    def __getitem__(self, layer: int) -> Vector:
        try:
            return self._vectors[layer]
        except (KeyError, TypeError):
            raise KeyError(f"There is no direction for layer {layer!r}; layers: {list(self._vectors)}") from None

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
        what = self._origin
        counts = f" of {what.positive_examples} + {what.negative_examples} examples" if what.positive_examples else ""
        made = f", {what.method}{counts}" if what.method else ""
        model = f" of {what.model!r}" if what.model else ""
        return f"Directions({len(self)} layers × {self.hidden_size}{made}, {what.site}{model})"

    def _unit(self, layer: int) -> Float64Array:
        vector = self._vectors[layer]
        if not vector.norm:
            raise BadVector(f"The direction of layer {layer} is zero: it points nowhere.", reason="BAD_VALUES")
        unit: Float64Array = vector.values.astype(np.float64) / vector.norm
        return unit

    def _projection(self, layer: int, rows: npt.ArrayLike) -> Float64Array:
        values = np.asarray(rows, dtype=np.float64)
        if not values.ndim or values.shape[-1] != self.hidden_size:
            raise BadVector(
                f"The rows of layer {layer} have the shape {list(values.shape)}, and the direction has "
                f"{self.hidden_size} elements; rows have the shape [..., hidden].",
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
            f"{name} says nothing of layer {layer}; name only the layers that you want with layers=.",
            reason="INVALID_FIELD",
        )
    return given[layer]


def _not_a_word(layers: LayersLike) -> int | Iterable[int]:
    if isinstance(layers, str):
        raise InvalidRequest(f"layers={layers!r} is not known; write 'all', a number, or a list of numbers.")
    return layers
