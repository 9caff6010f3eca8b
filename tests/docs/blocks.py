"""Finds the code blocks of the documentation, and how each is tested.

A block that the tests cannot run has a comment with the reason directly above it:

    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
"""The pages whose blocks are run."""
ELSEWHERE = [
    ROOT / name
    for name in (
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "bench/README.md",
        "deploy/README.md",
        "tests/conformance/README.md",
        "tests/faults/README.md",
    )
]
"""Documents that are also pages of the site. Their blocks need containers, GPUs or minutes, so they are only parsed."""

NOT_ON_THE_SITE = [ROOT / "examples/languages/README.md"]
"""A document that is not on the site. Its links and commands are checked, too."""

RUN = ("python", "pycon", "console")
"""Languages whose blocks are run against real services (tests/integration/test_docs.py)."""
PARSED = ("toml",)
"""Languages of configuration files, which are parsed and compared with the settings (tests/docs/test_blocks.py)."""
OUTPUT = "text"
"""The output of a program, or a formula. It is not run."""

_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    """The number of the first line of code."""
    language: str
    code: str
    reason: str | None
    """Why it is not run; None if it is run."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def source(self) -> str:
        """The code, preceded by empty lines so that tracebacks have the page's line numbers."""
        return "\n" * (self.line - 1) + self.code

    @property
    def commands(self) -> list[str]:
        """The typed commands: in a console block the lines after a dollar sign, in a bash block all lines.

        A command continues after a backslash, and while a quote is open.
        """
        found: list[str] = []
        for line in re.sub(r"\\\n", "", self.code).splitlines():
            if self.language == "bash" and not (found and _is_open(found[-1])):
                found.append(line)
            elif line.startswith("$ "):
                found.append(line.removeprefix("$ "))
            elif found and _is_open(found[-1]):
                found[-1] += f"\n{line}"
        return found


def _is_open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order, without Sphinx directives."""
    text, found = page.read_text(), []
    for fence in _FENCE.finditer(text):
        language = fence[3].strip()
        if not language.startswith("{"):
            mark = _MARK.search(text, 0, fence.start())
            line = text.count("\n", 0, fence.start()) + 2
            found.append(Block(page, line, language, fence[4], mark[1] if mark else None))
    return found


def words(command: str) -> list[list[str]]:
    """Return the words of each command in a shell line, split at &&, | and ;.

    Redirections and leading variable assignments are left out.
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if set(word) <= set("&|;"):
            commands.append([])
        elif set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        else:
            commands[-1].append(word)
    bare = (list(dropwhile(re.compile(r"[A-Z_]+=").match, command)) for command in commands)
    return [command for command in bare if command]
