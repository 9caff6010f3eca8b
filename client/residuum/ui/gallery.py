"""The gallery: a folder of directions, one safetensors file each, with what is known of them next to it.

Probes of `Probe.save` and sparse autoencoders that `residuum.sae.load` reads may be there, too.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from residuum.directions.files import saved_directions
from residuum.directions.values import Directions, Origin
from residuum.exceptions import InvalidRequest
from residuum.sae import load as load_sae
from residuum.sae.formats import GEMMA_SCOPE_FILE, SAELENS_CONFIG
from residuum.sae.formats import OWN_FORMAT as SAE_FORMAT
from residuum.ui.answers import invalid
from residuum.values.probes.probe import Probe
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector, load_vectors
from residuum.wire.probes.files import FORMAT as PROBE_FORMAT

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
        self._latest: tuple[tuple[str, int], SAE] | None = None

    def names(self) -> list[str]:
        """Return the names of all directions, sorted. Files that hold something else are among them."""
        return self._of_kind(lambda form: form not in {PROBE_FORMAT, SAE_FORMAT})

    def probes(self) -> list[str]:
        """Return the names of all probes, sorted."""
        return self._of_kind(lambda form: form == PROBE_FORMAT)

    def saes(self) -> list[str]:
        """Return the names of all sparse autoencoders, sorted: files of `residuum.sae.save`, .npz files, folders."""
        own = self._of_kind(lambda form: form == SAE_FORMAT)
        others = [path.stem if path.suffix == ".npz" else path.name for path in self.folder.glob("*") if _is_sae(path)]
        return sorted({*own, *filter(_NAME.fullmatch, others)})

    def _of_kind(self, fits: Callable[[str], bool]) -> list[str]:
        names = (path.stem for path in self.folder.glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.stem))
        return sorted(name for name in names if fits(_format_of(self._path(name))))

    def load(self, name: str) -> Directions:
        """Return directions by their name.

        Raises:
            InvalidRequest: The name is none, or the file holds no directions.
            FileNotFoundError: There are none with this name.
        """
        return Directions.load(self._file("direction", name))

    def probe(self, name: str) -> Probe:
        """Return a probe by its name.

        Raises:
            InvalidRequest: The name is none, or the file holds no probe.
            FileNotFoundError: There is none with this name.
        """
        return Probe.load(self._file("probe", name))

    def _file(self, kind: str, name: str) -> Path:
        path = self._path(name)
        if not path.is_file():
            raise FileNotFoundError(f"There is no {kind} {name!r} in {self.folder}. Choose another one.")
        return path

    def sae(self, name: str) -> SAE:
        """Return a sparse autoencoder by its name. The latest one is kept, because reading it takes a while.

        Raises:
            BadSAE: It cannot be read.
            FileNotFoundError: There is none with this name.
        """
        wanted = (name, self.version(name))
        if self._latest is None or self._latest[0] != wanted:
            self._latest = (wanted, load_sae(self.sae_path(name)))
        return self._latest[1]

    def sae_path(self, name: str) -> Path:
        """Return where a sparse autoencoder is: a file or a folder; the errors are those of `sae`."""
        own = self._path(name)
        for path in (own, self.folder / name, self.folder / f"{name}.npz"):
            if path.exists():
                return path
        raise FileNotFoundError(f"There is no sparse autoencoder {name!r} in {self.folder}. Choose another one.")

    def version(self, name: str) -> int:
        """Return a number that changes with the file or folder of this name; 0 if there is none."""
        try:
            return self.sae_path(name).stat().st_mtime_ns
        except OSError:
            return 0

    def notes(self, name: str) -> dict[str, Any]:
        """Return what was noted when the directions were made, such as how well they separate the examples."""
        try:
            notes = json.loads(self._notes(name).read_text())
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def save(self, name: str, content: Directions | Probe, notes: Mapping[str, Any] | None = None) -> None:
        """Save directions or a probe under a new name.

        Raises:
            InvalidRequest: The name cannot be used.
            FileExistsError: The name is taken, perhaps by another page or program while the directions were made.
        """
        target = self._path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder) as scratch:
            path = Path(scratch) / target.name
            content.save(path)
            self._move(path, name)
        if notes:
            self._notes(name).write_text(json.dumps(notes))

    def check_new(self, name: str) -> None:
        """Check a new name early. `save` notices if the name is taken meanwhile.

        Raises:
            InvalidRequest: The name cannot be used.
            FileExistsError: The name is taken.
        """
        if self._path(name).exists():
            raise _taken(name)

    def rename(self, name: str, to: str) -> None:
        """Give a file another name; the errors are those of `delete` and `check_new`."""
        self._move(self._existing(name), to)
        if self._notes(name).exists():
            self._notes(name).rename(self._notes(to))

    def delete(self, name: str) -> None:
        """Delete a file.

        Raises:
            InvalidRequest: The name is none.
            FileNotFoundError: There is none with this name.
        """
        self._existing(name).unlink()
        self._notes(name).unlink(missing_ok=True)

    def _move(self, path: Path, name: str) -> None:
        """Move a file of the folder to a new name. This never replaces a file, as a rename would."""
        target = self._path(name)
        try:
            os.link(path, target)
        except FileExistsError:
            raise _taken(name) from None
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no hard links
            try:
                target.touch(exist_ok=False)  # takes the name
            except FileExistsError:
                raise _taken(name) from None
            path.replace(target)
        else:
            path.unlink()

    def _existing(self, name: str) -> Path:
        path = self._path(name)
        if not path.is_file():
            raise FileNotFoundError(f"There is no {name!r} in {self.folder}.")
        return path

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


def _taken(name: str) -> FileExistsError:
    return FileExistsError(f"There is a direction {name!r} already. Choose another name.")


def _format_of(path: Path) -> str:
    """Return the "format" in a file's metadata; empty if it cannot be read. The arrays are not read."""
    try:
        with safe_open(path, framework="np") as file:
            return str((file.metadata() or {}).get("format", ""))
    except (SafetensorError, OSError):
        return ""


def _is_sae(path: Path) -> bool:
    if path.is_dir():
        return (path / SAELENS_CONFIG).exists() or (path / GEMMA_SCOPE_FILE).exists()
    return path.suffix == ".npz"


def read_file(filename: str, content: bytes, layer: int | None) -> Directions | Probe:
    """Return the content of an uploaded file: of `Directions.save` or `Probe.save`, GGUF, or with one vector.

    Args:
        filename: The file's name; its suffix says what it is.
        content: The file.
        layer: The layer of a single vector.

    Raises:
        InvalidRequest: The file holds neither directions nor a probe, or the layer is missing.
        ImportError: GGUF needs the extra `gguf`.
    """
    suffix = Path(filename).suffix.lower()
    if suffix not in {".safetensors", ".gguf", ".npy"}:
        raise invalid(f"{filename!r} holds neither directions nor a probe. Choose a .safetensors, .gguf or .npy file.")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{Path(scratch).name}{suffix}"  # a name that occurs nowhere else in a message
        path.write_bytes(content)
        try:
            return _read(path, filename, layer)
        except InvalidRequest as error:
            message = str(error).replace(str(path), filename).replace(path.name, filename).replace(path.stem, filename)
            raise invalid(message) from None


def _read(path: Path, filename: str, layer: int | None) -> Directions | Probe:
    if path.suffix == ".safetensors" and _format_of(path) == PROBE_FORMAT:
        return Probe.load(path)
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
