"""Reads the examples from which directions are computed: rows of captures, or of plain arrays. It does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest, UnknownLayer
from residuum.protocol.arguments import check_flag
from residuum.protocol.captures.reading import not_complete
from residuum.values.captures.activations import Activations
from residuum.values.captures.manifest import Manifest
from residuum.values.selections.layers_and_positions import (
    LayersLike,
    Positions,
    PositionsLike,
    layer_list,
    selects_all,
)
from residuum.values.selections.points import BESIDE_THE_STREAM
from residuum.values.tensors.numbers import without_torch
from residuum.wire.selection import expected_rows, to_ranges, wanted_positions

ExampleSet = Union[Mapping[int, npt.ArrayLike], Iterable[Mapping[int, npt.ArrayLike]]]  # noqa: UP007 - as elsewhere
"""A set of examples: Activations, or a mapping layer -> [rows, hidden], or an iterable of either."""

DEFAULT_POSITIONS: Literal["last_prompt"] = "last_prompt"

_BATCH = 16
"""Examples of a plain mapping that are converted to float64 at once: 84 MB with 80 layers of 8192 elements."""

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Batch:
    """Some examples, each with one row per layer."""

    values: Float64Array
    """The rows, [examples, layers, hidden]; 0 where `present` is false."""
    present: npt.NDArray[np.bool_]
    """Which rows are present, [examples, layers]. All true unless partial captures were allowed."""

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: int, stop: int | None = None) -> Batch:
        """Return the examples from `start` up to, but not including, `stop`."""
        return Batch(self.values[start:stop], self.present[start:stop])


@dataclass(frozen=True)
class _Facts:
    """Properties that the captures of both sets must share; taken from the first capture."""

    name: str
    model: str
    """With the LoRA adapter, if the request used one."""
    site: str
    steering: tuple[str, tuple[object, ...]]
    """How the rows relate to steering, as a text for errors; and the steering with its changes, empty without any."""


class ExampleReader:
    """Reads the examples of both sets, and checks that they share layers, width, model, site and steering.

    Each capture is one example: the mean of its rows at the chosen positions. Each row of a plain mapping is one
    example.
    """

    def __init__(self, layers: LayersLike | None, positions: PositionsLike, *, allow_partial: bool) -> None:
        self._layers = None if layers is None or selects_all(layers) else tuple(layer_list(layers))
        self._asked_for_layers = self._layers is not None
        self._positions = Positions.of(positions)
        self._words = positions if isinstance(positions, str) else str(self._positions) if self._chooses else "all"
        self._allow_partial = check_flag("allow_partial", allow_partial)
        self._width: tuple[str, int] | None = None
        self._facts: _Facts | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending; known once an example has been read."""
        return self._layers or ()

    @property
    def model(self) -> str:
        """The captures' model; empty without captures."""
        return self._facts.model if self._facts else ""

    @property
    def site(self) -> str:
        """The captures' site; "resid_post" without captures."""
        return self._facts.site if self._facts else "resid_post"

    @property
    def positions(self) -> str:
        """The chosen positions in words; empty without captures."""
        return self._words if self._facts else ""

    @property
    def steered(self) -> bool:
        """Whether the captured requests were steered."""
        return bool(self._facts and self._facts.steering[1])

    @property
    def _chooses(self) -> bool:
        return self._positions != Positions()

    def batches(self, side: str, examples: ExampleSet) -> Iterator[Batch]:
        """Yield a set's examples in order. The reader takes one item at a time and keeps none.

        Args:
            side: The set's name in error messages.
            examples: The set.

        Raises:
            TypeError: The value is not a set of examples.
            InvalidRequest: An example differs from earlier ones, or lacks the needed rows; BadVector if its rows
                cannot be used.
            CaptureNotComplete: A capture is not complete, and partial captures are not allowed.
        """
        for number, item in enumerate(_items(side, examples)):
            if isinstance(item, Activations):
                yield self._of_capture(side, item)
            else:
                yield from self._of_mapping(f"{side}: mapping {number}", item)

    def _of_capture(self, side: str, acts: Activations) -> Batch:
        manifest = acts.manifest
        name = f"{side}: capture {manifest.capture_id}" + (f", sequence {acts.sequence}" if acts.sequence else "")
        if not manifest.is_complete and not self._allow_partial:
            raise not_complete(manifest)
        columns = self._columns(name, acts)
        self._check_facts(_Facts(name, _model_of(manifest), acts.site, _steering(acts, columns)))
        self._check_layers(name, acts.layers)
        if acts.site in BESIDE_THE_STREAM:
            raise InvalidRequest(
                f"{name}: its rows at {acts.site} are not in the space of the residual stream, so a direction cannot "
                "be made from them. Select another site of the capture.",
                reason="INVALID_FIELD",
            )
        if not manifest.format_at(acts.site).decodes_to_rows:
            raise InvalidRequest(
                f"{name}: its rows were captured as {acts.encoding!r}, which keeps {acts.width} other numbers for each "
                "row, but a direction needs the row itself. Capture them with an encoding that keeps it: 'full8' or "
                "'raw'.",
                reason="INVALID_FIELD",
            )
        self._check_width(name, acts.hidden_size)
        values = np.zeros((1, len(self.layers), acts.hidden_size))
        present = np.zeros((1, len(self.layers)), dtype=np.bool_)
        for index, layer in enumerate(self.layers):
            keep = columns[acts.present[acts.layers.index(layer), columns]]
            if len(keep):
                values[0, index] = acts.raw(layer)[keep].astype(np.float64).mean(axis=0)
                present[0, index] = True
        self._check_finite(name, values)
        return Batch(values, present)

    def _columns(self, name: str, acts: Activations) -> npt.NDArray[np.intp]:
        """Return the indices of the capture's rows that make up the example."""
        held = acts.positions
        if not self._chooses:
            columns = np.arange(len(held))
        else:
            count = max(_rows(acts), int(held[-1]) + 1 if len(held) else 0)
            wanted = wanted_positions(self._positions.to_proto(), acts.prompt_tokens, 0, count)
            columns = np.flatnonzero(wanted[held])
            wanted[held] = False
            if wanted.any() and not self._allow_partial:
                raise InvalidRequest(
                    f"{name}: positions={self._words!r} selects {_runs(np.flatnonzero(wanted))}, but the capture has "
                    f"rows only for {_runs(held)}. Choose among these with positions=, or None for all.",
                    reason="INVALID_FIELD",
                )
        if not len(columns) and not self._allow_partial:
            raise InvalidRequest(
                f"{name}: positions={self._words!r} selects none of its positions. The prompt has "
                f"{acts.prompt_tokens} tokens, and the capture has rows for {_runs(held)}. Choose among these.",
                reason="INVALID_FIELD",
            )
        return columns

    def _of_mapping(self, name: str, mapping: Mapping[int, npt.ArrayLike]) -> Iterator[Batch]:
        if self._chooses and self._positions != Positions.of(DEFAULT_POSITIONS):
            raise InvalidRequest(
                f"{name}: positions= selects rows of captures only; in a plain mapping every row is an example. Leave "
                "it out, and select the rows beforehand.",
                reason="INVALID_FIELD",
            )
        if not mapping:
            raise InvalidRequest(f"{name} has no layer. Give at least one.", reason="INVALID_FIELD")
        self._check_layers(name, tuple(layer_list(mapping)))
        arrays = [_rows_of(f"{name}, layer {layer}", mapping[layer]) for layer in self.layers]
        for layer, array in zip(self.layers, arrays, strict=True):
            self._check_width(f"{name}, layer {layer}", array.shape[1])
            if len(array) != len(arrays[0]):
                raise InvalidRequest(
                    f"{name} has {len(arrays[0])} rows in layer {self.layers[0]}, but {len(array)} in layer {layer}. "
                    "Row i must belong to the same example in every layer.",
                    reason="INVALID_FIELD",
                )
        for start in range(0, len(arrays[0]), _BATCH):
            values = np.stack([array[start : start + _BATCH].astype(np.float64) for array in arrays], axis=1)
            self._check_finite(name, values)
            yield Batch(values, np.ones(values.shape[:2], dtype=np.bool_))

    def _check_layers(self, name: str, present: tuple[int, ...]) -> None:
        if self._layers is None:
            self._layers = present
        missing = sorted(set(self._layers) - set(present))
        if missing:
            raise UnknownLayer(
                f"{name}: it lacks the layers {missing}; it has {list(present)}. Every example needs the same layers: "
                "choose those that all examples have with layers=.",
                reason="UNKNOWN_LAYER",
            )
        more = sorted(set(present) - set(self._layers))
        if more and not self._asked_for_layers:
            raise InvalidRequest(
                f"{name}: it has the layers {more}, which earlier examples lack; choose the layers with layers=.",
                reason="INVALID_FIELD",
            )

    def _check_width(self, name: str, width: int) -> None:
        if self._width is None:
            self._width = (name, width)
        if width != self._width[1]:
            raise BadVector(
                f"{name}: its rows have {width} elements, but those of {self._width[0]} have {self._width[1]}. Use "
                "examples of one model.",
                reason="WRONG_LENGTH",
            )

    def _check_facts(self, facts: _Facts) -> None:
        first = self._facts = self._facts or facts
        if facts.model != first.model:
            raise InvalidRequest(
                f"{facts.name} comes from the model {facts.model!r}, but {first.name} from {first.model!r}. A "
                "direction is meaningful in one model only: use captures of one model.",
                reason="INVALID_FIELD",
            )
        if facts.site != first.site:
            raise InvalidRequest(
                f"{facts.name} has the site {facts.site} selected, but {first.name} has {first.site}. Select one with "
                "acts.select(site=...).",
                reason="INVALID_FIELD",
            )
        if facts.steering != first.steering:
            other = facts.steering[0] if facts.steering[0] != first.steering[0] else "steered differently"
            raise InvalidRequest(
                f"{first.name} was {first.steering[0]}, but {facts.name} was {other}: the direction would include the "
                "steering itself. If you want that, pass plain mappings, as in {layer: acts[layer]}.",
                reason="INVALID_FIELD",
            )

    def _check_finite(self, name: str, values: Float64Array) -> None:
        finite = np.isfinite(values).all(axis=(0, 2))
        if not finite.all():
            layers = [self.layers[index] for index in np.flatnonzero(~finite)]
            raise BadVector(f"{name}: it has NaN or infinite elements in the layers {layers}.", reason="BAD_VALUES")


