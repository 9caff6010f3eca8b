"""Opens exports with each format's own library: a mapping from the name of a sequence and site to its content."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet
import zarr
from safetensors import safe_open


@dataclass
class Opened:
    """One sequence at one site."""

    rows: dict  # layer -> float32 [positions, hidden]
    positions: list
    token_ids: list
    present: np.ndarray | None  # None: the file has no such field, so all rows are present


def of_arrays(arrays):
    found = {}
    for name in [name.removesuffix(".positions") for name in arrays if name.endswith(".positions")]:
        own = {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}
        layers = {int(key): array.astype(np.float32) for key, array in own.items() if key.isdigit()}
        found[name] = Opened(layers, own["positions"].tolist(), own["token_ids"].tolist(), own.get("present"))
    return found


def npz(path):
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    return of_arrays(arrays), json.loads(str(arrays["manifest"]))


def safetensors(path):
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return of_arrays(arrays), json.loads(file.metadata()["manifest"])


def zarr_group(path):
    root = zarr.open_group(path, mode="r")
    found = {}
    for name, group in root.members(max_depth=None):
        if (
            "activations" not in getattr(group, "attrs", {})
            and isinstance(group, zarr.Group)
            and "activations" in group
        ):
            values, layers = group["activations"][:], group.attrs["layers"]
            present = group["present"][:] if "present" in group else None
            rows = dict(zip(layers, values.astype(np.float32), strict=True))
            found[name] = Opened(rows, group["positions"][:].tolist(), group["token_ids"][:].tolist(), present)
    return found, root.attrs["manifest"]


def parquet(path):
    """Missing rows are not in the file, so they become NaN."""
    table = pyarrow.parquet.read_table(path)
    found = {}
    records = table.to_pylist()
    for name in dict.fromkeys((record["sequence"], record["site"]) for record in records):
        own = [record for record in records if (record["sequence"], record["site"]) == name]
        layers = sorted({record["layer"] for record in own})
        tokens = {record["position"]: -1 if record["token_id"] is None else record["token_id"] for record in own}
        places = {(record["layer"], record["position"]): record["activation"] for record in own}
        width = len(own[0]["activation"])
        rows = {
            layer: np.array([places.get((layer, at), [np.nan] * width) for at in sorted(tokens)], np.float32)
            for layer in layers
        }
        key = (f"sequence{name[0]}/" if name[0] else "") + name[1]
        found[key] = Opened(rows, sorted(tokens), [tokens[at] for at in sorted(tokens)], None)
    return found, json.loads(table.schema.metadata[b"residuum.manifest"])


OPENERS = {"npz": npz, "safetensors": safetensors, "zarr": zarr_group, "parquet": parquet}
