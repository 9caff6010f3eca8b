"""Random captures, and what a capture must hold of rows that the reference computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import residuum
from residuum.wire.rows.projection import projection_matrix
from tests.conformance.mixture.expected import ROW_ERROR
from tests.conformance.mixture.positions import Chosen, draw_positions

if TYPE_CHECKING:
    import numpy.typing as npt

    from bench.conformance.reference import Rows
    from tests.conformance.mixture.world import World

    Exact = npt.NDArray[np.float64]

_PLAIN = ("raw", "raw", "raw", "fp32", "fp16", "bf16", "full8", "topk", "topk8", "rp", "rp8", "project", "sae", "sae")
_STEPS = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Half of the distance between neighbouring numbers, relative to the number."""
_SMALLEST = {"fp16": 2.0**-25}
"""The same near 0."""


@dataclass(frozen=True)
class Asked:
    """A capture in both forms."""

    given: residuum.Capture
    layers: dict[str, tuple[int, ...]]
    """The layers of each site."""
    positions: Chosen
    encoding: str
    reduction: str
    before_steering: bool

    def wanted(self, prompt: int, count: int) -> list[int]:
        """Return the positions of the rows, for a sequence of `count` positions."""
        reduced = self.reduction != "none"
        return [at for phase in self.phases(prompt, count) for at in (phase[-1:] if reduced else phase)]

    def phases(self, prompt: int, count: int) -> list[list[int]]:
        """Return the selected positions of the prompt and of the reply; a phase without any is left out."""
        chosen = np.flatnonzero(self.positions.wanted(prompt, count)).tolist()
        parts = [[p for p in chosen if p < prompt], [p for p in chosen if p >= prompt]]
        return [part for part in parts if part]


def draw_capture(rng: np.random.Generator, world: World) -> Asked:
    """Return a random capture."""
    encoding = str(rng.choice(_PLAIN))
    wide = [site for site in world.sites if world.width(site) == world.info.hidden_size]
    of_one_width = encoding in {"project", "sae", "rp", "rp8", "topk", "topk8"}
    known = wide if of_one_width else list(world.sites)
    sites = [str(site) for site in rng.permutation(known)[: int(rng.integers(1, min(len(known), 7) + 1))]]
    layers = {}
    for site in sites:
        there = world.layers[site]
        count = int(rng.integers(1, len(there) + 1))
        layers[site] = tuple(sorted(int(layer) for layer in rng.choice(there, size=count, replace=False)))
    if encoding == "sae":
        layers = {sites[0]: layers[sites[0]][:1]}
    options = _options(rng, world, encoding, sites[0])
    reduction = str(rng.choice(["last", "mean", "max", "sum"])) if rng.random() < 0.2 else "none"
    if encoding == "sae" and reduction != "none":
        reduction = "last"  # the features of other reductions are refused
    if reduction != "none":
        options["reduction"] = reduction
        if encoding == "full8":
            options.pop("axis", None)
    before = bool(rng.random() < 0.2)
    positions = draw_positions(rng)
    given = residuum.Capture(
        points=[f"{site}.{layer}" for site, of_site in layers.items() for layer in of_site],
        positions=positions.given,
        before_steering=before,
        flush_interval=int(rng.choice([1, 5, 32, 32])),
        overflow="shed" if rng.random() < 0.2 else "wait",
        **options,
    )
    return Asked(given, layers, positions, encoding, reduction, before)


def _options(rng: np.random.Generator, world: World, encoding: str, site: str) -> dict[str, Any]:
    """Return the random options of an encoding of rows at a site."""
    options: dict[str, Any] = {"encoding": encoding}
    if encoding in {"rp", "rp8", "topk", "topk8"}:
        options["dimensions"] = int(rng.integers(1, 40))
    if encoding in {"rp", "rp8"}:
        options["seed"] = int(rng.integers(1 << 40))
    if encoding == "full8" and rng.random() < 0.5:
        options["axis"] = "dimension"
    if encoding == "project":
        options["vectors"] = world.vectors[site][: int(rng.integers(1, 5))]
    if encoding == "sae":
        options |= {"sae": world.sae, "dimensions": int(rng.integers(1, 17))}
    return options


def reduce(rows: Rows, reduction: str) -> Exact:
    """Return the reduction of rows [positions, width], in float64 [width]."""
    exact = rows.astype(np.float64)
    if reduction == "last":
        return exact[-1]
    reduced: Exact = {"mean": exact.mean, "max": exact.max, "sum": exact.sum}[reduction](axis=0)
    return reduced


