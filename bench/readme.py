"""`python -m bench.readme`: writes the figures in README.md and in pages of docs/ from bench/results.

With `--check` it only compares them. README.md has one table and one plot, docs/costs.md has all tables of costs,
docs/models.md has the models that were compared with transformers, and docs/concepts/sites.md has what enabled sites
cost. Nothing between the marks is written by hand. What was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from bench.conformance.page import tables as conformance_tables
from bench.machine import ROOT
from bench.output import machine_name, markdown_table, percent, seconds, short_revision, times, vllm_version
from bench.sites import POINT_LIMIT, GroupCost
from bench.store.scale import place
from bench.suite.plan import ALL_LAYERS, BASELINE, EAGER, ZERO_LAYER
from bench.suite.results import Measured, by_name, failures

RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
COSTS = ROOT / "docs" / "costs.md"
MODELS = ROOT / "docs" / "models.md"
SITES = ROOT / "docs" / "concepts" / "sites.md"
BEGIN = "<!-- figures: made by `python -m bench.readme` from bench/results; do not edit -->"
END = "<!-- end of the figures -->"

_COMPARED = ("conformance*.json", "parallel*.json")
_SERVED = {
    "vllm serve, taps": "`vllm serve` with taps, without capture",
    "vllm serve, captures": "`vllm serve`, last prompt token and reply captured at all layers",
    "residuum": "the inference service, without capture",
    "captures": "the inference service, last prompt token and reply captured at all layers",
}
"""The ways with a server, by their names in results of `bench.service`."""
_SEVERAL_GPUS = "capture-*p.json"
"""Results of `bench.capture` on several GPUs: their names end with a kind of parallelism, such as `tp` or `pp`."""
_PARALLEL = {
    "data_parallel_size": "data",
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
}
"""The kinds of parallelism, by vLLM's arguments."""
_PLOT = "peers.png"
_PLOT_WORDS = "Seconds to generate, and to fetch all layers of every token: stock vLLM, residuum and other ways"
_WIDTH = 118
_MODES = {
    "stock-again": "stock vLLM in another process: the error of the measurement",
    "idle": "idle taps, nothing captured",
    "all-layers": "all {layers} layers of every token{sink}: {gb:.1f} GB in {generation:.1f} s",
    "steer": "every layer steered, each request by its own vector",
    "all-layers+steer": "both",
}
_WAYS = {
    "tap": "the taps' kernel: `Add`, `Ablate`, `Cap`",
    "gather/scatter": "rows gathered and scattered by operation",
    "loop": "a loop over {requests} requests",
}
_OPERATIONS = ("add", "ablate", "cap")
_KERNEL_HIDDEN = 2560


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


