"""The formats that activations are written in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from residuum.exceptions import InvalidRequest
from residuum.rpc.extras import install_extra

if TYPE_CHECKING:
    from residuum.values.activations import Activations

Advance = Callable[[int], None]
"""Says that so many more bytes of rows are written."""

Write = Callable[["Activations", Path, Advance], None]
"""Writes activations to a path where nothing is, a slice of rows at a time."""


@dataclass(frozen=True)
class Format:
    """A format of files."""

    name: str
    """What it is called."""
    package: str | None = None
    """The package that it needs besides the client's own, which is also the name of the extra that brings it."""
    extra: str = ""
    """The extra that brings the package."""

    @property
    def suffix(self) -> str:
        """How such files are named."""
        return f".{self.name}"

    def writer(self) -> Write:
        """Return what writes it.

        Raises:
            ImportError: The package that it needs is not installed; the message says what to install.
        """
        if self.package is not None:
            try:
                importlib.import_module(self.package)
            except ImportError:
                raise ImportError(
                    f"Exports to {self.name} need the package {self.package}: {install_extra(self.extra)}."
                ) from None
        write: Write = importlib.import_module(f"residuum.exports.{self.name}").write
        return write


FORMATS = {
    item.name: item
    for item in (
        Format("safetensors"),
        Format("npz"),
        Format("zarr", package="zarr", extra="zarr"),
        Format("parquet", package="pyarrow", extra="parquet"),
    )
}
"""The formats by name."""


def format_of(path: Path, name: str | None) -> Format:
    """Return the format of a name, or else of the path's suffix.

    Raises:
        InvalidRequest: There is no such format, or the path says of none.
    """
    if name is None and path.suffix[1:] not in FORMATS:
        raise InvalidRequest(
            f"{path} does not say by its name in which format to write; name it .{', .'.join(FORMATS)}, or give "
            "format=.",
            reason="INVALID_FIELD",
        )
    wanted = path.suffix[1:] if name is None else name
    if wanted not in FORMATS:
        raise InvalidRequest(f"{wanted!r} is not a format; there are {', '.join(FORMATS)}.", reason="INVALID_FIELD")
    return FORMATS[wanted]
