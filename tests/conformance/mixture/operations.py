"""Random steering operations: as the client gives them, and as the reference applies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import residuum
from residuum.values.captures.manifest_records import SteeringRecord
from tests.conformance.mixture.positions import ALL, Chosen, draw_positions
from tests.conformance.steering import ablate, add, cap, keeping_norm, replace, tensor

if TYPE_CHECKING:
    import numpy as np

    from bench.conformance.reference import Change
    from tests.conformance.mixture.world import World

_GATED = 0.25
"""The share of operations with a gate."""
_KEEPS_NORM = 0.2
_BY_LAYER = 0.3
"""The share of operations with a vector for each layer."""


class Applied(NamedTuple):
    """What an operation does to rows at one layer."""

    change: Change
    distance: Callable[[Tensor], Tensor] | None = None
    """How far each row is from a jump of the operation, relative to what rounding moves; None: it has no jump."""


class Placed(NamedTuple):
    """An operation in both forms."""

    given: residuum.Operation
    """For the client."""
    site: str
    layers: dict[int, Applied]
    """For the reference, by layer."""
    positions: Chosen
    rows: dict[residuum.StoredRow, residuum.Vector] = {}  # noqa: RUF012 - never changed
    """The stored rows that it names."""

    def record(self) -> SteeringRecord:
        """Return what a manifest must say of it."""
        return SteeringRecord.from_proto(self.given.with_rows(self.rows).to_proto())


def draw_operations(rng: np.random.Generator, world: World, *, patches: bool = True) -> list[Placed]:
    """Return up to five operations. Half of the time, some are at the same place."""
    operations: list[Placed] = []
    for _ in range(int(rng.integers(1, 6))):
        same = operations[-1] if operations and rng.random() < 0.5 else None
        operations.append(_draw(rng, world, same, patches=patches))
    return operations


def _draw(rng: np.random.Generator, world: World, same: Placed | None, *, patches: bool) -> Placed:
    site = same.site if same else str(rng.choice(world.steerable))
    there = world.layers[site]
    count = int(rng.integers(1, len(there) + 1)) if rng.random() < 0.4 else 1
    layers = tuple(same.layers) if same else tuple(sorted(int(x) for x in rng.choice(there, size=count, replace=False)))
    positions = draw_positions(rng) if rng.random() < 0.5 else ALL
    at: dict[str, Any] = {"positions": positions.given, "site": site}
    keeps = bool(rng.random() < _KEEPS_NORM)
    if keeps:
        at["keep_norm"] = True
    kind = str(rng.choice(["add", "ablate", "cap", "replace", "set", "multiply", "clamp_feature", "patch"]))
    if kind == "clamp_feature" and world.width(site) == world.info.hidden_size:
        given, applied = _clamp(rng, world, layers, at)
        return Placed(given, site, _kept(dict.fromkeys(layers, applied), keeps=keeps), positions)
    if kind == "patch" and patches and world.stored is not None:
        layer, position = int(rng.choice(there)), int(rng.integers(world.stored.positions))
        row = torch.from_numpy(world.stored.rows[site][layer][position].copy())
        stored = residuum.StoredRow(world.stored.capture_id, layer=layer, position=position, site=site)
        given = residuum.Set(stored, layers=list(layers), **at)
        applied = Applied(_set(row))
        rows = {stored: residuum.Vector.from_array(row.numpy())}
        return Placed(given, site, _kept(dict.fromkeys(layers, applied), keeps=keeps), positions, rows)
    return _with_vectors(rng, world, kind, site, layers, positions, at, keeps=keeps)


def _with_vectors(
    rng: np.random.Generator,
    world: World,
    kind: str,
    site: str,
    layers: tuple[int, ...],
    positions: Chosen,
    at: dict[str, Any],
    *,
    keeps: bool,
) -> Placed:
    known = world.vectors[site]
    by_layer = {layer: known[int(rng.integers(len(known)))] for layer in layers}
    if rng.random() >= _BY_LAYER:
        by_layer = dict.fromkeys(layers, by_layer[layers[0]])
        vector: Any = by_layer[layers[0]]
        at["layers"] = list(layers)
    else:
        vector = by_layer
    unit = world.scales[site]
    make, change = _kinds(rng, unit)[kind if kind in _KINDS else "add"]
    applied = {layer: Applied(change(tensor(item))) for layer, item in by_layer.items()}
    if rng.random() < _GATED:
        gate = _draw_gate(rng, world, site)
        at["gate"] = gate
        applied = {layer: _gated(item.change, gate) for layer, item in applied.items()}
    return Placed(make(vector, at), site, _kept(applied, keeps=keeps), positions)


_KINDS = ("add", "ablate", "cap", "replace", "set", "multiply")


def _kinds(rng: np.random.Generator, unit: float) -> dict[str, tuple[Any, Any]]:
    scale, part, value = float(rng.uniform(-1, 1)), float(rng.uniform(0.2, 1)), float(rng.normal() * unit)
    low, high = sorted(float(x) for x in rng.normal(size=2) * 0.5 * unit)
    low_only = bool(rng.random() < 0.3)
    return {
        "add": (lambda v, at: residuum.Add(v, scale=scale, **at), lambda v: add(v, _f32(scale))),
        "ablate": (
            lambda v, at: residuum.Ablate(v, scale=part, **at),
            lambda v: lambda x: x + _f32(part) * (ablate(v)(x) - x),
        ),
        "cap": (
            lambda v, at: residuum.Cap(v, min=low, max=None if low_only else high, **at),
            lambda v: cap(v, _f32(low), float("inf") if low_only else _f32(high)),
        ),
        "replace": (lambda v, at: residuum.Replace(v, value=value, **at), lambda v: replace(v, _f32(value))),
        "set": (lambda v, at: residuum.Set(v, **at), _set),
        "multiply": (lambda v, at: residuum.Multiply(v, **at), lambda v: lambda x: x * v),
    }


def _clamp(
    rng: np.random.Generator, world: World, layers: tuple[int, ...], at: dict[str, Any]
) -> tuple[residuum.Operation, Applied]:
    sae, feature = world.sae, int(rng.integers(world.sae.features))
    low, high = sorted(float(x) for x in rng.uniform(0, 1, size=2))
    bounds: dict[str, float] = [{"value": low}, {"min": low}, {"max": high}, {"min": low, "max": high}][
        int(rng.integers(4))
    ]
    given = residuum.ClampFeature(sae, feature=feature, layers=list(layers), **bounds, **at)
    least, most = (_f32(bounds.get("value", bounds.get(side, end))) for side, end in (("min", -1e30), ("max", 1e30)))
    encoder, decoder = (torch.from_numpy(part[feature].copy()) for part in (sae.encoder, sae.decoder))
    bias = float(sae.encoder_bias[feature])

    def change(x: Tensor) -> Tensor:
        value = (x @ encoder + bias).relu()
        return x + (value.clamp(least, most) - value)[:, None] * decoder

    return given, Applied(change)


def _draw_gate(rng: np.random.Generator, world: World, site: str) -> residuum.Gate:
    vector = world.vectors[site][int(rng.integers(len(world.vectors[site])))]
    measure = str(rng.choice(["projection", "inner_product", "cosine"]))
    unit = {
        "projection": world.scales[site],
        "inner_product": world.scales[site] * vector.norm,
        "cosine": world.width(site) ** -0.5,
    }[measure]
    return residuum.Gate(
        vector,
        float(rng.normal() * unit),
        bias=float(rng.normal() * 0.3 * unit) if rng.random() < 0.3 else 0.0,
        sharpness=float(rng.uniform(1, 5) / unit) if rng.random() < 0.5 else None,
        measure=measure,
        below=bool(rng.random() < 0.5),
    )


def _gated(change: Change, gate: residuum.Gate) -> Applied:
    assert isinstance(gate.vector, residuum.Vector)
    v = tensor(gate.vector)

    def above(x: Tensor) -> Tensor:
        product = x @ v
        measured = {
            "projection": product / v.norm(),
            "inner_product": product,
            "cosine": product / v.norm() / x.norm(dim=-1),
        }[gate.measure]
        score = measured + gate.bias - gate.threshold
        return -score if gate.below else score

    def changed(x: Tensor) -> Tensor:
        score = above(x)
        opening = (score > 0).float() if gate.sharpness is None else torch.sigmoid(gate.sharpness * score)
        return x + opening[:, None] * (change(x) - x)

    def distance(x: Tensor) -> Tensor:
        length = x.norm(dim=-1)
        unit = {"projection": length, "inner_product": length * v.norm(), "cosine": torch.ones_like(length)}
        return above(x).abs() / unit[gate.measure]

    return Applied(changed, None if gate.sharpness is not None else distance)


def _kept(applied: dict[int, Applied], *, keeps: bool) -> dict[int, Applied]:
    if not keeps:
        return applied
    return {layer: item._replace(change=keeping_norm(item.change)) for layer, item in applied.items()}


def _set(v: Tensor) -> Change:
    return lambda x: v.expand_as(x).clone()


def _f32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
