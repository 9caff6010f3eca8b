"""The gallery: a folder of directions, one safetensors file each, with what is known of them next to it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from residuum.directions.files import saved_directions
from residuum.directions.values import Directions, Origin
from residuum.exceptions import InvalidRequest
from residuum.ui.answers import invalid
from residuum.values.vector import Vector, load_vectors

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}", re.ASCII)
_SUFFIX = ".safetensors"


def default_folder() -> Path:
    """Return the folder for data of the user's programs: ~/.local/share/residuum/directions."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(base) / "residuum" / "directions"


class Gallery:
    """A folder of directions. Files that other programs add appear in it, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Return the names of all directions, sorted."""
        return sorted(path.stem for path in self.folder.glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.stem))

    def load(self, name: str) -> Directions:
        """Return directions by their name.

        Raises:
            InvalidRequest: The name is none, or the file holds no directions.
            FileNotFoundError: There are none with this name.
        """
        path = self._path(name)
        if not path.is_file():
            raise FileNotFoundError(f"There is no direction {name!r} in {self.folder}. Choose another one.")
        return Directions.load(path)

    def notes(self, name: str) -> dict[str, Any]:
        """Return what was noted when the directions were made, such as how well they separate the examples."""
        try:
            notes = json.loads(self._notes(name).read_text())
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def save(self, name: str, directions: Directions, notes: Mapping[str, Any] | None = None) -> None:
        """Save directions under a new name.

        Raises:
            InvalidRequest: The name cannot be used.
            FileExistsError: The name is taken.
        """
        path = self.free_path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        directions.save(path)
        if notes:
            self._notes(name).write_text(json.dumps(notes))

    def free_path(self, name: str) -> Path:
        """Return the path for a new name.

        Raises:
            InvalidRequest: The name cannot be used.
            FileExistsError: The name is taken.
        """
        path = self._path(name)
        if path.exists():
            raise FileExistsError(f"There is a direction {name!r} already. Choose another name.")
        return path

    def rename(self, name: str, to: str) -> None:
        """Give directions another name; the errors are those of `load` and `free_path`."""
        self.load(name)
        target = self.free_path(to)
        self._path(name).rename(target)
        if self._notes(name).exists():
            self._notes(name).rename(self._notes(to))

    def delete(self, name: str) -> None:
        """Delete directions; the errors are those of `load`."""
        path = self._path(name)
        if not path.is_file():
            raise FileNotFoundError(f"There is no direction {name!r} in {self.folder}.")
        path.unlink()
        self._notes(name).unlink(missing_ok=True)

    def _notes(self, name: str) -> Path:
        """Return the path of the notes. A plain .json beside the directions may be the user's own file."""
        return self.folder / f"{name}.residuum.json"

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise invalid(
                f"{name!r} cannot be a direction's name. Use 1 to 80 letters, digits, spaces, dots, hyphens and "
                "underscores, with a letter or digit first."
            )
        return self.folder / f"{name}{_SUFFIX}"


def read_file(filename: str, content: bytes, layer: int | None) -> Directions:
    """Return the directions in an uploaded file: of `Directions.save`, GGUF, .npy or safetensors with one vector.

    Args:
        filename: The file's name; its suffix says what it is.
        content: The file.
        layer: The layer of a single vector.

    Raises:
        InvalidRequest: The file holds no directions, or the layer is missing.
        ImportError: GGUF needs the extra `gguf`.
    """
    suffix = Path(filename).suffix.lower()
    if suffix not in {".safetensors", ".gguf", ".npy"}:
        raise invalid(f"{filename!r} is no file of directions. Choose a .safetensors, .gguf or .npy file.")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"upload{suffix}"
        path.write_bytes(content)
        try:
            return _read(path, filename, layer)
        except InvalidRequest as error:
            raise invalid(str(error).replace(str(path), filename)) from None


def _read(path: Path, filename: str, layer: int | None) -> Directions:
    if path.suffix == ".gguf":
        return Directions.from_gguf(path)
    found = saved_directions(path) if path.suffix == ".safetensors" else None
    if found is not None:
        return found
    vectors = load_vectors(path)
    if len(vectors) != 1:
        raise invalid(
            f"{filename} has {len(vectors)} vectors ({', '.join(list(vectors)[:8])}), and does not say which layers "
            "they belong to. Upload a file of Directions.save, or one with a single vector."
        )
    if layer is None:
        raise invalid(f"{filename} has a single vector. Say which layer it belongs to.")
    return Directions({layer: next(iter(vectors.values()))}, origin=Origin(method="file"))


def layer_vectors(directions: Directions, layers: Iterable[int], from_layer: str) -> dict[int, Vector]:
    """Return the vector to compare each layer's rows with.

    Args:
        directions: The directions.
        layers: The layers of the rows.
        from_layer: Empty: each layer's own vector; layers without one are left out. A layer: its vector for all.

    Raises:
        InvalidRequest: The directions do not have the layer, or none of the layers.
    """
    if from_layer:
        if not from_layer.isdecimal() or int(from_layer) not in directions:
            raise invalid(f"The direction has no layer {from_layer!r}. Choose among {list(directions.layers)}.")
        return dict.fromkeys(layers, directions[int(from_layer)])
    found = {layer: directions[layer] for layer in layers if layer in directions}
    if not found:
        raise invalid(
            f"The direction has the layers {list(directions.layers)}, none of which was captured. Use the vector of "
            "one layer for all of them."
        )
    return found
