"""safetensors files, and activations in them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum._blocks import Block
from residuum._exports.parts import prefix
from residuum._exports.safetensors import FORMAT
from residuum.exceptions import InvalidRequest
from residuum.manifest import Manifest

if TYPE_CHECKING:
    from residuum.activations import Activations

Arrays = dict[str, npt.NDArray[Any]]


def write_safetensors(path: str | os.PathLike[str], arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write arrays and metadata, or leave nothing behind.

    Raises:
        OSError: The file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        with _permissions_of(path):
            save_file(arrays, os.fspath(path), metadata=metadata)
    except (SafetensorError, OSError) as error:  # its name for whatever the file system says
        raise OSError(f"{os.fspath(path)} cannot be written: {error}") from None


@contextlib.contextmanager
def _permissions_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give the file that the block writes the permissions that it had, or those of any new file.

    safetensors writes another file and puts it in this one's place; that other file is for its owner alone.
    """
    target = Path(path)
    existed = target.exists()
    with target.open("ab") as file:  # makes it as the umask says; only this tells what that is, without changing it
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
    from residuum.activations import Activations

    arrays, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise InvalidRequest(f"{path} was not written by Activations.to_safetensors.", reason="INVALID_FIELD")
    keys = sorted(_key(name) for name in arrays if name.endswith(".positions"))
    layers = _layers(arrays, keys[0])
    manifest = Manifest.from_json(metadata["manifest"])
    sites = metadata["sites"].split(",") if "sites" in metadata else manifest.sites
    order = {site: index for index, site in enumerate(sites)}
    keys.sort(key=lambda key: (key[0], order.get(key[1], len(order))))
    acts = Activations(manifest, layers, {key: _block(arrays, key, layers) for key in keys})
    sequence, _, site = metadata.get("selected", "").partition("/")
    return acts.select(sequence=int(sequence), site=site) if site else acts


def read_safetensors(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, str]]:
    """Read a file's arrays and its metadata.

    Raises:
        FileNotFoundError: There is no such file.
        InvalidRequest: It is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return arrays, file.metadata() or {}
    except SafetensorError as error:
        raise InvalidRequest(f"{path} is not a safetensors file: {error}", reason="INVALID_FIELD") from None


def _block(arrays: Arrays, key: tuple[int, str], layers: tuple[int, ...]) -> Block:
    base = prefix(key[0]) + key[1]
    values = np.stack([arrays[f"{base}.{layer}"] for layer in layers])
    present = arrays.get(f"{base}.present", np.ones(values.shape[:2], dtype=np.bool_))
    return Block(arrays[f"{base}.positions"], values, present)


def _layers(arrays: Arrays, key: tuple[int, str]) -> tuple[int, ...]:
    base = f"{prefix(key[0])}{key[1]}."
    names = [name.removeprefix(base) for name in arrays if name.startswith(base)]
    return tuple(sorted(int(name) for name in names if name.isdigit()))


def _key(name: str) -> tuple[int, str]:
    site = name.removesuffix(".positions")
    sequence, slash, rest = site.partition("/")
    return (int(sequence.removeprefix("sequence")), rest) if slash else (0, site)