def paired(positives: Iterator[Batch], negatives: Iterator[Batch]) -> Iterator[tuple[Batch, Batch]]:
    """Yield pairs of batches, one of each set, with equal numbers of examples. Example i is paired with example i.

    Raises:
        InvalidRequest: One set has more examples than the other, or both have none.
    """
    left, right = next(positives, None), next(negatives, None)
    pairs = 0
    while left is not None and right is not None:
        count = min(len(left), len(right))
        pairs += count
        yield left.part(0, count), right.part(0, count)
        left = left.part(count) if len(left) > count else next(positives, None)
        right = right.part(count) if len(right) > count else next(negatives, None)
    if left is not None or right is not None:
        more, fewer = ("positive", "negative") if left is not None else ("negative", "positive")
        raise InvalidRequest(
            f"{fewer} has {pairs} examples, but {more} has more: this method pairs the examples of both sets in order. "
            "Give as many of each, or use difference_of_means, which needs no pairs.",
            reason="INVALID_FIELD",
        )
    if not pairs:
        raise no_examples("positive")


def no_examples(side: str) -> InvalidRequest:
    """Return the exception for an empty set."""
    return InvalidRequest(f"{side} has no examples. Give at least one.", reason="INVALID_FIELD")


def _items(side: str, examples: ExampleSet) -> Iterator[Mapping[int, npt.ArrayLike]]:
    given: object = examples  # typed as object, because users may pass anything
    if isinstance(given, Mapping):
        yield given
        return
    if hasattr(given, "__aiter__"):
        raise TypeError(f"{side} must not be an async iterable. Await it first, as in [acts async for acts in ...].")
    if isinstance(given, (str, bytes)) or hasattr(given, "__array__") or not isinstance(given, Iterable):
        raise TypeError(_not_examples(side, given))
    for item in given:
        if not isinstance(item, Mapping):
            raise TypeError(_not_examples(side, item))
        yield item