def error_of(
    got: Rows,
    exact: Exact,
    noise: Exact,
    asked: Asked,
    world: World,
    steps: npt.NDArray[np.float32] | None = None,
    *,
    within: bool = True,
) -> float:
    """Return how far decoded rows are from what the reference makes of them, as a part of what is allowed.

    Above 1 is wrong. The allowance is the rounding of float32 (`noise`), through the encoding's own arithmetic, and
    what docs/encodings.md allows for the encoding: half a step.

    Args:
        got: The decoded rows of one place, [rows, decoded width].
        exact: The reference's rows, [rows, width].
        noise: How far a row may be off, in its length, [rows]: `ROW_ERROR` times its length.
        asked: The capture.
        world: The vectors and features that it may use.
        steps: For "full8" along dimensions: the quantisation steps of each number, [rows, width].
        within: Whether these steps must be those of rows that the capture has.
    """
    encoding, options = asked.encoding, asked.given
    most = noise[:, None]
    if encoding in {"topk", "topk8"}:
        return _of_largest(got, exact, most, int(options.dimensions or 0), quantised=encoding == "topk8")
    if encoding == "sae":
        return _of_features(got, exact, most, asked, world)
    if encoding in {"raw", "fp32"}:
        return _ratio(np.linalg.norm(got - exact, axis=1), noise)
    if encoding in {"rp", "rp8"}:
        matrix = projection_matrix(options.seed, exact.shape[1], int(options.dimensions or 0)).astype(np.float64)
        exact, most = exact @ matrix, most * np.linalg.norm(matrix, 2)
    if encoding == "project":
        matrix = np.stack([vector.values for vector in options.projection_vectors], axis=1).astype(np.float64)
        exact, most = exact @ matrix, most * np.linalg.norm(matrix, axis=0)
    step: Any = 0.0
    if encoding in _STEPS:
        step = _STEPS[encoding] * np.abs(exact) * 1.001 + _SMALLEST.get(encoding, 0)
    elif steps is not None:
        spread = np.ptp(exact, axis=0) + 2 * most.max()
        step = np.where(within & (steps > spread / 255 * 1.001), np.nan, steps / 2 * 1.001)
    elif encoding in {"full8", "rp8"}:
        step = (np.ptp(exact, axis=1)[:, None] + 2 * most) / 255 / 2 * 1.001
    return _ratio(np.abs(got - exact), most + step)


def _of_largest(got: Rows, exact: Exact, most: Exact, count: int, *, quantised: bool) -> float:
    """Compare the kept elements. Of elements that are equal up to rounding, either may be kept."""
    least = np.sort(np.abs(exact), axis=1)[:, -count, None]
    kept = got != 0
    if (kept.sum(axis=1) > count).any():
        return float("inf")
    step = np.zeros_like(most)
    if quantised:
        listed = np.where(np.abs(exact) >= least - 2 * most, exact, np.nan)
        step = (np.nanmax(listed, axis=1) - np.nanmin(listed, axis=1))[:, None] / 255 / 2 * 1.001
    of_kept = _ratio(np.where(kept, np.abs(got - exact), 0), np.broadcast_to(most + step, got.shape))
    # What was not kept is not clearly larger than the least of those that are; and what was is not clearly smaller.
    left = _ratio(np.where(kept, 0, np.abs(exact) - least), np.broadcast_to(2 * most + step, got.shape))
    taken = _ratio(np.where(kept, least - np.abs(exact), 0), np.broadcast_to(2 * most, got.shape))
    return max(of_kept, left, taken)


def _of_features(got: Rows, exact: Exact, most: Exact, asked: Asked, world: World) -> float:
    sae, count = world.sae, int(asked.given.dimensions or 0)
    encoder = sae.encoder.astype(np.float64)
    values = np.maximum(exact @ encoder.T + sae.encoder_bias, 0.0)
    allowed = most * np.linalg.norm(encoder, axis=1)
    least = np.maximum(np.sort(values, axis=1)[:, -count, None], 0.0)
    kept = got != 0
    if (kept.sum(axis=1) > count).any():
        return float("inf")
    of_kept = _ratio(np.where(kept, np.abs(got - values), 0), allowed)
    left = _ratio(np.where(kept, 0, values - least), 2 * allowed)
    return max(of_kept, left)


def _ratio(errors: Exact, allowed: Exact) -> float:
    """Return the largest error as a part of what is allowed. What is not a number is infinitely wrong."""
    if not errors.size:
        return 0.0
    parts = errors / np.maximum(allowed, 1e-30)
    return float(np.where(np.isnan(parts), np.inf, parts).max())


def noise_of(exact: Exact) -> Exact:
    """Return how far the rounding of float32 may move rows, [rows]."""
    return ROW_ERROR * np.linalg.norm(exact, axis=1) + 1e-12
