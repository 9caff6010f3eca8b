"""Reads and writes safetensors files, and reads activations from them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.exports.parts import prefix
from residuum.exports.writers.safetensors import FORMAT
from residuum.values.captures.blocks import AnyBlock, Block, EncodedBlock
from residuum.values.captures.manifest import Manifest
from residuum.values.tensors.files import Arrays, read_safetensors

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations


def write_safetensors(path: str | os.PathLike[str], arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write arrays and metadata to a file. A failure leaves no new file behind.

    Raises:
        OSError: The file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        with _permissions_of(path):
            save_file(arrays, os.fspath(path), metadata=metadata)
    except (SafetensorError, OSError) as error:  # safetensors wraps errors of the file system
        raise OSError(f"{os.fspath(path)} cannot be written: {error}") from None


@contextlib.contextmanager
def _permissions_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep the permissions of the file that the block replaces; a new file gets the default ones.

    safetensors writes a temporary file that only its owner may read, and renames it to the target.
    """
    target = Path(path)
    existed = target.exists()
    with target.open("ab") as file:  # creates it with the umask, which cannot be read without changing it
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        yield
    except BaseException:
        if not existed:
            target.unlink()
        raise
    target.chmod(mode)


def load(path: str | os.PathLike[str]) -> Activations:
    """Read activations; see `Activations.from_safetensors`."""
    from residuum.values.captures.activations import Activations

    arrays, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise InvalidRequest(
            f"{path} was not written by Activations.to_safetensors. Read it with safetensors' own loaders.",
            reason="INVALID_FIELD",
        )
    keys = sorted(_key(name) for name in arrays if name.endswith(".positions"))
    layers = {site: _layers(arrays, (sequence, site)) for sequence, site in keys}
    manifest = Manifest.from_json(metadata["manifest"])
    sites = metadata["sites"].split(",") if "sites" in metadata else manifest.sites
    order = {site: index for index, site in enumerate(sites)}
    keys.sort(key=lambda key: (key[0], order.get(key[1], len(order))))
    acts = Activations(manifest, layers, {key: _block(arrays, key, layers[key[1]], manifest) for key in keys})
    sequence, _, site = metadata.get("selected", "").partition("/")
    return acts.select(sequence=int(sequence), site=site) if site else acts


def _block(arrays: Arrays, key: tuple[int, str], layers: tuple[int, ...], manifest: Manifest) -> AnyBlock:
    base = prefix(key[0]) + key[1]
    positions = arrays[f"{base}.positions"]
    present = arrays.get(f"{base}.present", np.ones((len(layers), len(positions)), dtype=np.bool_))
    names = [f"{base}.{layer}" for layer in layers]
    if names[0] in arrays:
        return Block(positions, np.stack([arrays[name] for name in names]), present)
    form = manifest.format_at(key[1])
    rows = np.empty(present.shape, form.row_dtype)
    for field in form.row_dtype.names or ():
        rows[field] = [arrays[f"{name}.{field}"] for name in names]
    if form.prefix_dtype is None:
        return EncodedBlock(positions, rows, present, form)
    return EncodedBlock(positions, rows, present, form, *_prefixes(arrays, names, form.prefix_dtype))


def _prefixes(arrays: Arrays, names: list[str], dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Return the prefixes of all layers, and the index of each row's prefix, [layers, positions]."""
    counts = [len(arrays[f"{name}.scale"]) for name in names]
    prefixes = np.empty(sum(counts), dtype)
    for field in dtype.names or ():
        prefixes[field] = np.concatenate([arrays[f"{name}.{field}"] for name in names])
    firsts = np.cumsum([0, *counts[:-1]])
    groups = [arrays[f"{name}.group"] + first for name, first in zip(names, firsts, strict=True)]
    return prefixes, np.stack(groups).astype(np.int32)


def _layers(arrays: Arrays, key: tuple[int, str]) -> tuple[int, ...]:
    base = f"{prefix(key[0])}{key[1]}."
    names = {name.removeprefix(base).partition(".")[0] for name in arrays if name.startswith(base)}
    return tuple(sorted(int(name) for name in names if name.isdigit()))


def _key(name: str) -> tuple[int, str]:
    site = name.removesuffix(".positions")
    sequence, slash, rest = site.partition("/")
    return (int(sequence.removeprefix("sequence")), rest) if slash else (0, site)
