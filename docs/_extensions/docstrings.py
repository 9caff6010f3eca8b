"""Sphinx extension: docstrings are plain text with `code`, read as reStructuredText.

There |x| would be a substitution. Here it is a length.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`]*`)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", escape)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def escape(_app: Sphinx, _kind: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    """Escape what stands for itself, but in code and in examples."""
    for at, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = CODE.split(line)
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            lines[at] = "".join(parts)
