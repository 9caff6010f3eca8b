"""Selections of layers and positions: the forms that users may write, and the contract's messages."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Union

import numpy as np

from residuum.exceptions import InvalidRequest, UnknownLayer
from residuum.v1 import selection_pb2
from residuum.values.selections.texts import parse_layers, parse_positions
from residuum.wire.limits import MAX_RANGES
from residuum.wire.selection import check_positions

LayersLike = Union[str, int, range, Iterable[int]]  # noqa: UP007 - evaluated at run time on Python 3.10
"""The forms in which users may write layers: "all", 12, "10-19", range(10, 20), [0, 5, 10] or "0,5,10"."""

_PHASES = {"prompt": selection_pb2.PHASE_PROMPT, "generated": selection_pb2.PHASE_GENERATED}
_INT32 = 1 << 31


@dataclass(frozen=True)
class Positions:
    """A selection of token positions. A position must meet every condition that is set; without any, all are selected.

    Position p is the index of a token, from 0, counted over prompt and generated tokens. Negative positions count back
    from the prompt's end: -1 is the last prompt token. The last generated token is never fed to the model and has no
    row.

    Attributes:
        phases: "prompt" or "generated"; empty means both.
        ranges: Ranges (first, last), both inclusive; a last of None is the end of the request. Empty means all
            positions.
        every: Only positions that are a multiple of this number.

    Example:
        >>> Positions(ranges=[(-4, -1)])                # the last four prompt tokens
        >>> Positions(phases=["generated"], every=8)    # every eighth position of the reply
    """

    phases: tuple[str, ...] = ()
    ranges: tuple[tuple[int, int | None], ...] = ()
    every: int = 1

    def __post_init__(self) -> None:
        phases: object = self.phases  # typed as object, because users may pass a string
        object.__setattr__(self, "phases", (phases,) if isinstance(phases, str) else tuple(self.phases))
        object.__setattr__(self, "ranges", tuple(_pair(item) for item in self.ranges))
        if isinstance(self.every, bool) or not isinstance(self.every, (int, np.integer)):
            raise TypeError(f"every must be a whole number, not {self.every!r}.")
        self.to_proto()

    @classmethod
    def of(cls, value: PositionsLike) -> Positions:
        """Return the positions that a user specifies in any of the accepted forms.

        Args:
            value: One of:

                - None or "all"; "prompt", "generated" or "last_prompt";
                - one position;
                - a text of positions and slices, as on the command line: "-4:", "0:16" or "0,8:16";
                - a slice or range, which excludes its stop as usual in Python: range(-4, 0) is the last four prompt
                  tokens;
                - a list of positions, slices or pairs (first, last), both inclusive. Only inside a list is a tuple a
                  pair: [(2, 5)] is four positions, (2, 5) is two;
                - a Positions.

        Raises:
            InvalidRequest: The selection is invalid for every request.
            TypeError: The value has none of these forms.

        Example:
            >>> Positions.of(slice(4, None)).ranges
            ((4, None),)
        """
        if isinstance(value, Positions):
            return value
        if value is None or isinstance(value, str):
            return _of_word("all" if value is None else value)
        if isinstance(value, (slice, range)):
            return _of_slice(value)
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return cls(ranges=((int(value), int(value)),))
        if not isinstance(value, Iterable):
            raise TypeError(f"positions= takes a name, a number, a slice or a list of these, not {value!r}.")
        return cls(ranges=tuple(_merge([_of_item(item) for item in value])))

    def to_proto(self) -> selection_pb2.PositionSelection:
        """Return the checked message.

        Raises:
            InvalidRequest: The selection is invalid for every request.
        """
        unknown = [phase for phase in self.phases if phase not in _PHASES]
        if unknown:
            raise InvalidRequest(f"{unknown[0]!r} is not a phase; use 'prompt' or 'generated'.")
        if self.every < 1:
            raise InvalidRequest(f"every must be at least 1, not {self.every}.")
        message = selection_pb2.PositionSelection(phases=[_PHASES[phase] for phase in self.phases])
        message.every = self.every if self.every > 1 else 0
        for first, last in self.ranges:
            message.ranges.append(_range(first, last))
        try:
            check_positions(message)
        except ValueError as error:
            raise InvalidRequest(f"The positions are invalid: {error}.", reason="INVALID_FIELD") from None
        return message

    @classmethod
    def from_proto(cls, message: selection_pb2.PositionSelection) -> Positions:
        """Return the positions that a message names."""
        return _parsed(message.SerializeToString())


@functools.lru_cache(maxsize=64)
def _parsed(data: bytes) -> Positions:
    """Return the positions of a serialised message. Many captures are made with the same few selections."""
    message = selection_pb2.PositionSelection.FromString(data)
    names = {number: name for name, number in _PHASES.items()}
    return Positions(
        phases=tuple(names[phase] for phase in message.phases),
        ranges=tuple((item.first, item.last if item.HasField("last") else None) for item in message.ranges),
        every=max(message.every, 1),
    )


PositionsLike = Union[  # noqa: UP007 - evaluated at run time on Python 3.10
    Positions, str, int, slice, range,
    Iterable[Union[int, slice, range, "tuple[int, int | None]"]], None,
]  # fmt: skip
"""The forms in which users may write positions; see `Positions.of`."""


def layer_selection(layers: LayersLike) -> selection_pb2.LayerSelection:
    """Return the message for layers in any of the accepted forms.

    Raises:
        InvalidRequest: No layer is named, or a layer is below 0.
        TypeError: The value has none of the accepted forms.
    """
    if selects_all(layers):
        return selection_pb2.LayerSelection(all=True)
    numbers = layer_list(layers)
    return selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=numbers))


def selects_all(layers: LayersLike | None) -> bool:
    """Return whether this is the word "all". Numpy arrays cannot be compared with it."""
    return isinstance(layers, str) and layers == "all"


def layer_list(layers: LayersLike) -> list[int]:
    """Return layer numbers, ascending and distinct.

    Raises:
        InvalidRequest: No layer is named, or a text does not name layers.
        UnknownLayer: A layer is below 0, or beyond 32 bits.
        TypeError: A value is not a whole number.
    """
    numbers = index_list("layer", parse_layers(layers) if isinstance(layers, str) else layers)
    if numbers[0] < 0:
        raise UnknownLayer(
            f"Layer {numbers[0]} does not exist: layers count from 0. The last is client.info().num_layers - 1.",
            reason="UNKNOWN_LAYER",
        )
    if numbers[-1] >= _INT32:
        raise UnknownLayer(
            f"Layer {numbers[-1]} does not exist: the last is client.info().num_layers - 1.", reason="UNKNOWN_LAYER"
        )
    return numbers


def index_list(kind: str, values: int | Iterable[int]) -> list[int]:
    """Return whole numbers, ascending and distinct. Error messages name what they number by `kind`.

    Raises:
        InvalidRequest: No number is given.
        TypeError: A value is not a whole number.
    """
    given: object = values  # typed as object, because users may pass anything
    if isinstance(given, str) or not isinstance(given, (int, np.integer, Iterable)):
        every = "'all', " if kind == "layer" else ""
        raise TypeError(f"{kind}s= takes {every}a number, a range or a list of numbers, not {values!r}.")
    items = [values] if isinstance(values, (int, np.integer)) else list(values)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise TypeError(f"A {kind} must be a whole number, not {item!r}.")
    if not items:
        instead = "use 'all'" if kind == "layer" else f"leave {kind}s= out for all"
        raise InvalidRequest(f"Name at least one {kind}, or {instead}.", reason="INVALID_FIELD")
    return sorted({int(item) for item in items})


def _of_word(word: str) -> Positions:
    if word == "all":
        return Positions()
    if word == "last_prompt":
        return Positions(ranges=((-1, -1),))
    if word not in _PHASES:
        return Positions.of(parse_positions(word))
    return Positions(phases=(word,))


def _of_slice(value: slice | range) -> Positions:
    start, stop, step = value.start or 0, value.stop, 1 if value.step is None else value.step
    if step > 1 and start < 0:
        raise InvalidRequest(
            f"{value!r} is invalid: a step selects the positions that are its multiples, and where these lie relative "
            "to the prompt's end depends on its length. List the positions, as in [-4, -2], or leave out the step and "
            "slice the rows afterwards, as in acts[12][::2].",
            reason="INVALID_FIELD",
        )
    if step < 1 or start % step:
        raise InvalidRequest(
            f"{value!r} is invalid: a step selects the positions that are its multiples. Use a step of at least 1, and "
            "a start that is a multiple of it; see residuum.Positions.",
            reason="INVALID_FIELD",
        )
    if isinstance(value, range) and start < 0 < stop:
        raise InvalidRequest(
            f"{value!r} is invalid: positions below 0 count from the prompt's end, and the others from its start. Put "
            "the two parts into a list.",
            reason="INVALID_FIELD",
        )
    if not len(value) if isinstance(value, range) else stop == 0:
        raise InvalidRequest(f"{value!r} selects no position. Name at least one.", reason="INVALID_FIELD")
    if start == 0 and stop is None:
        return Positions(every=step)
    return Positions(ranges=((start, None if stop is None else stop - 1),), every=step)


def _of_item(item: int | slice | range | tuple[int, int | None]) -> tuple[int, int | None]:
    if isinstance(item, (bool, np.bool_)):
        raise TypeError("A position must be a number, not True or False; convert a mask with np.flatnonzero(mask).")
    if isinstance(item, (int, np.integer)):
        return int(item), int(item)
    if isinstance(item, (slice, range)):
        if item.step not in (None, 1):
            raise InvalidRequest("Slices in a list cannot have a step; see residuum.Positions.", reason="INVALID_FIELD")
        return _of_slice(item).ranges[0] if _of_slice(item).ranges else (0, None)
    return _pair(item)


def _pair(item: tuple[int, int | None]) -> tuple[int, int | None]:
    try:
        first, last = item
        return operator.index(first), None if last is None else operator.index(last)
    except (TypeError, ValueError):
        raise TypeError(f"A position must be a number, a slice or a pair (first, last), not {item!r}.") from None


def _merge(ranges: list[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Merge adjacent ranges, so that a long list of positions stays within the contract's 64 ranges."""
    if not ranges:
        raise InvalidRequest("Name at least one position, or use positions=None for all.", reason="INVALID_FIELD")
    merged: list[tuple[int, int | None]] = []
    for first, last in sorted(ranges, key=lambda item: item[0]):
        before = merged[-1] if merged else None
        if before and before[1] is not None and (before[1] < 0) == (first < 0) and first == before[1] + 1:
            merged[-1] = (before[0], last)
        elif before != (first, last):
            merged.append((first, last))
    if len(merged) > MAX_RANGES:
        raise InvalidRequest(
            f"The positions form {len(merged)} separate ranges, but at most {MAX_RANGES} are allowed. Use wider "
            "ranges, or capture more and select rows afterwards.",
            reason="INVALID_FIELD",
        )
    return merged


def _range(first: int, last: int | None) -> selection_pb2.PositionRange:
    if not all(-_INT32 <= end < _INT32 for end in (first, last or 0)):
        raise InvalidRequest(f"The positions {first} to {last} exceed 32 bits.", reason="INVALID_FIELD")
    return selection_pb2.PositionRange(first=first, last=last)
