"""Explains rows that vLLM sent to other experts than the reference did.

Rounding moves the scores of a router a little. If two experts are nearly tied, vLLM may choose the other one. Its row
is then right, but far from the reference's. So the reference computes such a row again with each choice that differs
from its own only at near ties. The row is explained if it is equal, within the bounds for every row, with one of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Rows = npt.NDArray[np.float32]
Place = tuple[int, int]
"""A layer, and the number of a decision in it: a router may first choose groups of experts, and then experts."""

_MAX_TRIES = 400
"""How many choices are tried for one position in one layer."""
_DOUBTFUL = 0.25
"""Other experts are considered for a row whose error is above this part of the bound. An expert with a small weight
changes its row by less than the bound, but may change the experts of later layers."""
_TOGETHER = (1, 2, 3)
"""How many experts may be on the other side of a threshold at once."""
_SITES = ("mlp_out", "resid_post")
"""The sites of a layer that change with the choice of its experts."""
_HIGHEST = {torch.topk, Tensor.topk, torch.max, Tensor.max}
_ABOVE = {torch.gt, Tensor.gt, Tensor.__gt__}


@dataclass(frozen=True)
class Decision:
    """What a router decided."""

    scores: Tensor
    """What it compared, [positions, experts or groups]."""
    taken: Tensor
    """The indices with the highest scores, [positions, k], or whether each score is above 0, [positions, experts]."""

    def alternatives(self, position: int, max_gap: float) -> Iterator[tuple[float, Tensor]]:
        """Return the decisions that are nearly tied with the one for a position.

        Returns:
            For each, how far apart the scores are, relative to the largest one; and its row of `taken`.
        """
        scores, taken = self.scores[position], self.taken[position]
        valid = scores.isfinite()
        scale = float(scores[valid].abs().max())
        if taken.dtype == torch.bool:
            near = (scores.abs() <= max_gap).nonzero()[:, 0].tolist()
            for some in itertools.chain.from_iterable(itertools.combinations(near, size) for size in _TOGETHER):
                row = taken.clone()
                row[list(some)] = ~row[list(some)]
                yield float(scores[list(some)].abs().max()), row
            return
        others = [index for index in valid.nonzero()[:, 0].tolist() if index not in taken.tolist()]
        swaps = [
            (float(scores[old] - scores[new]) / scale, old, new)
            for old, new in itertools.product(taken.tolist(), others)
            if float(scores[old] - scores[new]) <= max_gap * scale
        ]
        for group in [*((swap,) for swap in swaps), *itertools.combinations(swaps, 2)]:
            changes = {old: new for _, old, new in group}
            if len(set(changes.values())) == len(changes) == len(group):
                row = torch.tensor([changes.get(index, index) for index in taken.tolist()])
                yield max(gap for gap, _, _ in group), row


@dataclass(order=True)
class Candidate:
    """Other decisions of one layer for one position."""

    gap: float
    """How near the ties are: the largest gap of `Decision.alternatives`."""
    number: int
    """Orders candidates with equal gaps."""
    changes: dict[Place, Tensor] = field(compare=False)


class Routing(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Records what the routers of a reference decide while it is entered, and makes them decide otherwise."""

    def __init__(self) -> None:
        """Change no decision."""
        super().__init__()
        self.decisions: dict[Place, Decision] = {}
        self._forced: dict[tuple[int, int], dict[Place, Tensor]] = {}
        self._next: Place | None = None

    def enter(self, layer: int) -> None:
        """Take the decisions from now on as those of a layer."""
        self._next = (layer, 0)

    def force(self, layer: int, position: int, changes: dict[Place, Tensor]) -> None:
        """Make these the decisions of a layer for a position, in place of its own."""
        self._forced[layer, position] = changes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch. If it is a router's decision, record or replace its result."""
        result = func(*args, **(kwargs or {}))
        if self._next is None or not _decides(func, args, result):
            return result
        layer, place = self._next[0], self._next
        self._next = (layer, place[1] + 1)
        highest = func in _HIGHEST
        taken = (result[1] if highest else result).clone()
        for (forced_layer, position), changes in self._forced.items():
            if forced_layer == layer and place in changes:
                taken[position] = changes[place]
        scores = args[0] if highest else (args[0] - args[1]) * _units(self.decisions[layer, place[1] - 1].scores)
        self.decisions[place] = Decision(scores.float().clone(), taken)
        return type(result)((args[0].gather(-1, taken), taken)) if highest else taken