def _filled(text: str) -> str:
    """Return a paragraph in lines. Links stay whole: a target with a line break is no link."""
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False, break_long_words=False)


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

    The table compares generation with stock vLLM. The plot compares residuum with other ways to capture everything.
    """
    measured = [(_read(folder / "capture.json"), folder) for folder in _kinds(results) if _has_capture(folder)]
    plots = [folder / _PLOT for folder in _kinds(results) if (folder / _PLOT).exists()]
    texts = []
    if measured:
        newest, folder = max(measured, key=lambda found: Version(vllm_version(found[0])))
        texts.append(capture(newest, f"{results_link}/{folder.name}"))
    if plots:
        texts.append(f"![{_PLOT_WORDS}]({results_link}/{plots[0].parent.name}/{_PLOT})")
    return "\n\n".join(texts)


def _has_capture(folder: Path) -> bool:
    return (folder / "capture.json").exists()


def figures(results: Path, results_link: str = "bench/results") -> str:
    """Return what the results of all kinds of machines say, as Markdown."""
    files: dict[str, Callable[[Mapping[str, Any], str], str]] = {
        "suite.json": suite,
        "end_to_end.json": end_to_end,
        "encodings.json": encodings,
        "store.json": store,
        "extract.json": extraction,
        "steering.json": steering,
        "steering-engine.json": steering,
        "service.json": service,
        "verdicts.json": verdicts,
        "service-served.json": served,
        "capture-batch-invariant.json": batch_invariant,
    }
    sections = []
    for folder in _kinds(results):
        link = f"{results_link}/{folder.name}"
        found = {name: _read(folder / name) for name in ("capture.json", *files) if (folder / name).exists()}
        if found:
            sections.append(f"## On {machine_name(next(iter(found.values())))}")
        if folder.name != "cpu" and "capture.json" in found:
            sections.append(capture(found["capture.json"], link))
        sections += [make(found[name], link) for name, make in files.items() if name in found]
    sections.append(several_gpus(results, results_link))
    return "\n\n".join(section for section in sections if section)


def models(results: Path, results_link: str = "bench/results") -> str:
    """Return which models were compared with transformers, as Markdown."""
    files = [file for folder in _kinds(results) for name in _COMPARED for file in sorted(folder.glob(name))]
    return f"{conformance_tables([_read(file) for file in files])}\n\n[The results]({results_link})."


def enabled_sites(results: Path, results_link: str = "bench/results") -> str:
    """Return what enabled sites cost while nobody captures them, measured by `bench.sites`, as Markdown."""
    files = [folder / "sites.json" for folder in _kinds(results) if (folder / "sites.json").exists()]
    return "\n\n".join(_enabled_sites(_read(file), f"{results_link}/{file.parent.name}/{file.name}") for file in files)


def capture(result: Mapping[str, Any], link: str) -> str:
    """Return the cost of capture and steering compared with stock vLLM, measured by `bench.capture`."""
    workload = result["workload"]
    runners = list(dict.fromkeys(mode["model_runner"] for mode in result["modes"]))
    modes = {(mode["mode"], mode["model_runner"]): mode for mode in result["modes"]}
    rows = []
    for name, words in _MODES.items():
        found = [modes.get((name, runner)) for runner in runners]
        if found[0] is None:
            continue
        label = words.format(
            layers=result["runs"][0]["num_layers"],
            sink=", into the ring" if workload["sink"] == "ring" else "",
            gb=found[0]["bytes_per_iteration"] / 1e9,
            generation=found[0]["generation_seconds"]["median"],
        )
        rows.append((label, *(_by_round(mode) if mode else "" for mode in found)))
    head = f"{_workload(workload)}, `bench.capture` at {short_revision(result)}"
    where = f"on {machine_name(result)} ([results]({link}))"
    intro = f"Generation compared with stock vLLM {vllm_version(result)} in the same run, {where}."
    intro += " Each figure is the median of the rounds, with their range in brackets."
    return f"{_filled(intro)}\n\n" + markdown_table((head, *(f"runner {runner.upper()}" for runner in runners)), rows)


def several_gpus(results: Path, results_link: str = "bench/results") -> str:
    """Return what `bench.capture` measured on several GPUs, as Markdown. Empty without such results."""
    rows: list[tuple[str, ...]] = []
    workloads: dict[str, None] = {}  # a set that keeps the order
    for file in [file for folder in _kinds(results) for file in sorted(folder.glob(_SEVERAL_GPUS))]:
        result = _read(file)
        workloads[_workload(result["workload"])] = None
        arguments = result["workload"]["engine_args"]
        layout = [f"{kind} {arguments[name]}" for name, kind in _PARALLEL.items() if arguments.get(name, 1) > 1]
        modes = {mode["mode"]: _by_round(mode) for mode in result["modes"]}
        where = f"[{machine_name(result)}]({results_link}/{file.parent.name}/{file.name}), {short_revision(result)}"
        rows.append((where, ", ".join(layout), modes.get("idle", "not measured"), modes["all-layers"]))
    if not rows:
        return ""
    return (
        "## On several GPUs\n\n"
        + _filled(
            f"Generation compared with stock vLLM in the same run and layout: {', or '.join(workloads)}, "
            "`bench.capture`, captured rows into the ring. With pipeline parallelism and a model of this size, vLLM's "
            "processes need more time to prepare a step than the GPUs to compute it. So every step waits for what the "
            "taps do there."
        )
        + "\n\n"
        + markdown_table(("machine, revision", "parallel", "idle taps", "all layers of every token"), rows)
    )


def batch_invariant(result: Mapping[str, Any], _: str) -> str:
    """Return the cost of vLLM's batch-invariant mode, measured by `bench.capture`."""
    seconds_of = {(mode["mode"], mode["runner"]): mode["generation_seconds"]["median"] for mode in result["modes"]}
    stock = seconds_of["stock", "default"]
    rows = [
        (words, *(times(seconds_of[name, runner] / stock) for runner in ("default", "batch-invariant")))
        for name, words in (("stock", "stock vLLM"), ("idle", "idle taps"), ("all-layers", "all layers of every token"))
        if (name, "batch-invariant") in seconds_of
    ]
    head = f"{_workload(result['workload'])}, `bench.capture` at {short_revision(result)}"
    intro = f"Generation with vLLM {vllm_version(result)}, stock vLLM = 1, on {machine_name(result)}:"
    heads = (head, "as usual", "`VLLM_BATCH_INVARIANT=1`")
    return f"{_filled(intro)}\n\n{markdown_table(heads, rows)}"


