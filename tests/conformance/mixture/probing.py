"""Random probes and rules, and the scores that the reference's rows have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import residuum
from residuum.wire.limits import MAX_PROBE_OUTPUTS
from tests.conformance.mixture.expected import ROW_ERROR
from tests.conformance.mixture.operations import Placed, draw_operations

if TYPE_CHECKING:
    import numpy.typing as npt

    from bench.conformance.reference import Rows
    from tests.conformance.mixture.world import World

    Exact = npt.NDArray[np.float64]

_STEEPEST = {None: 1.0, "relu": 1.0, "tanh": 1.0, "sigmoid": 0.25, "gelu": 1.13}
"""The largest slope of what a layer of an MLP applies."""


class RuleDrawn(NamedTuple):
    """A rule, and the operations with which it steers; none if it does not."""

    given: residuum.Rule
    operations: list[Placed]


def draw_probes(rng: np.random.Generator, world: World) -> list[residuum.Probe]:
    """Return one to three probes of any kind, with no more vectors than a request may have."""
    probes = [_draw_probe(rng, world, f"p{number}") for number in range(int(rng.integers(1, 4)))]
    while sum(len(probe.vectors) for probe in probes) > MAX_PROBE_OUTPUTS:
        probes.pop()
    return probes


def _draw_probe(rng: np.random.Generator, world: World, name: str) -> residuum.Probe:
    known = [(site, layer) for site in world.info.probe_sites if site in world.sites for layer in world.layers[site]]
    count = int(rng.choice([1, 1, 2, 3]))
    places = [known[int(number)] for number in rng.choice(len(known), size=min(count, len(known)), replace=False)]

    def vectors(*shape: int) -> Rows:
        units = [1 / (world.scales[site] * math.sqrt(world.width(site) * len(places))) for site, _ in places]
        parts = [
            unit * rng.standard_normal((*shape, world.width(site)))
            for unit, (site, _) in zip(units, places, strict=True)
        ]
        drawn: Rows = np.concatenate(parts, axis=-1).astype(np.float32)
        return drawn

    smooth = (None, None, residuum.EMA(float(rng.uniform(0.2, 0.95))), residuum.RollingMax(int(rng.integers(1, 9))),
              residuum.RollingMean(int(rng.integers(1, 9))), residuum.RollingMean(), residuum.RollingMax())  # fmt: skip
    options: dict[str, Any] = {
        "layer": [layer for _, layer in places] if len(places) > 1 else places[0][1],
        "site": [site for site, _ in places] if len(places) > 1 else places[0][0],
        "name": name,
        "activation": (None, "sigmoid", "softmax")[int(rng.integers(3))],
        "smooth": smooth[int(rng.integers(len(smooth)))],
    }
    outputs = int(rng.integers(1, 4))
    if options["activation"] == "softmax":
        outputs = max(outputs, 2)
    kind = int(rng.integers(4))
    if kind == 0:
        heads = int(rng.integers(1, 4))
        slopes = rng.normal(size=heads) * 0.05 if rng.random() < 0.5 else None
        return residuum.Probe.from_attention(
            3 * vectors(heads), vectors(heads, outputs), rng.normal(size=outputs), position_weights=slopes, **options
        )
    if kind == 1:
        hidden = int(rng.integers(2, 6))
        applied = (None, "relu", "tanh", "sigmoid", "gelu")[int(rng.integers(5))]
        layer = residuum.ProbeLayer(rng.normal(size=(outputs, hidden)), rng.normal(size=outputs), applied)
        return residuum.Probe(vectors(hidden), rng.normal(size=hidden), mlp=[layer], **options)
    return residuum.Probe(vectors(outputs), rng.normal(size=outputs) * 0.5, **options)


def draw_rules(
    rng: np.random.Generator, world: World, probes: list[residuum.Probe], most: int, *, may_steer: bool
) -> list[RuleDrawn]:
    """Return up to three rules of the probes, for a reply of at most `most` tokens."""
    rules = []
    for number in range(int(rng.integers(1, 4))):
        probe = probes[int(rng.integers(len(probes)))]
        operations: list[Placed] = []
        then: Any = str(rng.choice(["flag", "abort"], p=[0.7, 0.3]))
        if may_steer and rng.random() < 0.5:
            operations = draw_operations(rng, world, patches=False)
            then = [item.given for item in operations]
        bounded = probe.activation is not None
        threshold = float(rng.uniform(0.2, 0.8)) if bounded else float(rng.normal() * 1.5)
        side = str(rng.choice(["above", "below"]))
        given = residuum.Rule(
            probe, **{side: threshold}, for_tokens=min(int(rng.choice([1, 1, 2, 4])), most), then=then,
            output=int(rng.integers(probe.num_outputs)), name=f"r{number}",
        )  # fmt: skip
        rules.append(RuleDrawn(given, operations))
    return rules


class Scored(NamedTuple):
    """Scores that the reference's rows have, and how far those of the service may be from them."""

    values: Exact
    """[positions, outputs]."""
    bounds: Exact


