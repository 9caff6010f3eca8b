"""Generate the synchronous client, client/residuum/_sync/, from the asyncio one, client/residuum/_async/.

.venv/bin/python scripts/generate_sync.py            write the modules
.venv/bin/python scripts/generate_sync.py --check    fail if committed modules are out of date, and name them

`unasync` removes async and await and renames the names that it knows. This script does the rest on the text: nested
types, and the docstring sentences that are true for one client only. Then ruff formats the result. Modules that are
not in SOURCES are written by hand, in both folders.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("client", "residuum")
BIN = Path(sys.executable).parent

SOURCES = (
    "captures.py",
    "client.py",
    "deleting.py",
    "generation.py",
    "searches.py",
    "stores.py",
    "tokens.py",
    "uploads.py",
)

MARK = "# Generated from client/residuum/_async/"
HEADER = MARK + "{name} by scripts/generate_sync.py. Edit that file, then run `make sync`.\n"

NAMES = {
    "AsyncCaptureClient": "CaptureClient",
    "AsyncClient": "Client",
    "AsyncDeletionClient": "DeletionClient",
    "AsyncGenerationClient": "GenerationClient",
    "AsyncSearchClient": "SearchClient",
    "AsyncStoreClient": "StoreClient",
    "AsyncStream": "Stream",
    "AsyncTokenStream": "TokenStream",
    "AsyncUploadClient": "UploadClient",
    "InferenceServiceAsyncStub": "InferenceServiceStub",
    "StoreServiceAsyncStub": "StoreServiceStub",
    "_async": "_sync",
    "aclose": "close",
    "aclosing": "closing",
    "anext": "next",
}
"""Names that unasync replaces in addition to its own list."""

WORDS = {
    "grpc.aio": "grpc",
    "async with": "with",
    "async for": "for",
    "await ": "",
    "anext(": "next(",
    "StopAsyncIteration": "StopIteration",
    **{name: instead for name, instead in NAMES.items() if name.startswith("Async")},
}
"""Texts that unasync does not replace: in docstrings, comments and strings, and names of two parts."""

SENTENCES = {
    "The asyncio client.": "The synchronous client.",
    "How the asyncio client": "How the synchronous client",
    "The asyncio client's generations": "The synchronous client's generations",
    "The asyncio client's methods": "The synchronous client's methods",
    "The asyncio client's search": "The synchronous client's search",
    "The asyncio client's uploads": "The synchronous client's uploads",
    "An asyncio client of": "A client of",
    "Use a client within one event loop.": "Threads may share a client. Create it after any fork.",
    "use it in an async with-block": "use it in a with-block",
    "Cancelling the task stops the request.": "An interrupt stops the request.",
    "asyncio.CancelledError: The task was cancelled. Its `__cause__`, a BatchCancelled, holds the replies of the\n"
    "                prompts that were done.": (
        "BatchInterrupted: Ctrl-C interrupted the call. It holds the replies of the prompts that were done."
    ),
    "Return a stream of the tokens of a generation.": "Start a generation and return a stream of its tokens.",
    "The arguments are checked, and the request starts, when the stream is entered or first read. From then on its ID\n"
    "        is known and its capture can be followed.": (
        "When this returns, the request is accepted, its ID is known and its capture can be followed.\n       "
    ),
    ", known once the stream has been entered or first read.": ".",
    "\n\n        A wait for a piece may be cancelled, as asyncio.wait_for does after its timeout. The next wait goes "
    "on with the\n        rows that did not come yet. For that it reads the capture again, so do not give a timeout of "
    "milliseconds.": "",
    "\n\n        A wait for a reply that is cancelled, as asyncio.wait_for does after its timeout, stops them, too. "
    "What comes\n        next are the other replies that are there, and a BatchFailed for the prompts without one.": "",
}
"""Docstring sentences of the asyncio client, and their replacements for the synchronous client. Each must occur."""


def main() -> int:
    """Write the modules or check them. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare, and fail on any difference")
    options = parser.parse_args()
    committed = ROOT / PACKAGE / "_sync"
    fresh = generate()
    differences = compare(fresh, committed)
    if options.check:
        return report(differences)
    for name in differences:
        if name in fresh:
            (committed / name).write_text(fresh[name])
        else:
            (committed / name).unlink()
        print(PACKAGE / "_sync" / name)
    print(f"{len(differences)} modules changed")
    return 0


def generate() -> dict[str, str]:
    """Return the text of each synchronous module, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "_async"), Path(folder, "_sync")
        source.mkdir()
        texts = {name: (ROOT / PACKAGE / "_async" / name).read_text() for name in SOURCES}
        unused = [sentence for sentence in SENTENCES if not any(sentence in text for text in texts.values())]
        if unused:
            sys.exit(f"SENTENCES in scripts/generate_sync.py are in no module: {unused}")
        for name, text in texts.items():
            (source / name).write_text(prepare(text))
        rule = unasync.Rule(f"{source}/", f"{target}/", additional_replacements=NAMES)
        unasync.unasync_files([str(source / name) for name in SOURCES], [rule])
        for name in SOURCES:
            (target / name).write_text(HEADER.format(name=name) + finish((target / name).read_text()))
        tidy(target)
        return {name: (target / name).read_text() for name in SOURCES}


def prepare(text: str) -> str:
    """Make the replacements that need the original text, before unasync changes words and line breaks."""
    for sentence, instead in SENTENCES.items():
        text = text.replace(sentence, instead)
    # unasync would leave the parentheses of (await call()).field.
    return re.sub(r"\(await ([\w.]+\([^()]*(?:\([^()]*\)[^()]*)*\))\)\.", r"await \1.", text)


def finish(text: str) -> str:
    """Make the replacements that unasync leaves."""
    for word, instead in WORDS.items():
        text = text.replace(word, instead)
    text = re.sub(r"^(from collections\.abc import .*?)\bAwaitable, ", r"\1", text, flags=re.MULTILINE)
    return unwrap(text)


def unwrap(text: str) -> str:
    """Replace every type Awaitable[X] by X."""
    while (at := text.find("Awaitable[")) >= 0:
        start = end = at + len("Awaitable[")
        depth = 1
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        text = text[:at] + text[start : end - 1] + text[end:]
    return text


def tidy(folder: Path) -> None:
    """Remove duplicate imports, sort imports, and format, with ruff."""
    settings = ["--quiet", "--no-cache", "--config", str(ROOT / "pyproject.toml"), str(folder)]
    fixes = ["--fix", "--unsafe-fixes", "--select", "F401,I001,UP028"]  # UP028: `yield from`, which asyncio lacks
    for command in (["check", *fixes], ["format"]):
        result = subprocess.run([BIN / "ruff", *command, *settings], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.exit(f"ruff {command[0]} failed:\n{result.stdout}{result.stderr}")


def compare(fresh: dict[str, str], committed: Path) -> list[str]:
    """Return the names of committed modules that are missing, stale or left over."""
    found = {path.name: path.read_text() for path in committed.glob("*.py")}
    left_over = {name for name, text in found.items() if text.startswith(MARK) and name not in fresh}
    return sorted(left_over | {name for name, text in fresh.items() if found.get(name) != text})


def report(differences: list[str]) -> int:
    """Print which modules are out of date. Return the exit status."""
    for name in differences:
        print(f"differs from its source: {PACKAGE / '_sync' / name}", file=sys.stderr)
    if differences:
        print("run `make sync` and commit the result", file=sys.stderr)
        return 1
    print("the synchronous client is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