def steering(result: Mapping[str, Any], _: str) -> str:
    """Return the cost of steering in a step, measured by `bench.steering`."""
    parts = result["parts"]
    texts = [_kernel(parts["kernel"], result)] if "kernel" in parts else []
    if "engine" in parts:
        texts.append(_engine(parts["engine"]))
    return "\n\n".join(texts)


def end_to_end(result: Mapping[str, Any], _: str) -> str:
    """Return the time until all captures of a batch are COMPLETE, measured by `bench.end_to_end`."""
    workload = result["workload"]
    stock = {mode["runner"]: mode for mode in result["modes"] if mode["mode"] == "stock"}
    rows = [
        (
            f"all layers of every token, runner {mode['model_runner'].upper()}",
            _over_stock(mode),
            times(mode["completed_seconds"]["median"] / stock[mode["runner"]]["generation_seconds"]["median"]),
        )
        for mode in result["modes"]
        if mode["mode"] == "all-layers" and mode["runner"] in stock
    ]
    stores = "one store" if workload["stores"] == 1 else f"{workload['stores']} stores"
    through = f"through {workload['shippers']} shippers into {stores} on the same host"
    head = (
        f"the same requests with vLLM {vllm_version(result)}, {through}, `bench.end_to_end` at {short_revision(result)}"
    )
    return markdown_table((head, "generation", "until all is COMPLETE, stock's generation = 1"), rows) if rows else ""


def encodings(result: Mapping[str, Any], _: str) -> str:
    """Return the savings of an encoding while a model generates, measured by `bench.encodings`."""
    parts = result["parts"]
    if not {"overhead", "end-to-end"} <= parts.keys():
        return ""
    overhead, whole = ({mode["mode"]: mode for mode in parts[name]["modes"]} for name in ("overhead", "end-to-end"))
    generation = whole["stock"]["generation_seconds"]["median"]
    rows = [
        (
            words,
            f"{overhead[name]['bytes_per_iteration'] / 1e9:.2f} GB",
            _over_stock(overhead[name]),
            times(whole[name]["completed_seconds"]["median"] / generation),
        )
        for name, words in (("all-layers", "`raw`"), ("all-layers+encoded", "`rp8`, 512 dimensions"))
    ]
    head = f"all layers of the same requests, `bench.encodings` at {short_revision(result)}"
    return markdown_table(
        (head, "bytes", "generation, into the ring", "until all is COMPLETE, stock's generation = 1"), rows
    )


