"""What the reference computes for one sequence: its rows, its log-probabilities, and which rows are decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from bench.conformance.reference import Changes, Reference, Rows
    from tests.conformance.mixture.operations import Placed

Segments = list[tuple[int, "list[Placed]"]]
"""Operations and the first position that they apply to, ascending; the first one is 0."""

ROW_ERROR = 2e-5
"""How far a row may be from the reference's, relative to its length. Both sides compute in float32, in different
orders; the largest difference of a million rows was half of this. A row of another token, position or layer,
or one with other steering, differs by more than 1e-2."""

TIE = ROW_ERROR
"""How near a row may be to a hard gate's threshold, relative to its length, or the scores of two experts to each other,
relative to the largest score, before rounding decides. From such a row on, the sequence is not compared, because
attention spreads the difference."""


@dataclass
class Steering:
    """Applies operations to the reference's rows, and keeps rows as they were before."""

    segments: Segments
    prompt: int
    before: dict[tuple[str, int], Rows] = field(default_factory=dict)
    nearest: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """How near each position came to a jump at any place."""

    def changes(self, count: int) -> Changes:
        """Return the changes of rows at all steered places, for a sequence of `count` positions."""
        self.nearest = np.full(count, np.inf)
        places = {(item.site, layer) for _, items in self.segments for item in items for layer in item.layers}
        return {place: self._change(*place) for place in places}

    def _change(self, site: str, layer: int):
        def changed(rows: Tensor) -> Tensor:
            self.before[site, layer] = rows.detach().clone().numpy()
            out = rows.clone()
            count = len(rows)
            starts = [start for start, _ in self.segments]
            for (start, items), stop in zip(self.segments, [*starts[1:], count], strict=True):
                here = np.zeros(count, dtype=np.bool_)
                here[start : max(stop, start)] = True
                for item in items:
                    if item.site == site and layer in item.layers:
                        chosen = torch.from_numpy(here & item.positions.wanted(self.prompt, count))
                        applied = item.layers[layer]
                        if applied.distance is not None:
                            distance = torch.where(chosen, applied.distance(out), torch.inf).numpy()
                            self.nearest = np.minimum(self.nearest, distance)
                        out = torch.where(chosen[:, None], applied.change(out), out)
            return out

        return changed


@dataclass(frozen=True)
class Expected:
    """What the reference computes for one sequence."""

    tokens: list[int]
    """Those that the model got."""
    rows: dict[str, Rows]
    """By site, float32 [layers, positions, width]."""
    before: dict[tuple[str, int], Rows]
    """The rows before steering, where they differ."""
    logprobs: Rows
    """[positions, vocabulary]."""
    decided: int
    """The positions before this one do not depend on rounding."""

    def at(self, site: str, layer: int, *, before_steering: bool = False) -> Rows:
        """Return the rows at a place, [positions, width]."""
        if before_steering:
            place = ("resid_post", layer - 1) if site == "resid_pre" else (site, layer)
            if place in self.before:
                return self.before[place]
        rows: Rows = self.rows[site][layer]
        return rows


def expect(
    reference: Reference, tokens: Sequence[int], prompt: int, segments: Segments, top_experts: int = 0
) -> Expected:
    """Run the reference over the tokens that the model got."""
    steering = Steering(segments, prompt)
    rows = reference.rows(tokens, steering.changes(len(tokens)))
    nearest = steering.nearest
    if top_experts:
        nearest = np.minimum(nearest, _router_gaps(rows["router_logits"], top_experts))
    ties = np.flatnonzero(nearest < TIE)
    decided = int(ties[0]) if len(ties) else len(tokens)
    return Expected(list(tokens), rows, steering.before, reference.logprobs(rows["resid_post"][-1]), decided)


def _router_gaps(logits: Rows, chosen: int) -> npt.NDArray[np.float64]:
    """Return how near the first expert that is not chosen came to the last one that is, [positions]."""
    ordered = np.sort(logits, axis=-1)
    gaps = (ordered[..., -chosen] - ordered[..., -chosen - 1]) / np.abs(logits).max(axis=-1)
    return np.where(np.isnan(gaps), np.inf, gaps).min(axis=0).astype(np.float64)
