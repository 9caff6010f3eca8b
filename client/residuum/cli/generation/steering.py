"""The flags that steer, such as --add and --gate, and the vectors that they name."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import residuum
from residuum.directions.files import saved_directions
from residuum.values.selections.points import parse_point
from residuum.values.steering.gates import MEASURES, SITE_ADVICE
from residuum.values.steering.operations import Operation
from residuum.values.tensors.vector import load_vectors, rows_site

POSITIONS_HELP = "all, prompt, generated, last_prompt, or positions and slices as in Python, such as -4: or 0,8:16"


_GATE_LAYERS = "VECTOR@LAYERS chooses layers of a file of Directions.save"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("steering", "operations apply in the order given; each flag may be repeated")
    bounds = "either bound may be left empty, as in joy.npy@12::3.5"
    vector = (
        "VECTOR is a .npy file, FILE.safetensors:NAME, a file of Directions.save, which has a vector for each layer, "
        "or a stored row as REQUEST/LAYER/POSITION or REQUEST/SITE.LAYER/POSITION"
    )
    scale = "LAYERS as for --capture; SCALE defaults to 1"
    for name, metavar, help_text in (
        ("add", "VECTOR@LAYERS*SCALE", f"add a vector; {vector}; {scale} (default: none)"),
        ("ablate", "VECTOR@LAYERS*SCALE", "remove a direction (default: none)"),
        ("cap", "VECTOR@LAYERS:MIN:MAX", f"keep a projection between two bounds; {bounds} (default: none)"),
        ("replace", "VECTOR@LAYERS:VALUE", "set a projection (default: none)"),
        ("set", "VECTOR@LAYERS", "set whole rows to a vector (default: none)"),
        ("multiply", "VECTOR@LAYERS", "multiply rows by a vector, element by element (default: none)"),
        (
            "clamp-feature",
            "SAE:FEATURE@LAYERS:VALUE",
            "set a feature of an autoencoder, as in sae.safetensors:123@12:0; or bound it by :MIN:MAX (default: none)",
        ),
    ):
        group.add_argument(
            f"--{name}",
            dest="steer",
            action="append",
            default=[],
            type=functools.partial(_named, name),
            metavar=metavar,
            help=help_text,
        )
    group.add_argument(
        "--steer-positions", metavar="POSITIONS", help=f"the positions to steer: {POSITIONS_HELP} (default: all)"
    )
    group.add_argument(
        "--steer-site",
        metavar="SITE",
        help="the site to steer; `residuum info` lists them (default: resid_post)",
    )
    group.add_argument(
        "--keep-norm",
        action="store_true",
        help="after each operation, scale rows back to the norm that they had before it (default: no)",
    )
    group.add_argument(
        "--gate",
        metavar="VECTOR:THRESHOLD",
        help="apply the operations only to rows whose projection onto a vector is above the threshold; add ,below for "
        f"rows below it, ,cosine or ,inner_product for another measure, ,bias=B or ,sharpness=S; {_GATE_LAYERS} "
        "(default: none)",
    )


def _named(name: str, text: str) -> tuple[str, str]:
    return name, text


def operations_of(options: argparse.Namespace) -> list[Operation]:
    """Return the operations of a command line.

    Raises:
        InvalidRequest: A flag is invalid.
    """
    given = (options.steer_positions, options.steer_site, options.gate)
    if not options.steer and (options.keep_norm or given != (None, None, None)):
        options.usage_error(
            "--steer-positions, --steer-site, --keep-norm and --gate need --add, --ablate, --cap, --replace, --set, "
            "--multiply or --clamp-feature; give both"
        )
    gate, source = (None, None) if options.gate is None else _gate(options.gate)
    where = {
        "positions": options.steer_positions,
        "keep_norm": options.keep_norm,
        "site": options.steer_site,
        "gate": gate,
    }
    operations = [OPERATIONS[name](text, where) for name, text in options.steer]
    for operation in operations:
        rows_site(source, operation.site, advice=SITE_ADVICE)
    return operations


def load_all(files: list[str]) -> list[tuple[str, residuum.Vector]]:
    """Return the vectors of files with their names. Those of a/joy.npy and b/joy.npy have the same name."""
    return [named for file in files for named in load_vectors(file).items()]


def _scaled(kind: type[residuum.Add | residuum.Ablate], text: str, where: dict[str, Any]) -> Operation:
    place, star, scale = text.rpartition("*")
    vector = _placed(place if star else text)
    try:
        return kind(**vector, **where, scale=_number(scale, "Use VECTOR@LAYERS*SCALE.") if star else 1.0)
    except ValueError as error:
        raise residuum.InvalidRequest(f"--{kind.__name__.lower()} {text}: {error}") from None


def _bounds(text: str, where: dict[str, Any]) -> residuum.Cap:
    advice = "Use VECTOR@LAYERS:MIN:MAX; either bound may be left empty."
    vector, bounds = _with_numbers(text, 2, f"--cap {text}: {advice}")
    try:
        low, high = (_number(bound, advice) if bound else None for bound in bounds)
        return residuum.Cap(**vector, **where, min=low, max=high)
    except ValueError as error:
        raise residuum.InvalidRequest(f"--cap {text}: {error}") from None


def _replacement(text: str, where: dict[str, Any]) -> residuum.Replace:
    advice = "Use VECTOR@LAYERS:VALUE."
    vector, (value,) = _with_numbers(text, 1, f"--replace {text}: {advice}")
    try:
        return residuum.Replace(**vector, **where, value=_number(value, advice))
    except ValueError as error:
        raise residuum.InvalidRequest(f"--replace {text}: {error}") from None


def _clamped(text: str, where: dict[str, Any]) -> residuum.ClampFeature:
    """Parse SAE:FEATURE@LAYERS:VALUE or SAE:FEATURE@LAYERS:MIN:MAX."""
    place, at, rest = text.rpartition("@")
    path, colon, feature = place.rpartition(":")
    layers, *numbers = rest.split(":")
    advice = f"--clamp-feature {text}: use SAE:FEATURE@LAYERS:VALUE or SAE:FEATURE@LAYERS:MIN:MAX."
    if not (at and colon and feature.isdecimal()) or len(numbers) not in (1, 2):
        raise residuum.InvalidRequest(advice)
    try:
        names = ("value",) if len(numbers) == 1 else ("min", "max")
        bounds: dict[str, Any] = {
            name: float(number) if number else None for name, number in zip(names, numbers, strict=True)
        }
    except ValueError:
        raise residuum.InvalidRequest(advice) from None
    return residuum.ClampFeature(residuum.sae.load(path), feature=int(feature), layers=layers, **bounds, **where)


OPERATIONS: dict[str, Callable[[str, dict[str, Any]], Operation]] = {
    "add": functools.partial(_scaled, residuum.Add),
    "ablate": functools.partial(_scaled, residuum.Ablate),
    "cap": _bounds,
    "replace": _replacement,
    "set": lambda text, where: residuum.Set(**_placed(text), **where),
    "clamp-feature": _clamped,
    "multiply": lambda text, where: residuum.Multiply(**_placed(text), **where),
}
"""Parses the argument of each steering flag. The second argument holds the fields that all operations share."""


def _gate(text: str) -> tuple[residuum.Gate, residuum.Vector | residuum.Directions]:
    """Parse VECTOR:THRESHOLD,OPTION... Return the gate, and what VECTOR names."""
    source, colon, numbers = text.rpartition(":")
    if not source or not numbers:
        missing = "vector" if colon and not source else "threshold"
        raise residuum.InvalidRequest(f"--gate {text}: the {missing} is missing. Use VECTOR:THRESHOLD.")
    try:
        fields = _gate_fields(*numbers.split(","))
        found = _gate_vectors(source)
        one = next(iter(found.values())) if isinstance(found, residuum.Directions) and len(found) == 1 else found
        return residuum.Gate(one, **fields), found
    except ValueError as error:
        raise residuum.InvalidRequest(f"--gate {text}: {error}") from None


def _gate_fields(threshold: str, *options: str) -> dict[str, Any]:
    advice = (
        f"Use VECTOR:THRESHOLD, and after it below, {', '.join(MEASURES)}, bias=B or sharpness=S, each after a comma."
    )
    fields: dict[str, Any] = {"threshold": _number(threshold, advice)}
    for option in options:
        name, equals, value = option.partition("=")
        if equals and name in {"bias", "sharpness"}:
            fields[name] = _number(value, advice)
        elif option == "below":
            fields["below"] = True
        elif option in MEASURES:
            fields["measure"] = option
        else:
            raise ValueError(f"{option!r} is not an option of a gate. {advice}")
    return fields


def _number(text: str, advice: str) -> float:
    """Return a text as a number.

    Raises:
        ValueError: It is not a number. The message ends with the advice.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number. {advice}") from None