def store(result: Mapping[str, Any], link: str) -> str:
    """Return the throughput of stores and the latency of reads, measured by `bench.store`."""
    parts = result["parts"]
    texts = []
    if "compare" in parts:
        ratios = parts["compare"]["ratios"]
        shown = [f"{ratios[way]['Flight']:.2f}" for way in ("ingest", "read") if "Flight" in ratios[way]]
        if len(shown) == 2:  # noqa: PLR2004 - both directions
            texts.append(
                f"On {machine_name(result)}, a store on the same machine writes at {shown[0]} of the rate of Arrow "
                f"Flight's `do_put`, which writes to memory, and is read at {shown[1]} of the rate of its `do_get`"
            )
    if "scale" in parts:
        best = max(parts["scale"]["cases"], key=lambda case: case["median"])
        texts.append(
            f"{place(best).replace(', ', ' with ')} and {best['shippers']} shippers on one host commit "
            f"{best['median']:.1f} GB/s ({_on(parts['scale'])})"
        )
    if "latency" in parts:
        latency = parts["latency"]
        layer, first = latency["read_ms"], latency["first_row_ms"]
        texts.append(
            f"one layer of one request ({latency['parameters']['bytes_per_read'] / 1e6:.1f} MB) out of "
            f"{latency['parameters']['store_gib']:.0f} GiB is read in {layer['p50']:.0f} ms (p99: {layer['p99']:.0f}), "
            f"and a follower has a first row {first['p50']:.0f} ms after it was captured (p99: {first['p99']:.0f}; "
            f"{_on(latency)})"
        )
    if "search" in parts:
        search = parts["search"]
        rates = search["gb_per_core_second"]
        texts.append(
            f"a search of one layer ({search['parameters']['store_gib']:.0f} GiB) scans {rates['projection']:.1f} GB/s "
            f"of rows per core, or {rates['cosine']:.1f} GB/s for a cosine; numpy alone, on the same pages, "
            f"{rates['numpy_file']:.1f} GB/s"
        )
    if not texts:
        return ""
    text = "; ".join(texts)
    return _filled(
        f"{text[0].upper()}{text[1:]}. `bench.store` at {short_revision(result)} ([results]({link}/store.json)).",
    )


def extraction(result: Mapping[str, Any], link: str) -> str:
    """Return how fast a job over a dataset runs beside the engine alone, measured by `bench.extract`."""
    parts = result["parts"]
    where = f"`bench.extract` at {short_revision(result)} ([results]({link}/extract.json))"
    texts = []
    if "job" in parts:
        job = parts["job"]
        parameters, ratio = job["parameters"], job["ratio"]
        text = (
            f"On {machine_name(result)}, `residuum extract` runs {parameters['prompts']:,} prompts of "
            f"{parameters['prefill']} tokens through {parameters['model']} at {ratio['median']:.2f} of the prompts per "
            f"second of vLLM's AsyncLLM without capture ({ratio['lowest']:.2f} to {ratio['highest']:.2f}). {where}."
        )
        texts.append(_filled(text))
    if "documents" in parts:
        texts.append(_documents(parts["documents"], result, where))
    return "\n\n".join(texts)


def _documents(part: Mapping[str, Any], result: Mapping[str, Any], where: str) -> str:
    """Return the table of all ways that wrote all rows of long documents to files."""
    parameters, over = part["parameters"], part["over_stock"]
    rows = []
    for name, rates in part["tokens_per_second"].items():
        captures = name in over
        rows.append(
            (
                {"AsyncLLM": "AsyncLLM, nothing captured", "residuum extract": "**`residuum extract`**"}.get(
                    name, name
                ),
                f"{statistics.median(rates):,.0f}",
                f"{statistics.median(over[name]):.2f}" if captures else "",
                f"{min(over[name]):.2f} to {max(over[name]):.2f}" if name == "residuum extract" else "",
                f"{statistics.median(part['mb_per_second'][name]):,.0f} MB/s" if captures else "",
            )
        )
    intro = (
        f"All tokens of documents of {parameters['prefill']:,} tokens at {len(parameters['layers'])} layers of "
        f"{parameters['model']}, written to files, on {machine_name(result)} with vLLM {vllm_version(result)}. "
        f"`residuum extract` and AsyncLLM took turns, with steps of at most {parameters['max_num_batched_tokens']:,} "
        f"tokens. The others followed with at most "
        f"{parameters['peer_prompts']} documents in each round, and did not sync their files. {where}:"
    )
    absent = "; ".join(f"{name} ({why})" for name, why in part.get("absent", {}).items())
    table = markdown_table(("", "tokens/s", "AsyncLLM = 1", "by round", "rows"), rows)
    notes = [_filled(f"Could not run there: {absent}.")] if absent else []
    return "\n\n".join([_filled(intro), table, *notes])


