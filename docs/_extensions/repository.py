"""Sphinx extension: includes documents from elsewhere in the repository, and rewrites links that leave docs/.

Links are written as they work in the repository: `[the contract](../protos/residuum/v1/store.proto)`. On the site:

* A link to a document that is a page becomes a link to that page.
* A link to any other file leads to `repository_url`, or becomes plain text if that is not set.
* A link to a missing file stays unchanged, and Sphinx warns about it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]

FENCED = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension's handlers to Sphinx."""
    app.add_config_value("repository_documents", {}, "env")
    app.add_config_value("repository_url", "", "env")
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Give Sphinx a page's text: its document, with links rewritten."""
    documents: dict[str, str] = app.config.repository_documents
    origin = ROOT / documents[page] if page in documents else Path(app.env.doc2path(page))
    if origin.suffix != ".md":
        return
    app.env.note_dependency(str(origin))
    text = origin.read_text() if page in documents else source[0]
    pages = {ROOT / name: at for at, name in documents.items()}
    pages |= {Path(app.env.doc2path(name)).resolve(): name for name in app.env.found_docs if name not in documents}
    source[0] = Links(page, pages, app.config.repository_url).rewritten(text, origin)


class Links:
    """Rewrites the links in a page's text."""

    def __init__(self, page: str, pages: dict[Path, str], url: str) -> None:
        """Take the page, the files that the pages are made of, and the URL of other files."""
        self._page, self._pages, self._url = page, pages, url

    def rewritten(self, text: str, origin: Path) -> str:
        """Return a text with its links rewritten for the site. Code stays unchanged."""
        parts, at = [], 0
        for code in FENCED.finditer(text):
            parts += [self._prose(text[at : code.start()], origin), code[0]]
            at = code.end()
        return "".join([*parts, self._prose(text[at:], origin)])

    def _prose(self, text: str, origin: Path) -> str:
        return LINK.sub(lambda link: self._link(link, origin), text)

    def _link(self, link: re.Match[str], origin: Path) -> str:
        words, (target, mark, anchor) = link[1], link[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        path = (origin.parent / target).resolve()
        if path in self._pages:
            relative = posixpath.relpath(self._pages[path], posixpath.dirname(self._page) or ".")
            return f"[{words}]({relative}.md{mark}{anchor})"
        if not path.exists() or not path.is_relative_to(ROOT):
            return link[0]
        return f"[{words}]({self._url}{path.relative_to(ROOT)}{mark}{anchor})" if self._url else words
