"""Sphinx extension: converts docstrings, which are plain text with `code`, to reStructuredText.

* reStructuredText makes an indented paragraph a quotation. In a module's docstring, this extension keeps it as text.
* reStructuredText makes |x| a substitution. Here it is a length.
* Napoleon takes the words before a colon in an attribute's docstring for its type. Here they are part of a sentence.
* Members are listed in the order of the file that `__module__` names. For a stream it names where users import it.
* The signature of a dataclass whose `__new__` only checks is that of its `__init__`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING

from sphinx.ext.napoleon.docstring import GoogleDocstring

import residuum

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`]*`)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    for shown in (residuum.AsyncStream, residuum.Stream):
        shown.__module__ = next(item.__module__ for item in vars(shown).values() if inspect.isfunction(item))
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