def service(result: Mapping[str, Any], _: str) -> str:
    """Return the overhead of the service over vLLM's engine, measured by `bench.service`."""
    rows = [
        (
            f"{level['streams']} at a time, runner {part['model_runner'].upper()}",
            f"{level['difference']['tokens_per_second_ratio']:.3f}",
            f"{level['difference']['added_first_token_ms']:+.1f} ms",
            f"{level['difference']['added_token_ms']:+.3f} ms",
        )
        for part in result["parts"].values()
        for level in part["levels"]
    ]
    parameters = next(iter(result["parts"].values()))["parameters"]
    compared = f"`Generate` compared with AsyncLLM called directly, {_model(parameters)}"
    head = f"{compared}, `bench.service` at {short_revision(result)}"
    return markdown_table((head, "tokens/s, AsyncLLM = 1", "to the first token", "each further token"), rows)


def verdicts(result: Mapping[str, Any], link: str) -> str:
    """Return what probes, features and captures add to a token, measured by `bench.service`."""
    part = next(iter(result["parts"].values()))
    parameters = part["parameters"]
    names = {
        "probes": f"scores of {parameters['probes']} linear probes",
        "features": f"the strongest of {parameters['features']:,} features at one layer, captured",
        "captures": "rows of all layers, captured",
    }
    rows = [
        (
            f"{level['streams']} at a time: {words}",
            f"{more['tokens_per_second_ratio']:.2f}",
            percent(more["token_ratio"]),
            f"{percent(more['first_token_ratio'])} ({more['added_first_token_ms']:.0f} ms)",
        )
        for level in part["levels"]
        for way, words in names.items()
        if (more := level["over_residuum"].get(way))
    ]
    intro = (
        f"What probes and captures add to the service without them ([results]({link}/verdicts.json)). Prompts share "
        f"{parameters['shared_prefix']:,} cached tokens; the prompt's last token and the reply are scored or captured:"
    )
    head = f"{_model(parameters)}, `bench.service` at {short_revision(result)}"
    columns = (head, "tokens/s, without = 1", "each token", "to the first token")
    return "\n\n".join([_filled(intro), markdown_table(columns, rows)])


def served(result: Mapping[str, Any], _: str) -> str:
    """Return the overhead of each way with a server over stock `vllm serve`, measured by `bench.service --served`."""
    rows = []
    for part in result["parts"].values():
        for level in part["levels"]:
            for way, words in _SERVED.items():
                if more := level["over_served"].get(way):
                    rounds = more["first_token_ratios"]
                    at_a_time = f"{level['streams']} at a time, runner {part['model_runner'].upper()}"
                    figures = (
                        f"{more['first_token_ratio']:.3f} ({rounds[0]:.3f} to {rounds[-1]:.3f})",
                        f"{more['token_ratio']:.3f}",
                    )
                    rows.append((f"{at_a_time}, {words}", *figures))
    parameters = next(iter(result["parts"].values()))["parameters"]
    compared = f"Compared with stock `vllm serve` through HTTP, {_model(parameters)}"
    if parameters["shared_prefix"]:
        compared += f", prompts share {parameters['shared_prefix']:,} tokens"
    head = f"{compared}, `bench.service` at {short_revision(result)}"
    return markdown_table((head, "to the first token, stock = 1 (rounds)", "each further token, stock = 1"), rows)