def score(probe: residuum.Probe, rows: Rows) -> Scored:
    """Return the scores of all positions, without smoothing.

    The bounds follow from that of rows: the product with a vector is off by at most the row's error times the vector's
    length, and each layer multiplies that at most by its weights and its largest slope.

    Args:
        probe: The probe.
        rows: The reference's rows at its places, one after the other, [positions, width].
    """
    exact, weights = rows.astype(np.float64), probe.weights.astype(np.float64)
    values = exact @ weights.T + probe.bias
    # Products are added up in float32, which adds a rounding error of the size of their terms.
    errors = ROW_ERROR * np.outer(np.linalg.norm(exact, axis=1), np.linalg.norm(weights, axis=1)) + 1e-6
    if probe.attention is not None:
        values, errors = _pooled(probe, values, errors)
    for layer in probe.mlp:
        hidden = {
            None: lambda x: x,
            "relu": lambda x: np.maximum(x, 0),
            "tanh": np.tanh,
            "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
            "gelu": lambda x: torch.nn.functional.gelu(torch.from_numpy(x)).numpy(),
        }[layer.activation](values)
        values = hidden @ layer.weights.T.astype(np.float64) + layer.bias
        errors = _STEEPEST[layer.activation] * errors @ np.abs(layer.weights.T.astype(np.float64)) + 1e-6
    if probe.activation == "sigmoid":
        values, errors = 1 / (1 + np.exp(-values)), errors / 4
    elif probe.activation == "softmax":
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        values = powers / powers.sum(axis=1, keepdims=True)
        errors = np.broadcast_to(errors.max(axis=1, keepdims=True) / 2, values.shape)
    return Scored(values, errors + 1e-6)


def _pooled(probe: residuum.Probe, values: Exact, errors: Exact) -> tuple[Exact, Exact]:
    """Pool by the definition: a softmax over all positions up to each. Weights move by at most exp(2 · error)."""
    assert probe.attention is not None
    heads = probe.attention.heads
    slopes = np.zeros(heads) if probe.attention.position_weights is None else probe.attention.position_weights
    count = len(values)
    logits = values[:, :heads] + np.arange(count)[:, None] * np.asarray(slopes, np.float64)
    of_heads, off = (part[:, heads:].reshape(count, heads, -1) for part in (values, errors))
    pooled, bounds = [], []
    for end in range(1, count + 1):
        powers = np.exp(logits[:end] - logits[:end].max(axis=0))
        shares = (powers / powers.sum(axis=0))[..., None]
        moved = np.expm1(2 * errors[:end, :heads].max(axis=0))[:, None]
        pooled.append((shares * of_heads[:end]).sum(axis=(0, 1)))
        bounds.append((moved * np.abs(of_heads[:end]).max(axis=0) + off[:end].max(axis=0)).sum(axis=0))
    return np.array(pooled), np.array(bounds)


def smoothed(probe: residuum.Probe, values: Exact) -> Exact:
    """Return smoothed scores, by the definition. Smoothing enlarges no error."""
    kind = probe.smooth
    if kind is None or not len(values):
        return values
    found = [values[0]]
    for at in range(1, len(values)):
        if isinstance(kind, residuum.EMA):
            found.append(kind.decay * found[-1] + (1 - kind.decay) * values[at])
            continue
        window = values[max(at + 1 - (kind.tokens or at + 1), 0) : at + 1]
        found.append(window.max(axis=0) if isinstance(kind, residuum.RollingMax) else window.mean(axis=0))
    return np.array(found)


def running_bound(bounds: Exact) -> Exact:
    """Return bounds of smoothed scores: the largest one until then."""
    largest: Exact = np.maximum.accumulate(bounds, axis=0)
    return largest


def firing(rule: residuum.Rule, scores: npt.NDArray[np.float32]) -> int | None:
    """Return the token at which a rule fires, by its definition: float32 [tokens, outputs]."""
    column = scores.reshape(len(scores), -1)[:, int(rule.output)]
    held = 0
    for token, value in enumerate(column.tolist()):
        holds = value > np.float32(rule.above) if rule.above is not None else value < np.float32(rule.below)
        held = held + 1 if holds else 0
        if held == rule.for_tokens:
            return token
    return None
