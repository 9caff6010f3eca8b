"""Sphinx extension: converts docstrings, which are plain text with `code`, to reStructuredText.

* reStructuredText renders an indented paragraph as a quotation. In module docstrings, it becomes a literal block.
* reStructuredText reads |x| as a substitution. In these docstrings it is a length, so the bars are escaped.
* Napoleon reads the words before a colon in an attribute's docstring as its type. Here they are part of a sentence.
* A dataclass whose `__new__` only checks its arguments gets the signature of its `__init__`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING

from sphinx.ext.napoleon.docstring import GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`]*`)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension's handlers to Sphinx."""
    app.connect("autodoc-process-docstring", read, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", sign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def read(app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Rewrite the lines of a docstring before napoleon reads them."""
    if kind == "module":
        make_literal_blocks(lines)
    for at, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = CODE.split(line)
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            lines[at] = "".join(parts)
    if kind in ("attribute", "data", "property"):
        read_as_prose = GoogleDocstring(list(lines), app.config, app, "method", name, thing, options).lines()
        lines[:] = ["..", "", *read_as_prose]  # napoleon treats the first line as the type, so give it an empty comment


def make_literal_blocks(lines: list[str]) -> None:
    """Turn indented paragraphs (formulas, trees) into literal blocks."""
    paragraphs = [at for at, line in enumerate(lines) if at and line.startswith("    ") and not lines[at - 1].strip()]
    for at in reversed(paragraphs):
        before = next(line for line in reversed(lines[:at]) if line.strip())
        if not before.startswith(" "):
            lines[at:at] = ["::", ""]


def sign(
    _app: Sphinx, kind: str, _name: str, thing: object, _options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Return the signature of a dataclass from its `__init__`; keep all others."""
    if (
        kind == "class"
        and isinstance(thing, type)
        and dataclasses.is_dataclass(thing)
        and "_named" in (signature or "")
    ):
        arguments = list(inspect.signature(thing.__init__).parameters.values())[1:]
        plain = [argument.replace(annotation=inspect.Parameter.empty) for argument in arguments]
        return str(inspect.Signature(plain)), None
    return signature, returned