def _not_examples(side: str, given: object) -> str:
    return (
        f"{side} takes what client.activations(request) returns, a mapping of layers to arrays [rows, hidden], or an "
        f"iterable of these, not {type(given).__name__}."
    )


def _rows_of(name: str, array: Any) -> npt.NDArray[Any]:
    rows = np.asarray(without_torch(array))
    if rows.ndim != 2 or not rows.shape[1]:  # noqa: PLR2004 - [rows, hidden]
        raise BadVector(
            f"{name}: rows must have the shape [rows, hidden], but this array has {list(rows.shape)}.",
            reason="WRONG_LENGTH",
        )
    if np.iscomplexobj(rows) or not np.can_cast(rows.dtype, np.float64, "same_kind"):
        raise BadVector(f"{name}: rows must be real numbers, not {rows.dtype}.", reason="WRONG_DTYPE")
    return rows


def _rows(acts: Activations) -> int:
    """Return the known number of positions of the selected sequence."""
    outcomes = acts.manifest.sequences
    generated = len(outcomes[acts.sequence].generated_token_ids) if acts.sequence < len(outcomes) else 0
    return expected_rows(acts.prompt_tokens, generated)


def _model_of(manifest: Manifest) -> str:
    """Return the model's name, with the LoRA adapter if the request used one."""
    return f"{manifest.model} with the adapter {manifest.adapter}" if manifest.adapter else manifest.model


def _steering(acts: Activations, columns: npt.NDArray[np.intp]) -> tuple[str, tuple[object, ...]]:
    """Return how the rows in these columns relate to steering. Changes after the last of these rows do not count.

    Changes are compared by their first positions after the prompt, because the prompts may differ in length.
    """
    proto = acts.manifest.proto
    last = max(acts.positions[columns].tolist(), default=-1)
    first_positions = [change.first_positions[acts.sequence] for change in proto.steering_changes]
    changes = [
        (first - acts.prompt_tokens, change.steering)
        for first, change in zip(first_positions, proto.steering_changes, strict=True)
        if first <= last
    ]
    start = proto.description.steering
    if not start.operations and not any(steering.operations for _, steering in changes):
        return "not steered", ()
    when = "before steering" if proto.description.spec.before_steering else "after steering"
    later = [(first, steering.SerializeToString(deterministic=True)) for first, steering in changes]
    return f"captured {when}", (start.SerializeToString(deterministic=True), *later)


def _runs(positions: npt.NDArray[np.integer]) -> str:
    runs = to_ranges(positions)
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "none"