def _gate_vectors(source: str) -> residuum.Vector | residuum.Directions:
    """Return the vector of a gate, or those of several layers: VECTOR, or VECTOR@LAYERS of saved Directions."""
    if "@" in source:
        placed = _placed(source)
        if "layers" in placed:
            raise residuum.InvalidRequest(f"{source}: only a file of Directions.save has layers; leave out @LAYERS.")
        directions: residuum.Directions = placed["vector"]
        return directions
    return load(source)


_ROW = re.compile(r"(?P<request>[^/]+)/(?P<point>[^/]+)/(?P<position>-?\d+)")
"""A stored row. Request IDs have no slash."""


def _stored_row(request: str, point: str, position: str) -> residuum.StoredRow:
    """Return the row of a capture that a command line names; its point may be only a layer."""
    site, layers = parse_point(f"resid_post.{point}" if point[0].isdigit() else point)
    if layers is None or len(layers) != 1:
        raise residuum.InvalidRequest(
            f"{request}/{point}/{position} names no single row. A row of a capture names a point of one layer, such as "
            f"{request}/12/{position} or {request}/z.12/{position}."
        )
    return residuum.StoredRow(request, layer=layers[0], position=int(position), site=site)


def _with_numbers(text: str, count: int, advice: str) -> tuple[dict[str, Any], list[str]]:
    """Parse VECTOR@LAYERS:NUMBER... Return the vector with its layers, and the numbers."""
    source, at, rest = text.rpartition("@")
    layers, *numbers = rest.split(":")
    if at and len(numbers) != count:
        raise residuum.InvalidRequest(advice)
    return _placed(f"{source}{at}{layers}"), numbers


