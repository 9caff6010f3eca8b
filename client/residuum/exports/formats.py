"""The file formats of exports."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from residuum.exceptions import InvalidRequest
from residuum.rpc.extras import install_extra

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations

Advance = Callable[[int], None]
"""Called with the number of further bytes of rows that were written."""

Write = Callable[["Activations", Path, Advance], None]
"""Writes activations to a new path, one slice of rows at a time."""


@dataclass(frozen=True)
class Format:
    """A file format."""

    name: str
    """The format's name."""
    package: str | None = None
    """The package that it needs beyond the client's own dependencies; None if it needs none."""
    extra: str = ""
    """The extra that installs the package."""

    @property
    def suffix(self) -> str:
        """The suffix of its files."""
        return f".{self.name}"

    def writer(self) -> Write:
        """Return the function that writes this format.

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
        write: Write = importlib.import_module(f"residuum.exports.writers.{self.name}").write
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
    """Return the format with a name, or without a name that of the path's suffix.

    Raises:
        InvalidRequest: The format does not exist, or there is no name and the suffix is unknown.
    """
    if name is None and path.suffix[1:] not in FORMATS:
        raise InvalidRequest(
            f"The suffix of {path} names no export format. Use .{', .'.join(FORMATS)}, or give format=.",
            reason="INVALID_FIELD",
        )
    wanted = path.suffix[1:] if name is None else name
    if wanted not in FORMATS:
        message = f"{wanted!r} is not an export format; choose among {', '.join(FORMATS)}."
        raise InvalidRequest(message, reason="INVALID_FIELD")
    return FORMATS[wanted]
