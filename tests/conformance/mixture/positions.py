"""Random selections of positions, and an independent reading of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import residuum

if TYPE_CHECKING:
    import numpy.typing as npt

    from residuum.values.selections.layers_and_positions import PositionsLike


class Chosen(NamedTuple):
    """A selection of positions, as it is given to the client and as its parts."""

    given: PositionsLike
    phases: tuple[str, ...] = ()
    ranges: tuple[tuple[int, int | None], ...] = ()
    """Both ends are inclusive. Numbers below 0 count from the end of the prompt."""
    every: int = 1

    def wanted(self, prompt: int, count: int) -> npt.NDArray[np.bool_]:
        """Return which of the first `count` positions are selected, for a prompt of `prompt` tokens."""
        return np.array([self._has(position, prompt) for position in range(count)], dtype=np.bool_)

    def _has(self, position: int, prompt: int) -> bool:
        phase = "prompt" if position < prompt else "generated"
        if self.phases and phase not in self.phases:
            return False
        spans = [(_at(first, prompt), _at(last, prompt)) for first, last in self.ranges]
        if spans and not any(low <= position <= high for low, high in spans):
            return False
        return position % self.every == 0


ALL = Chosen(None)
PROMPT = Chosen("prompt", ("prompt",))
GENERATED = Chosen("generated", ("generated",))


def draw_positions(rng: np.random.Generator) -> Chosen:
    """Return a random selection."""
    kind = int(rng.integers(10))
    if kind < 3:
        return ALL
    if kind < 6:
        return [PROMPT, GENERATED, Chosen("last_prompt", ranges=((-1, -1),))][kind - 3]
    if kind == 6:
        numbers = sorted({int(number) for number in rng.integers(-20, 180, size=int(rng.integers(1, 12)))})
        return Chosen(numbers, ranges=tuple((number, number) for number in numbers))
    if kind == 7:
        first = int(rng.integers(-30, 60))
        return Chosen([(first, None)], ranges=((first, None),))
    return _composed(rng)


def _composed(rng: np.random.Generator) -> Chosen:
    phases = (("prompt",), ("generated",), ())[int(rng.integers(3))]
    every = int(rng.choice([1, 2, 3, 7]))
    ranges = []
    for _ in range(int(rng.integers(4))):
        first = int(rng.integers(-30, 150))
        length = int(rng.integers(40))
        last = first + length
        ranges.append((first, last if (first < 0) == (last < 0) else None))
    if not (phases or ranges or every > 1):
        return ALL
    return Chosen(residuum.Positions(phases=phases, ranges=tuple(ranges), every=every), phases, tuple(ranges), every)


def _at(end: int | None, prompt: int) -> float:
    if end is None:
        return np.inf
    return end if end >= 0 else prompt + end