def _placed(text: str) -> dict[str, Any]:
    """Parse VECTOR@LAYERS. Return the vector and the layers as keyword arguments of an operation."""
    source, at, layers = text.rpartition("@")
    if not at:
        raise residuum.InvalidRequest(f"{text!r} names no layers; use VECTOR@LAYERS, such as joy.npy@12.")
    if (stored := _ROW.fullmatch(source)) and not Path(source).exists():
        return {"vector": _stored_row(**stored.groupdict()), "layers": layers}
    found = load(source)
    if isinstance(found, residuum.Directions):
        chosen = {layer: vector for layer, _, vector in found.placed(layers)}
        return {"vector": residuum.Directions(chosen, origin=found.origin)}
    return {"vector": found, "layers": layers}


def load(source: str) -> residuum.Directions | residuum.Vector:
    """Return what VECTOR names.

    Raises:
        InvalidRequest: It names none of the vectors of the file.
    """
    path, colon, name = source.rpartition(":")
    directions = None if colon else saved_directions(source)
    if directions is not None:
        return directions
    vectors = load_vectors(path if colon else source)
    if not colon and len(vectors) == 1:
        return next(iter(vectors.values()))
    if name not in vectors or not colon:
        raise residuum.InvalidRequest(f"{source}: choose one of its vectors: {', '.join(vectors)}.")
    return vectors[name]
