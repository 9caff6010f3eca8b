"""Steering operations, as the page describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from residuum.directions.values import Directions
from residuum.ui.answers import invalid
from residuum.ui.gallery import Gallery
from residuum.values.selections.layers_and_positions import layer_list
from residuum.values.steering.operations import Ablate, Add, Cap, Operation, Replace
from residuum.values.tensors.vector import rows_site

_PHASES = {"all": None, "prompt": "prompt", "generated": "generated"}
_KINDS = {"add": ("scale",), "ablate": ("scale",), "cap": ("min", "max"), "replace": ("value",)}
"""The operations, and the numbers that each takes."""


def operations_of(items: Any, gallery: Gallery) -> list[Operation]:
    """Return the operations that the page describes.

    Args:
        items: A list of objects with `kind`, `direction`, `layers` (a text such as "12-14", or "all"), `from` (the
            layer whose vector is used everywhere; empty: each layer's own), `phase`, and the numbers of the kind.
        gallery: Where the directions are.

    Raises:
        InvalidRequest: An operation makes no sense; the message says why.
        FileNotFoundError: A direction does not exist.
    """
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise invalid("operations must be a list of objects.")
    return [operation for item in items for operation in _operations(item, gallery)]


def _operations(item: Mapping[str, Any], gallery: Gallery) -> list[Operation]:
    kind, phase = item.get("kind"), item.get("phase", "all")
    if kind not in _KINDS:
        raise invalid(f"There is no operation {kind!r}. Choose among {', '.join(_KINDS)}.")
    if phase not in _PHASES:
        raise invalid(f"There is no phase {phase!r}. Choose among {', '.join(_PHASES)}.")
    directions = gallery.load(str(item.get("direction", "")))
    shared: dict[str, Any] = {"positions": _PHASES[phase], "keep_norm": item.get("keep_norm") is True}
    layers = str(item.get("layers", "all")).strip() or "all"
    from_layer = str(item.get("from", ""))
    if from_layer:
        if not from_layer.isdecimal() or int(from_layer) not in directions:
            raise invalid(f"The direction has no layer {from_layer!r}. Choose among {list(directions.layers)}.")
        shared |= {
            "vector": directions[int(from_layer)],
            "layers": layers,
            "site": rows_site(directions, directions.steering_site),
        }
    else:
        shared["vector"] = _own(directions, layers)
    numbers = {name: _number(item, name) for name in _KINDS[kind]}
    return [_make(kind, shared, {name: value for name, value in numbers.items() if value is not None})]


def _own(directions: Directions, layers: str) -> Directions:
    """Return the directions of some layers."""
    placed = directions.placed(None if layers == "all" else layer_list(layers))
    return Directions({layer: vector for layer, _, vector in placed}, origin=directions.origin)


def _make(kind: str, shared: dict[str, Any], numbers: dict[str, float]) -> Operation:
    vector = shared.pop("vector")
    if kind == "add":
        return Add(vector, **shared, scale=numbers.get("scale", 1.0))
    if kind == "ablate":
        return Ablate(vector, **shared, scale=numbers.get("scale", 1.0))
    if kind == "cap":
        return Cap(vector, **shared, min=numbers.get("min"), max=numbers.get("max"))
    if "value" not in numbers:
        raise invalid("The operation replace needs a value.")
    return Replace(vector, **shared, value=numbers["value"])


def _number(item: Mapping[str, Any], name: str) -> float | None:
    value = item.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise invalid(f"{name} must be a number, not {value!r}.")
    return float(value)
