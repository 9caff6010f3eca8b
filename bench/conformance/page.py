"""Writes the tables of docs/models.md from the results of `bench.conformance`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.conformance.architectures import ARCHITECTURES
from bench.conformance.reference import ALL_SITES, FINAL_NORM
from bench.output import markdown_table, short_revision, vllm_version

Result = Mapping[str, Any]
_NOT_COMPARED = ""
_BY_VLLM = "by vLLM"
"""How the reason begins if vLLM refuses an architecture, and not the service."""

_HEAD_SIZE = 32
"""That of most architectures; results have another one only if it was chosen."""


@dataclass(frozen=True)
class Served:
    """How models were served."""

    machine: str
    dtype: str
    compiled: bool
    runner: str
    layout: tuple[int, int]
    replicas: int
    has_expert_parallel: bool
    vllm: str

    @property
    def is_alone(self) -> bool:
        """Whether one device served each model."""
        return self.layout == (1, 1) and self.replicas == 1

    @property
    def label(self) -> str:
        """Its name in the tables."""
        tensor, pipeline = self.layout
        parts = [self.machine, f"vLLM {self.vllm}", self.dtype, f"runner {self.runner.upper()}" if self.runner else ""]
        parts += [f"tensor parallel {tensor}"] * (tensor > 1) + [f"pipeline parallel {pipeline}"] * (pipeline > 1)
        parts += [f"data parallel {self.replicas}"] * (self.replicas > 1)
        parts += ["expert parallel"] * self.has_expert_parallel
        return ", ".join(part for part in parts if part)


def tables(results: Sequence[Result]) -> str:
    """Return the tables of the page, as Markdown: which architectures are exact, what was compared, and their sites.

    The first table has a column for each way of serving on one device that was tried with most of the architectures.

    Args:
        results: The results of `bench.conformance`. Two that served models in the same way complete each other.
    """
    further = [*_killed(results), *_quantized(results), *_alone(results)]
    results = [result for result in results if not result["setup"].get("alone")]
    ways: dict[Served, list[Result]] = {}
    revisions: dict[Served, list[str]] = {}
    for result in results:
        for outcome in _plain(result):
            for served in _ways(result, outcome):
                ways.setdefault(served, []).append({"sites": result["setup"]["sites"], **outcome})
                if short_revision(result) not in revisions.setdefault(served, []):
                    revisions[served].append(short_revision(result))
    by_name = {served: _by_name(outcomes) for served, outcomes in ways.items()}
    names = [name for name in ARCHITECTURES if any(name in found for found in by_name.values())]
    columns = [served for served, found in by_name.items() if served.is_alone and 2 * len(found) > len(names)]
    matrix = [(f"`{name}`", *(_cell(by_name[served].get(name, ())) for served in columns)) for name in names]
    details = [
        _details(served, outcomes, revisions[served], "" if served in columns else _verdicts(by_name[served]))
        for served, outcomes in ways.items()
    ]
    heads = ("served in", "at", "sites", "models", "rows", "missing", "wrong", "largest error", "other experts")
    texts = [
        *([markdown_table(("architecture", *(served.label for served in columns)), matrix)] if columns else []),
        "All that was compared:",
        markdown_table(heads, details),
        "Sites of each architecture, from all comparisons:",
        _sites_table({name: [row for found in by_name.values() for row in found.get(name, ())] for name in names}),
    ]
    return "\n\n".join([*texts, *further])


def _by_name(outcomes: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for outcome in outcomes:
        found.setdefault(outcome["name"], []).append(outcome)
    return found


def _verdicts(by_name: Mapping[str, Sequence[Result]]) -> str:
    """Return the architectures, each with its verdict unless it is exact."""
    cells = {name: _cell(outcomes) for name, outcomes in by_name.items()}
    notes = {name: cell.removeprefix("exact").removeprefix("; ") for name, cell in cells.items()}
    return ", ".join(f"`{name}` ({note})" if note else f"`{name}`" for name, note in notes.items())


def _sites_table(outcomes: Mapping[str, Sequence[Result]]) -> str:
    """Return which sites were captured and right, by architecture; without architectures that were never served."""
    rows = []
    for name, of_name in outcomes.items():
        exact = [outcome for outcome in of_name if outcome["verdict"] == "exact"]
        found = {site for outcome in exact for site in outcome["sites"]}
        partial = _partial(exact)
        marks = ["" if site not in found else "some layers" if site in partial else "yes" for site in ALL_SITES]
        if exact:
            rows.append((f"`{name}`", *marks))
    return markdown_table(("architecture", *(f"`{site}`" for site in ALL_SITES)), rows)


def _plain(result: Result) -> list[Result]:
    """Return the outcomes of models whose weights are not quantised."""
    return [outcome for outcome in result["architectures"] if not outcome.get("quantization")]


def _quantized(results: Sequence[Result]) -> list[str]:
    """Return the table of formats of quantised weights, and what it says; empty without results."""
    rows = [
        (f"{outcome['quantization']}, `{outcome['name']}`", _served(result, outcome).label, *_exactness(outcome))
        for result in results
        for outcome in result["architectures"]
        if outcome.get("quantization")
    ]
    heads = ("format, architecture", "served in", "rows", "missing", "largest error")
    intro = "Quantised weights. The reference is stock vLLM with the same weights, and a hook after each layer:"
    return [intro, markdown_table(heads, rows)] if rows else []


def _killed(results: Sequence[Result]) -> list[str]:
    """Return the table of captures whose engine lost a worker, and what it says; empty without results."""
    ends: dict[Served, Counter[str]] = {}
    for result in results:
        for outcome in result["architectures"]:
            if outcome.get("ends_killed"):
                ends.setdefault(_served(result, outcome), Counter()).update(outcome["ends_killed"])
    rows = [(served.label, *_ends(found)) for served, found in ends.items()]
    intro = "Captures of requests that were running when one of the engine's workers was killed:"
    return [intro, markdown_table(("served in", "captures", "ended as"), rows)] if rows else []


def _ends(found: Mapping[str, int]) -> tuple[str, str]:
    return f"{sum(found.values())}", ", ".join(f"`{end}`" for end in found)


def _alone(results: Sequence[Result]) -> list[str]:
    """Return the table of rows that were compared alone and in a batch, and what it says; empty without results."""
    rows = []
    for result in results:
        compared = [outcome for outcome in result["architectures"] if outcome.get("rows_alone")]
        if compared:
            rows.append(
                (
                    _served(result, compared[0]).label,
                    short_revision(result),
                    "yes" if result["setup"]["batch_invariant"] else "no",
                    f"{result['setup'].get('head_size') or _HEAD_SIZE}",
                    ", ".join(_with_other_bits(outcomes) for outcomes in _by_name(compared).values()),
                    _briefly({site for outcome in compared for site in outcome["sites"]}),
                    f"{sum(outcome['rows_alone'] for outcome in compared):,}",
                    f"{sum(outcome['other_bits'] for outcome in compared):,}",
                )
            )
    heads = ("served in", "at", "batch-invariant", "head size", "models", "sites", "rows", "of these with other bits")
    intro = "Rows of each request alone and in a batch, compared bit by bit, with and without `VLLM_BATCH_INVARIANT=1`:"
    return [intro, markdown_table(heads, rows)] if rows else []


def _with_other_bits(outcomes: Sequence[Result]) -> str:
    """Return an architecture, and how many of its rows had other bits in the batch, if any had."""
    count = sum(outcome["other_bits"] for outcome in outcomes)
    return f"`{outcomes[0]['name']}`" + (f" ({count:,})" if count else "")


def _exactness(outcome: Result) -> tuple[str, str, str]:
    if not outcome["rows"]:
        return ("needs a GPU" if outcome["detail"].startswith(_BY_VLLM) else outcome["verdict"], "", "")
    verdict = "" if outcome["verdict"] == "exact" else "**not exact:** "
    return f"{outcome['rows']:,}", f"{outcome['missing']}", f"{verdict}{outcome['max_error']:.1e}"


def _ways(result: Result, outcome: Result) -> list[Served]:
    """Return how the model of an outcome was served. A refusal has no layout, so it counts for all of its model."""
    own = [other for other in _plain(result) if other["name"] == outcome["name"] and any(other["layout"])]
    others = [] if any(outcome["layout"]) else own
    return list(dict.fromkeys(_served(result, one) for one in others or [outcome]))


def _served(result: Result, outcome: Result) -> Served:
    """Return how a model was served. The runner of one that was refused is that of the others in the same run."""
    runners = [other.get("model_runner") for other in result["architectures"] if other.get("model_runner")]
    layout = tuple(outcome["layout"])
    setup = result["setup"]
    return Served(
        _machine(result),
        setup["dtype"],
        not setup["eager"],
        outcome.get("model_runner") or (runners[0] if runners else ""),
        (layout[0], layout[1]) if any(layout) else (1, 1),
        outcome.get("replicas", 1),
        bool(setup.get("engine_args", {}).get("enable_expert_parallel")),
        vllm_version(result),
    )


def _machine(result: Result) -> str:
    """Return a GPU without its maker, or "CPU"."""
    gpu: str = result["machine"]["gpu"]
    return gpu.removeprefix("NVIDIA ") if gpu else "CPU"


def _cell(outcomes: Sequence[Result]) -> str:
    """Return the verdict on an architecture: of which of the compared sites every row is right."""
    if not outcomes:
        return _NOT_COMPARED
    if any(outcome["verdict"] == "WRONG" for outcome in outcomes):
        return "**not exact**"
    if any(outcome["verdict"] == "FAILED" for outcome in outcomes):
        return "failed"
    exact = {site for outcome in outcomes if outcome["verdict"] == "exact" for site in outcome["sites"]}
    if exact:
        refused = {site for outcome in outcomes for site in outcome["sites"]} - exact
        partial = _partial(outcomes)
        some = f"; in some layers: {_listed(partial)}" if partial else ""
        return ("without " + _listed(refused) if refused else "exact") + some
    reasons = [outcome["detail"] for outcome in outcomes]
    return "needs a GPU" if any(reason.startswith(_BY_VLLM) for reason in reasons) else "refused"


def _partial(outcomes: Iterable[Result]) -> set[str]:
    """Return the sites that only some layers have. Every model has its final norm only in the last one."""
    return {site for outcome in outcomes for site in outcome.get("site_layers", ())} - {FINAL_NORM}


def _listed(sites: Iterable[str]) -> str:
    return ", ".join(f"`{site}`" for site in ALL_SITES if site in sites)


def _briefly(sites: set[str]) -> str:
    """Return sites in few words."""
    others = set(ALL_SITES) - sites
    if not others:
        return "all"
    return f"all but {_listed(others)}" if len(others) < len(sites) else _listed(sites)


def _details(
    served: Served, outcomes: Sequence[Result], revisions: Sequence[str], verdicts: str = ""
) -> tuple[str, ...]:
    compared = [outcome for outcome in outcomes if outcome["rows"]]
    wrong = [f"`{outcome['name']}`" for outcome in outcomes if outcome["verdict"] == "WRONG"]
    return (
        f"{served.label}, {'compiled' if served.compiled else 'eager'}",
        ", ".join(revisions),
        _briefly({site for outcome in compared for site in outcome["sites"]}),
        verdicts or f"{len({outcome['name'] for outcome in compared})}",
        f"{sum(outcome['rows'] for outcome in compared):,}",
        f"{sum(outcome['missing'] for outcome in compared)}",
        ", ".join(wrong) or "none",
        f"{max((outcome['max_error'] for outcome in compared), default=0.0):.1e}",
        f"{sum(outcome.get('other_experts', 0) for outcome in compared):,}",
    )
