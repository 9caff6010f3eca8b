"""How fast captured rows reach their readers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.figures.words import filled, over_stock, with_range, workload_words
from bench.output import machine_name, markdown_table, percent, seconds, short_revision, times, vllm_version
from bench.store.scale import place
from bench.suite.plan import ALL_LAYERS, BASELINE, EAGER, ZERO_LAYER
from bench.suite.results import Measured, by_name, failures


def suite(result: Mapping[str, Any], link: str) -> str:
    """Return the cost of capturing everything compared with other systems, measured by `bench.suite`."""
    measured = by_name(result["parts"])
    base, ours = measured.get(BASELINE), measured.get(ALL_LAYERS)
    if base is None or ours is None:
        return ""
    shown = [measured[name] for name in (EAGER, ZERO_LAYER, ALL_LAYERS) if name in measured]
    shown += [item for item in measured.values() if item.peer]
    rows = [_suite_row(item, base, ours) for item in shown]
    head = f"{workload_words(result['workload'])}, `bench.suite` at {short_revision(result)}"
    intro = (
        "All layers of every token, until a client has them, compared with other methods in the same run, on "
        f"{machine_name(result)} with vLLM {vllm_version(result)} ([report]({link}/report.md)):"
    )
    missing = ", ".join(failures(result["parts"]))
    notes = [_rounds(measured)]
    if missing:
        notes.append(filled(f"These methods could not run there (the report says why): {missing}."))
    columns = (head, "generation", "over stock", "fetch", "both, ours = 1")
    stock = ("stock vLLM", seconds(base.generation), "", "", "")
    return "\n\n".join(filter(None, [filled(intro), markdown_table(columns, [stock, *rows]), *notes]))


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
        text += " The spread between rounds is larger than the difference between these two rows of the table, so a "
        text += "difference of that size is within the noise."
    return filled(text)


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


def end_to_end(result: Mapping[str, Any], _: str) -> str:
    """Return the time until all captures of a batch are COMPLETE, measured by `bench.end_to_end`."""
    workload = result["workload"]
    stock = {mode["runner"]: mode for mode in result["modes"] if mode["mode"] == "stock"}
    rows = [
        (
            f"all layers of every token, runner {mode['model_runner'].upper()}",
            over_stock(mode),
            _completed(mode, stock[mode["runner"]]),
        )
        for mode in result["modes"]
        if mode["mode"] == "all-layers" and mode["runner"] in stock
    ]
    stores = "one store" if workload["stores"] == 1 else f"{workload['stores']} stores"
    through = f"through {workload['shippers']} shippers into {stores} on the same host"
    head = (
        f"the same requests with vLLM {vllm_version(result)}, {through}, `bench.end_to_end` at {short_revision(result)}"
    )
    columns = (head, "generation (rounds)", "until all is COMPLETE, stock's generation = 1 (rounds)")
    return markdown_table(columns, rows) if rows else ""


def _completed(mode: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """Return the time until all captures are COMPLETE over stock's generation, with the range of its rounds."""
    seconds = mode["completed_seconds"]
    ratio = seconds["median"] / stock["generation_seconds"]["median"]
    return with_range(times, ratio, seconds["ratio_by_round"])


def encodings(result: Mapping[str, Any], _: str) -> str:
    """Return the savings of an encoding while a model generates, measured by `bench.encodings`."""
    parts = result["parts"]
    if not {"overhead", "end-to-end"} <= parts.keys():
        return ""
    overhead, whole = ({mode["mode"]: mode for mode in parts[name]["modes"]} for name in ("overhead", "end-to-end"))
    rows = [
        (
            words,
            f"{overhead[name]['bytes_per_iteration'] / 1e9:.2f} GB",
            over_stock(overhead[name]),
            _completed(whole[name], whole["stock"]),
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
                f"On {machine_name(result)}, a store on the same machine writes at {shown[0]} times the rate of Arrow "
                f"Flight's `do_put`, which writes to memory, and is read at {shown[1]} times the rate of its `do_get`"
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
            f"and a follower receives the first row {first['p50']:.0f} ms after it was captured (p99: "
            f"{first['p99']:.0f}; {_on(latency)})"
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
    return filled(
        f"{text[0].upper()}{text[1:]}. `bench.store` at {short_revision(result)} ([results]({link}/store.json)).",
    )


def _on(part: Mapping[str, Any]) -> str:
    return f"on {part['parameters']['filesystem']}"


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
            f"{parameters['prefill']} tokens through {parameters['model']} at {ratio['median']:.2f} times the rate "
            f"(prompts per second) of vLLM's AsyncLLM without capture ({ratio['lowest']:.2f} to "
            f"{ratio['highest']:.2f}). {where}."
        )
        texts.append(filled(text))
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
        f"tokens. The other methods ran after them, with at most "
        f"{parameters['peer_prompts']} documents in each round, and did not sync their files. {where}:"
    )
    absent = "; ".join(f"{name} ({why})" for name, why in part.get("absent", {}).items())
    table = markdown_table(("", "tokens/s", "AsyncLLM = 1", "by round", "rows"), rows)
    notes = [filled(f"Could not run there: {absent}.")] if absent else []
    return "\n\n".join([filled(intro), table, *notes])
