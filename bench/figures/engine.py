"""What taps, capture and steering cost the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures.words import by_round, filled, shape_words, workload_words
from bench.output import machine_name, markdown_table, percent, short_revision, times, vllm_version
from bench.sites import POINT_LIMIT, GroupCost

_MODES = {
    "stock-again": "stock vLLM in another process: the error of the measurement",
    "idle": "idle taps, nothing captured",
    "all-layers": "all {layers} layers of every token{sink}: {gb:.1f} GB in {generation:.1f} s",
    "steer": "every layer steered, each request by its own vector",
    "all-layers+steer": "both",
}
_PARALLEL = {
    "data_parallel_size": "data",
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
}
"""The kinds of parallelism, by vLLM's arguments."""
_WAYS = {
    "tap": "the taps' kernel: `Add`, `Ablate`, `Cap`",
    "gather/scatter": "rows gathered and scattered by operation",
    "loop": "a loop over {requests} requests",
}
_OPERATIONS = ("add", "ablate", "cap")
_KERNEL_HIDDEN = 2560


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
        rows.append((label, *(by_round(mode) if mode else "" for mode in found)))
    head = f"{workload_words(workload)}, `bench.capture` at {short_revision(result)}"
    where = f"on {machine_name(result)} ([results]({link}))"
    intro = f"Generation time compared with stock vLLM {vllm_version(result)} in the same run, {where}."
    intro += " Each figure is the median of the rounds, with their range in brackets."
    return f"{filled(intro)}\n\n" + markdown_table((head, *(f"runner {runner.upper()}" for runner in runners)), rows)


def several_gpus(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what `bench.capture` measured on several GPUs, from results by their links. Empty without results."""
    rows: list[tuple[str, ...]] = []
    workloads: dict[str, None] = {}  # a set that keeps the order
    for link, result in results.items():
        workloads[workload_words(result["workload"])] = None
        arguments = result["workload"]["engine_args"]
        layout = [f"{kind} {arguments[name]}" for name, kind in _PARALLEL.items() if arguments.get(name, 1) > 1]
        modes = {mode["mode"]: by_round(mode) for mode in result["modes"]}
        where = f"[{machine_name(result)}]({link}), {short_revision(result)}"
        rows.append((where, ", ".join(layout), modes.get("idle", "not measured"), modes["all-layers"]))
    if not rows:
        return ""
    return (
        "## On several GPUs\n\n"
        + filled(
            f"Generation time compared with stock vLLM in the same run and layout: {', or '.join(workloads)}, "
            "`bench.capture`, with captured rows written to the ring. With pipeline parallelism and a model of this "
            "size, vLLM's processes take longer to prepare a step than the GPUs take to compute it. So the taps' work "
            "in these processes delays every step."
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
    head = f"{workload_words(result['workload'])}, `bench.capture` at {short_revision(result)}"
    intro = f"Generation time with vLLM {vllm_version(result)}, stock vLLM = 1, on {machine_name(result)}:"
    heads = (head, "as usual", "`VLLM_BATCH_INVARIANT=1`")
    return f"{filled(intro)}\n\n{markdown_table(heads, rows)}"


def enabled_sites(result: Mapping[str, Any], link: str) -> str:
    """Return what enabled sites cost while nobody captures them, measured by `bench.sites`."""
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
        f"Generation time while nobody captures, on one {result['machine']['gpu'] or 'CPU'} with vLLM "
        f"{vllm_version(result)}, {rounds} ([results]({link})). A point is a site in one layer:"
    )
    head = f"enabled sites; {workload_words(result['workload'])}, `bench.sites` at {short_revision(result)}"
    dear = [cost for cost in costs if cost.per_point is not None and 1 + cost.per_point > POINT_LIMIT]
    named = "; ".join(", ".join(f"`{site}`" for site in cost.sites) for cost in dear)
    share = percent(POINT_LIMIT).lstrip("+")
    verdict = (
        f"More than {share} for each point: {named}."
        if dear
        else f"In each group, a point adds less than {share} on average. The costs of all enabled points add up."
    )
    table = markdown_table((head, "points", "over stock vLLM", "each point"), rows)
    return f"{filled(intro)}\n\n{table}\n\n{filled(verdict)}"


def steering(result: Mapping[str, Any], _: str) -> str:
    """Return the cost of steering in a step, measured by `bench.steering`."""
    parts = result["parts"]
    texts = [_kernel(parts["kernel"], result)] if "kernel" in parts else []
    if "engine" in parts:
        texts.append(_engine(parts["engine"]))
    return "\n\n".join(texts)


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
    return "\n\n".join(filter(None, [markdown_table(columns, rows), _gate(kernel)]))


def _gate(kernel: Mapping[str, Any]) -> str:
    """Return what a gate adds to an `Add`, wherever the rows are; empty if that was not measured."""
    times = {
        (item["operation"], item["unique"]): item["times"]
        for item in kernel["measurements"]
        if (item["way"], item["hidden"]) == ("tap", _KERNEL_HIDDEN) and not item["failed"]
    }
    gated = {unique: found for (name, unique), found in times.items() if name == "gated add"}
    if not gated:
        return ""
    memory, cache = (
        max(found[place]["us"] - times["add", unique][place]["us"] for unique, found in gated.items())
        for place in ("memory", "cache")
    )
    return filled(
        f"A gate adds at most {memory:.2f} µs to an `Add` if the rows come from the device's memory, and {cache:.2f} "
        "µs if they are in its cache."
    )


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
        f"{requests} requests run at once on {shape_words(parameters['shape'])}, with every layer steered. Throughput "
        f"with {requests} different vectors is {all_over_one:.3f} times that with one vector. Throughput with one "
        f"vector is {one_over_none:.2f} times that of idle taps without steering."
    )
    return filled(text)