def suite(result: Mapping[str, Any], link: str) -> str:
    """Return the cost of capturing everything compared with other systems, measured by `bench.suite`."""
    measured = by_name(result["parts"])
    base, ours = measured.get(BASELINE), measured.get(ALL_LAYERS)
    if base is None or ours is None:
        return ""
    shown = [measured[name] for name in (EAGER, ZERO_LAYER, ALL_LAYERS) if name in measured]
    shown += [item for item in measured.values() if item.peer]
    rows = [_suite_row(item, base, ours) for item in shown]
    head = f"{_workload(result['workload'])}, `bench.suite` at {short_revision(result)}"
    intro = (
        "All layers of every token until a client holds them, compared with other ways in the same run, on "
        f"{machine_name(result)} with vLLM {vllm_version(result)} ([report]({link}/report.md)):"
    )
    missing = ", ".join(failures(result["parts"]))
    notes = [_rounds(measured)]
    if missing:
        notes.append(_filled(f"The report says why these could not run there: {missing}."))
    columns = (head, "generation", "over stock", "fetch", "both, ours = 1")
    stock = ("stock vLLM", seconds(base.generation), "", "", "")
    return "\n\n".join(filter(None, [_filled(intro), markdown_table(columns, [stock, *rows]), *notes]))


def _enabled_sites(result: Mapping[str, Any], link: str) -> str:
    costs = [GroupCost(**{**group, "sites": tuple(group["sites"])}) for group in result["groups"]]
    rows = [
        (
            ", ".join(f"`{site}`" for site in cost.sites) or "`resid_post` alone",
            f"{cost.points}" if cost.points else "",
            percent(cost.ratio_to_stock),
            "" if cost.per_point is None else percent(1 + cost.per_point, 2),
        )
        for cost in costs
    ]
    rounds = "one round" if result["rounds"] == 1 else f"{result['rounds']} rounds"
    intro = (
        f"Generation while nobody captures, on one {result['machine']['gpu'] or 'CPU'} with vLLM "
        f"{vllm_version(result)}, {rounds} ([results]({link})). A point is a site in one layer:"
    )
    head = f"enabled sites; {_workload(result['workload'])}, `bench.sites` at {short_revision(result)}"
    dear = [cost for cost in costs if cost.per_point is not None and 1 + cost.per_point > POINT_LIMIT]
    named = "; ".join(", ".join(f"`{site}`" for site in cost.sites) for cost in dear)
    share = percent(POINT_LIMIT).lstrip("+")
    verdict = (
        f"More than {share} for each point: {named}."
        if dear
        else f"In each group, a point adds less than {share} on average. The costs of all enabled points add up."
    )
    table = markdown_table((head, "points", "over stock vLLM", "each point"), rows)
    return f"{_filled(intro)}\n\n{table}\n\n{_filled(verdict)}"


def _rounds(measured: Mapping[str, Measured]) -> str:
    """Return the spread between the rounds of a suite, for configurations that ran in several rounds."""
    base = measured[BASELINE]
    named = {"nothing captured": ZERO_LAYER, "all layers": ALL_LAYERS}
    ratios = {words: measured[name].by_round(base) for words, name in named.items() if name in measured}
    ratios = {words: values for words, values in ratios.items() if len(values) > 1}
    if not ratios:
        return ""
    told = "; ".join(f"{words} {', '.join(percent(value) for value in values)}" for words, values in ratios.items())
    text = f"Over stock, round by round: {told}."
    widest = max(max(values) - min(values) for values in ratios.values())
    if ZERO_LAYER in measured and widest > abs(measured[ALL_LAYERS].over(base) - measured[ZERO_LAYER].over(base)):
        text += " The rounds differ by more than these two rows of the table do: differences of that size say nothing."
    return _filled(text)


