"""`python -m bench.readme`: writes the figures in README.md and in pages of docs/ from bench/results.

With `--check` it only compares them. README.md has one table and one plot, docs/costs.md has all tables of costs,
docs/models.md has the models that were compared with transformers, and docs/concepts/sites.md has what enabled sites
cost. Nothing between the marks is written by hand. What was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from bench.conformance.page import tables as conformance_tables
from bench.figures import engine, rows, service
from bench.machine import ROOT
from bench.output import machine_name, vllm_version

RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
COSTS = ROOT / "docs" / "costs.md"
MODELS = ROOT / "docs" / "models.md"
SITES = ROOT / "docs" / "concepts" / "sites.md"
BEGIN = "<!-- figures: made by `python -m bench.readme` from bench/results; do not edit -->"
END = "<!-- end of the figures -->"

_COMPARED = ("conformance*.json", "parallel*.json")
_SEVERAL_GPUS = "capture-*p.json"
"""Results of `bench.capture` on several GPUs: their names end with a kind of parallelism, such as `tp` or `pp`."""
_PLOT = "peers.png"
_PLOT_WORDS = "Seconds to generate, and to fetch all layers of every token: stock vLLM, residuum and other methods"


class NoMarksError(ValueError):
    """The page does not have the marks for the figures."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the figures, or check them."""
    parser = argparse.ArgumentParser(prog="python -m bench.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if the figures are out of date")
    options = parser.parse_args(arguments)
    for page, make in ((README, summary), (COSTS, figures), (MODELS, models), (SITES, enabled_sites)):
        text = page.read_text()
        wanted = spliced(text, make(RESULTS, _link(page)))
        if options.check and text != wanted:
            sys.exit(f"The figures in {page.name} are not those of bench/results; run `python -m bench.readme`.")
        if text != wanted:
            page.write_text(wanted)


def _link(page: Path) -> str:
    """Return how a page links to the results."""
    return {"docs": "../bench/results", "concepts": "../../bench/results"}.get(page.parent.name, "bench/results")


def spliced(page: str, text: str) -> str:
    """Return a page with the text between its marks replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise NoMarksError(f"the page must have {BEGIN!r} and later {END!r}, each exactly once")
    before, _, rest = page.partition(BEGIN)
    figures = f"{text}\n\n" if text else ""  # nothing is measured yet
    return f"{before}{BEGIN}\n\n{figures}{END}{rest.partition(END)[2]}"


def _kinds(results: Path) -> list[Path]:
    """Return the folders of all kinds of machines: GPUs first, of these those with the main table, `bench.capture`."""
    folders = sorted(folder for folder in results.iterdir() if folder.is_dir())
    return sorted(folders, key=lambda folder: (folder.name == "cpu", not _has_capture(folder)))


def summary(results: Path, results_link: str = "bench/results") -> str:
    """Return one table, that of the newest vLLM, and one plot, as Markdown.

    The table compares generation with stock vLLM. The plot compares residuum with other methods of capturing all.
    """
    measured = [(_read(folder / "capture.json"), folder) for folder in _kinds(results) if _has_capture(folder)]
    plots = [folder / _PLOT for folder in _kinds(results) if (folder / _PLOT).exists()]
    texts = []
    if measured:
        newest, folder = max(measured, key=lambda found: Version(vllm_version(found[0])))
        texts.append(engine.capture(newest, f"{results_link}/{folder.name}"))
    if plots:
        texts.append(f"![{_PLOT_WORDS}]({results_link}/{plots[0].parent.name}/{_PLOT})")
    return "\n\n".join(texts)


def _has_capture(folder: Path) -> bool:
    return (folder / "capture.json").exists()


def figures(results: Path, results_link: str = "bench/results") -> str:
    """Return what the results of all kinds of machines say, as Markdown."""
    files: dict[str, Callable[[Mapping[str, Any], str], str]] = {
        "suite.json": rows.suite,
        "end_to_end.json": rows.end_to_end,
        "encodings.json": rows.encodings,
        "store.json": rows.store,
        "extract.json": rows.extraction,
        "steering.json": engine.steering,
        "steering-engine.json": engine.steering,
        "service.json": service.service,
        "verdicts.json": service.verdicts,
        "capture-batch-invariant.json": engine.batch_invariant,
    }
    sections = []
    for folder in _kinds(results):
        link = f"{results_link}/{folder.name}"
        found = {name: _read(folder / name) for name in ("capture.json", *files) if (folder / name).exists()}
        if found:
            sections.append(f"## On {machine_name(next(iter(found.values())))}")
        if folder.name != "cpu" and "capture.json" in found:
            sections.append(engine.capture(found["capture.json"], link))
        sections += [make(found[name], link) for name, make in files.items() if name in found]
    several = [file for folder in _kinds(results) for file in sorted(folder.glob(_SEVERAL_GPUS))]
    links = {f"{results_link}/{file.parent.name}/{file.name}": _read(file) for file in several}
    sections.append(engine.several_gpus(links))
    return "\n\n".join(section for section in sections if section)


def models(results: Path, results_link: str = "bench/results") -> str:
    """Return which models were compared with transformers, as Markdown."""
    files = [file for folder in _kinds(results) for name in _COMPARED for file in sorted(folder.glob(name))]
    return f"{conformance_tables([_read(file) for file in files])}\n\n[The results]({results_link})."


def enabled_sites(results: Path, results_link: str = "bench/results") -> str:
    """Return what enabled sites cost while nobody captures them, measured by `bench.sites`, as Markdown."""
    files = [folder / "sites.json" for folder in _kinds(results) if (folder / "sites.json").exists()]
    return "\n\n".join(
        engine.enabled_sites(_read(file), f"{results_link}/{file.parent.name}/{file.name}") for file in files
    )


def _read(file: Path) -> Any:
    return json.loads(file.read_text())


if __name__ == "__main__":
    main()