def _units(scores: Tensor) -> Tensor:
    """Return the units of `sparsemixer`'s comparison with a threshold, relative to each position's largest score.

    PhiMoE's router leaves out experts whose score is far below the highest one, in units of the larger of the highest
    score and the expert's own.
    """
    finite = scores.masked_fill(~scores.isfinite(), 0.0)
    highest = scores.max(-1, keepdim=True)[0]
    return torch.maximum(finite.abs(), highest) / finite.abs().max(-1, keepdim=True)[0]


def _decides(func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> bool:
    """Return whether a function decides for each position: it compares scores, [positions, experts]."""
    if func in _HIGHEST and isinstance(result, tuple):
        return bool(args[0].ndim == result[1].ndim == len(("position", "expert")))
    return func in _ABOVE and isinstance(args[1], float) and bool(result.ndim == len(("position", "expert")))


@dataclass
class Explained:
    """The rows that other experts explain."""

    rows: int = 0
    """Positions for which a layer's router decided otherwise than the reference's, over all layers."""
    widest_gap: float = 0.0
    """The greatest gap among them; see `Candidate`."""


def explain(
    run: Callable[[Routing], Mapping[str, Rows]],
    got: Mapping[str, Rows],
    errors_of: Callable[[str, int, Mapping[str, Rows]], npt.NDArray[Any]],
    max_error: float,
) -> tuple[Mapping[str, Rows], Explained]:
    """Find the experts with which the reference computes the rows of a request.

    Layers are explained from the first to the last, because a layer's rows depend on the experts of all layers before.

    Args:
        run: Runs the reference with a routing; returns its rows at each site, [layers, positions, hidden].
        got: The captured rows at each site, [layers, positions, hidden].
        errors_of: Given a site, a layer and the reference's rows, returns the errors of the captured rows, [positions].
        max_error: The bound on errors. Scores are rounded as rows are, so it is also the widest gap of a near tie.

    Returns:
        The reference's rows with these experts, and what was explained.
    """
    routing, explained = Routing(), Explained()
    expected = run(routing)
    sites = [site for site in _SITES if site in got]
    if any(got[site].shape != expected[site].shape for site in sites):
        return expected, explained  # rows are missing
    for layer in range(len(expected["resid_post"])):

        def errors(rows: Mapping[str, Rows], layer: int = layer) -> npt.NDArray[Any]:
            return np.asarray(np.max([errors_of(site, layer, rows) for site in sites], axis=0))

        searches = [
            _Search(routing, (layer, position), float(error), max_error)
            for position, error in enumerate(errors(expected))
            if not error <= max_error * _DOUBTFUL
        ]
        for _ in range(_MAX_TRIES):
            trying = [search for search in searches if search.try_next()]
            if not trying:
                break
            found = errors(run(routing))
            for search in trying:
                search.see(float(found[search.position]))
        for search in searches:
            search.finish(explained)
        expected = run(routing)
    return expected, explained


class _Search:
    """The search for the experts of one position in one layer, the narrowest ties first."""

    def __init__(self, routing: Routing, where: tuple[int, int], error: float, max_error: float) -> None:
        """Start with the choice of the reference, which was just run, and the error of the captured row."""
        self.layer, self.position = where
        self._routing, self._max_error, self._own_error = routing, max_error, error
        self._numbers = itertools.count()
        self._options: list[Candidate] = []
        self._tried = self._best = Candidate(0.0, next(self._numbers), {})
        self._error = error
        self._extend()

    def try_next(self) -> bool:
        """Make the reference use the next choice; return whether the search goes on."""
        if not self._options or self._error <= self._max_error * _DOUBTFUL:
            self._routing.force(self.layer, self.position, self._best.changes)
            return False
        self._tried = heapq.heappop(self._options)
        self._routing.force(self.layer, self.position, self._tried.changes)
        return True

    def see(self, error: float) -> None:
        """Take the error of the captured row with the choice that was tried."""
        if error < self._error:
            self._error, self._best = error, self._tried
        self._extend()

    def finish(self, explained: Explained) -> None:
        """Make the reference use the best choice, if it is clearly better than the reference's own."""
        is_better = self._error < self._own_error / 2
        self._routing.force(self.layer, self.position, self._best.changes if is_better else {})
        if is_better:
            explained.rows += 1
            explained.widest_gap = max(explained.widest_gap, self._best.gap)

    def _extend(self) -> None:
        """Add the candidates that differ from the one just run by one more decision after its own."""
        last = max(self._tried.changes, default=(self.layer, -1))
        for place, decision in self._routing.decisions.items():
            if place[0] == self.layer and place > last:
                for gap, row in decision.alternatives(self.position, self._max_error):
                    changes = {**self._tried.changes, place: row}
                    heapq.heappush(self._options, Candidate(max(self._tried.gap, gap), next(self._numbers), changes))
