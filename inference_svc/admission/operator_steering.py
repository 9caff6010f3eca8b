"""The operations of the operator's rules that steer, and the files of their vectors.

    [[rule.steer]]
    add = { vector = "joy.npy", scale = 2.0 }   # or ablate, cap, replace, set, multiply; FILE.safetensors:NAME
    layers = [12]

A table has the fields of the contract's `SteeringOperation`, in protobuf's JSON form, with two differences: it names
files where the contract has digests, and layers may be a list.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import json_format

from inference_svc.admission.steering import directions_of, uses_of
from residuum.v1 import steering_pb2, tensor_pb2
from residuum.wire.digests import vector_message
from residuum.wire.limits import MAX_DIRECTION_NORM, MIN_DIRECTION_NORM

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from inference_svc.model_facts import ModelFacts

_FILES = {"vector": "digest", "encoder_vector": "encoder_digest"}
"""The fields that name a file, and those of the contract that they stand for."""
_LISTS = {"layer_vectors": "layer_digests"}


def load_steering(
    tables: Iterable[Mapping[str, Any]], folder: Path
) -> tuple[steering_pb2.SteeringSpec, dict[bytes, tensor_pb2.Vector]]:
    """Return the operations of a rule, and their vectors by digest.

    Args:
        tables: The tables of the file of rules.
        folder: The folder that the names of files are relative to.

    Raises:
        ValueError: A table is no operation, or a file holds no vector.
    """
    vectors: dict[bytes, tensor_pb2.Vector] = {}
    spec = steering_pb2.SteeringSpec()
    for table in tables:
        fields = _with_digests(table, folder, vectors)
        if isinstance(fields.get("layers"), list):
            fields["layers"] = {"list": {"layers": fields["layers"]}}
        if isinstance(fields.get("site"), str):
            fields["site"] = f"SITE_{fields['site'].upper().removeprefix('SITE_')}"
        try:
            json_format.ParseDict(fields, spec.operations.add())
        except json_format.ParseError as error:
            raise ValueError(f"a table of steer is no SteeringOperation: {error}") from None
    return spec, vectors


def check_vectors(
    steering: steering_pb2.SteeringSpec, vectors: Mapping[bytes, tensor_pb2.Vector], facts: ModelFacts
) -> None:
    """Check the vectors of a checked spec against the model, as a request's own are.

    Raises:
        ValueError: A vector is not as long as the rows, or has no direction.
    """
    for use in uses_of(steering, facts):
        length = len(vectors[use.digest].values) // 4  # float32
        if length != use.width:
            raise ValueError(f"a vector has {length} elements, but the rows that it steers have {use.width}")
    for digest in directions_of(steering):
        norm = float(np.linalg.norm(np.frombuffer(vectors[digest].values, "<f4").astype(np.float64)))
        if not MIN_DIRECTION_NORM <= norm <= MAX_DIRECTION_NORM:
            raise ValueError(
                f"a vector of ablate, cap, replace or a gate has the norm {norm:g}; it must be from "
                f"{MIN_DIRECTION_NORM:g} to {MAX_DIRECTION_NORM:g}"
            )


def _with_digests(table: Mapping[str, Any], folder: Path, vectors: dict[bytes, tensor_pb2.Vector]) -> dict[str, Any]:
    """Return a table with digests in the place of files, and add the vectors of the files."""

    def digest_of(name: object) -> str:
        vector = _load(str(name), folder)
        vectors[vector.digest] = vector
        return base64.b64encode(vector.digest).decode()

    fields: dict[str, Any] = {}
    for name, value in table.items():
        if name in {*_FILES.values(), *_LISTS.values()}:
            raise ValueError(f"steer has {name}; name the file of the vector instead, such as vector = 'joy.npy'")
        if name in _FILES:
            fields[_FILES[name]] = digest_of(value)
        elif name in _LISTS:
            if not isinstance(value, list):
                raise ValueError(f"{name} is {value!r}; it must be a list of files, one for each layer")
            fields[_LISTS[name]] = [digest_of(item) for item in value]
        else:
            fields[name] = _with_digests(value, folder, vectors) if isinstance(value, dict) else value
    return fields


def _load(name: str, folder: Path) -> tensor_pb2.Vector:
    """Return the vector of NAME.npy, or of FILE.safetensors:NAME.

    Raises:
        ValueError: There is none.
    """
    from safetensors import SafetensorError, safe_open

    path, colon, tensor = name.rpartition(".safetensors:")
    try:
        if colon:
            with safe_open(folder / f"{path}.safetensors", framework="numpy") as opened:
                values = opened.get_tensor(tensor)
        else:
            values = np.load(folder / name, allow_pickle=False)
        vector = np.asarray(values).astype(np.float32, casting="same_kind")
    except FileNotFoundError:
        raise ValueError(f"there is no file {folder / name}") from None
    except (OSError, SafetensorError, TypeError, ValueError, EOFError) as error:
        raise ValueError(f"{folder / name} holds no vector: {error}") from None
    if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
        raise ValueError(f"{folder / name} holds no vector: it must have one dimension and finite numbers")
    return vector_message(vector)
