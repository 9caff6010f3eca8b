"""What the service adds to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.figures.words import filled, model_words, with_range
from bench.output import markdown_table, percent, short_revision
from bench.service.report import token_ratios
from bench.service.ways import WAYS

_SERVED = {
    "vllm serve, taps": "`vllm serve` with taps, without capture",
    "vllm serve, captures": "`vllm serve`, last prompt token and reply captured at all layers",
    "residuum": "the inference service, without capture",
    "captures": "the inference service, last prompt token and reply captured at all layers",
}
"""The ways with a server, by their names in results of `bench.service`."""


def service(result: Mapping[str, Any], _: str) -> str:
    """Return the overhead of the service over vLLM's engine, measured by `bench.service`."""
    rows = [
        (
            f"{level['streams']} at a time, runner {part['model_runner'].upper()}",
            with_range("{:.3f}".format, more["tokens_per_second_ratio"], (ours / theirs for theirs, ours in rates)),
            with_range("{:+.1f} ms".format, more["added_first_token_ms"], (ours - theirs for theirs, ours in firsts)),
            f"{more['added_token_ms']:+.3f} ms",
        )
        for part in result["parts"].values()
        for level in part["levels"]
        if (more := level["difference"])
        and (rates := _pairs(level, "tokens_per_second"))
        and (firsts := _pairs(level, "first_token_ms"))
    ]
    parameters = _parameters(result)
    compared = f"`Generate` compared with AsyncLLM called directly, {model_words(parameters)}"
    head = f"{compared}, `bench.service` at {short_revision(result)}"
    columns = (head, "tokens/s, AsyncLLM = 1 (rounds)", "to the first token (rounds)", "each further token")
    return markdown_table(columns, rows)


def _pairs(level: Mapping[str, Any], figure: str) -> list[tuple[float, float]]:
    """Return a figure of each round, of AsyncLLM and of the service."""
    return [(theirs[figure], ours[figure]) for theirs, ours in zip(*(level[way] for way in WAYS), strict=True)]


def verdicts(result: Mapping[str, Any], link: str) -> str:
    """Return what probes, features and captures add to a token, and servers to stock `vllm serve`, if measured."""
    part, parameters = next(iter(result["parts"].values())), _parameters(result)
    names = {
        "probes": f"scores of {parameters['probes']} linear probes",
        "features": f"the strongest of {parameters['features']:,} features at one layer, captured",
        "captures": "rows of all layers, captured",
    }
    rows = [
        (
            f"{level['streams']} at a time: {words}",
            f"{more['tokens_per_second_ratio']:.2f}",
            f"{percent(more['token_ratio'])} ({percent(rounds[0])} to {percent(rounds[-1])})",
            f"{percent(more['first_token_ratio'])} ({more['added_first_token_ms']:.0f} ms)",
        )
        for level in part["levels"]
        for way, words in names.items()
        if (more := level["over_residuum"].get(way)) and (rounds := token_ratios(level, way))
    ]
    intro = (
        f"What probes and captures add to the cost of the service ([results]({link}/verdicts.json)), compared with the "
        f"service without them. Prompts share {parameters['shared_prefix']:,} cached tokens. The prompt's last token "
        "and the reply are scored or captured:"
    )
    head = f"{model_words(parameters)}, `bench.service` at {short_revision(result)}"
    columns = (head, "tokens/s, without = 1", "each token (rounds)", "to the first token")
    with_servers = [served(result)] if any("over_served" in level for level in part["levels"]) else []
    return "\n\n".join([filled(intro), markdown_table(columns, rows), *with_servers])


def _parameters(result: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = next(iter(result["parts"].values()))["parameters"]
    return parameters


def served(result: Mapping[str, Any]) -> str:
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
    parameters = _parameters(result)
    compared = f"Compared with stock `vllm serve` through HTTP, {model_words(parameters)}"
    if parameters["shared_prefix"]:
        compared += f", prompts share {parameters['shared_prefix']:,} tokens"
    head = f"{compared}, `bench.service` at {short_revision(result)}"
    return markdown_table((head, "to the first token, stock = 1 (rounds)", "each further token, stock = 1"), rows)