def _suite_row(item: Measured, base: Measured, ours: Measured) -> tuple[str, ...]:
    names = {EAGER: "stock vLLM, `enforce_eager`", ZERO_LAYER: "residuum, nothing captured", ALL_LAYERS: "**residuum**"}
    relative = times(item.total / ours.total) if item.layers and item.total and ours.total else ""
    return (
        names.get(item.name, item.name),
        seconds(item.generation),
        percent(item.over(base)),
        seconds(item.fetch) if item.layers else "",
        relative,
    )


def _kernel(kernel: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    parameters = kernel["parameters"]
    found = {
        (item["way"], item["operation"], item["unique"]): item["times"]["memory"]["us"]
        for item in kernel["measurements"]
        if item["hidden"] == _KERNEL_HIDDEN and not item["failed"]
    }
    least, most = min(parameters["unique"]), max(parameters["unique"])
    rows = [
        (
            words.format(requests=parameters["requests"]),
            *(_microseconds([found.get((way, name, unique)) for name in _OPERATIONS]) for unique in (least, most)),
        )
        for way, words in _WAYS.items()
    ]
    gated = [found.get(("tap", "gated add", unique)) for unique in (least, most)]
    if all(gated):  # older results do not have it
        rows.insert(1, ("the same: `Add` with a gate", *(_microseconds([value]) for value in gated)))
    head = f"steering {parameters['rows']} rows of {_KERNEL_HIDDEN} after one layer, in a CUDA graph"
    versions = f"vLLM {vllm_version(result)}, Triton {result['versions']['triton']}"
    columns = (
        f"{head}, {versions}, `bench.steering` at {short_revision(result)}",
        f"{least} operation",
        f"{most} different ones",
    )
    return markdown_table(columns, rows)


def _microseconds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    digits = 1 if known and max(known) < 20 else 0  # noqa: PLR2004 - three figures
    return ", ".join(f"{value:.{digits}f}" for value in known) + " µs"


def _engine(engine: Mapping[str, Any]) -> str:
    parameters = engine["parameters"]
    rates = {case["case"]: case["tokens_per_second"] for case in engine["cases"]}
    most = f"K={parameters['batch_size']}"
    if not {"K=0", "K=1", most} <= rates.keys():
        return ""
    requests = parameters["batch_size"]
    all_over_one, one_over_none = rates[most] / rates["K=1"], rates["K=1"] / rates["K=0"]
    text = (
        f"{requests} requests at once with {_shape(parameters['shape'])}, every layer steered: with {requests} "
        f"different vectors instead of one, throughput is {all_over_one:.3f} times as high. With one vector it is "
        f"{one_over_none:.2f} of unsteered throughput with idle taps."
    )
    return _filled(text)


def _over_stock(mode: Mapping[str, Any]) -> str:
    return percent(mode["generation_seconds"]["ratio_to_stock"])


def _by_round(mode: Mapping[str, Any]) -> str:
    """Return the median of a mode's rounds, each over stock in the same round, and their range if there are several."""
    ratios = mode["generation_seconds"]["ratio_by_round"]
    median = percent(statistics.median(ratios))
    return f"{median} ({percent(min(ratios))} to {percent(max(ratios))})" if len(ratios) > 1 else median


def _workload(workload: Mapping[str, Any]) -> str:
    requests = f"{workload['batch_size']} requests of {workload['prefill']} + {workload['decode']} tokens"
    return f"{_model(workload)}, {requests}{', not compiled' if workload.get('eager') else ''}"


def _model(workload: Mapping[str, Any]) -> str:
    name: str = workload["model"]
    return _shape(name) if workload["engine_args"].get("load_format") == "dummy" else name


def _shape(name: str) -> str:
    return f"the shape of {name[0].upper()}{name[1:-1]}{name[-1].upper() if name[-2:-1].isdigit() else name[-1]}"


def _on(part: Mapping[str, Any]) -> str:
    return f"on {part['parameters']['filesystem']}"


def _read(file: Path) -> Any:
    return json.loads(file.read_text())


if __name__ == "__main__":
    main()
