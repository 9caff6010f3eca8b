"""Shows what was measured: the bars, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from bench.output import Bar, table
from bench.service.served import CAPTURES, STOCK, TAPS
from bench.service.ways import ADDED, MORE, WAYS

_BAR_STREAMS = 32
_LEAST_RATE, _MOST_TOKEN_MS, _MOST_FIRST_MS = 0.95, 0.2, 5.0
"""The bars: the least share of vLLM's tokens per second, and the most added time in ms, for each token and to the first
one."""
_MOST_TOKEN_RATIO = {"probes": 1.01, "features": 1.05}
"""The bars for probes and features: the time of each token, over that without them."""
_MOST_FIRST_RATIO = 1.05
"""The bar if prompts share their start: the time to the first token, over vLLM's. The cache makes it short."""
_SERVED = (STOCK, TAPS, CAPTURES)
_WITH_CAPTURES = {CAPTURES: "captures in vllm serve", "captures": "captures through gRPC"}
"""The ways with captures that have a bar over stock `vllm serve` if prompts share their start."""


def bars(part: Mapping[str, Any]) -> list[Bar]:
    """Return the bars for 32 streams; none if 32 streams were not measured."""
    level = next((level for level in part["levels"] if level["streams"] == _BAR_STREAMS), None)
    if level is None:
        return []
    streams, more = f"{_BAR_STREAMS} streams", level["difference"]
    rate, added = more["tokens_per_second_ratio"], more["added_token_ms"]
    found = [
        Bar(f"tokens/s of {streams}, over AsyncLLM's", rate, _LEAST_RATE, at_most=False),
        Bar(f"ms more a token, of {streams}", added, _MOST_TOKEN_MS),
    ]
    if part["parameters"]["shared_prefix"]:
        ratio = more["first_token_ratio"]
        found.append(Bar(f"to the first token, of {streams}, over AsyncLLM's", ratio, _MOST_FIRST_RATIO))
        for base in ("over_vllm", "over_residuum") if "captures" in level["over_vllm"] else ():
            than = {"over_vllm": "over AsyncLLM's", "over_residuum": "over without"}[base]
            ratio = level[base]["captures"]["first_token_ratio"]
            found.append(Bar(f"to the first token with captures, of {streams}, {than}", ratio, _MOST_FIRST_RATIO))
        for way, words in _WITH_CAPTURES.items() if level.get("over_served") else ():
            ratio = level["over_served"][way]["first_token_ratio"]
            found.append(Bar(f"to the first token, {words}, of {streams}, over {STOCK}'s", ratio, _MOST_FIRST_RATIO))
    else:
        found.append(Bar(f"ms more to the first token, of {streams}", more["added_first_token_ms"], _MOST_FIRST_MS))
    for name, limit in _MOST_TOKEN_RATIO.items():
        if name in level["over_residuum"]:
            ratio, number = level["over_residuum"][name]["token_ratio"], part["parameters"][name]
            found.append(Bar(f"each token with {number} {name}, over without, {streams}", ratio, limit))
    return found


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table. Further ways have a row of their own, and one with what they add to `residuum`."""
    head = [
        *("streams", "way", "tokens/s", "requests/s", "first token, ms", "each token, ms", "request, ms"),
        *("CPU of a request, ms", "of a token, us"),
    ]
    rows = []
    for level in part["levels"]:
        for way, summaries in ((way, level[way]) for way in (*WAYS, *MORE, *_SERVED) if way in level):
            columns = ("tokens_per_second", "requests_per_second", *ADDED)
            medians = [statistics.median(summary[name] for summary in summaries) for name in columns]
            rows.append([str(level["streams"]), _label(way), *(f"{value:.4g}" for value in medians)])
        rows.append(_difference_row("residuum - AsyncLLM", level["difference"]))
        rows += [_difference_row(f"{way} - residuum", more) for way, more in level["over_residuum"].items()]
        rows += [
            _difference_row(f"{_label(way)} - {STOCK}", more) for way, more in level.get("over_served", {}).items()
        ]
    yield table(head, rows)
    for level in part["levels"]:
        for way in (way for way in MORE if way in level):
            ratios, name = token_ratios(level, way), f"{level['streams']} streams, {_label(way)}"
            middle = statistics.median(ratios)
            yield f"{name}: each token {middle:.3f} times residuum's ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            if stored := level[way][0].get("stored_bytes_per_token"):
                yield f"{name}: {stored:,.0f} bytes stored for each token"
        for way, more in level.get("over_served", {}).items():
            ratios = more["first_token_ratios"]
            yield (
                f"{level['streams']} streams, {_label(way)}: to the first token {more['first_token_ratio']:.3f} times "
                f"{STOCK}'s ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )


def token_ratios(level: Mapping[str, Any], way: str) -> list[float]:
    """Return the time of each token in a way over that of `residuum` in the same round, sorted."""
    return sorted(more["token_ms"] / ours["token_ms"] for ours, more in zip(level[WAYS[1]], level[way], strict=True))


def _label(way: str) -> str:
    return f"residuum, {way}" if way in MORE else way


def _difference_row(name: str, more: Mapping[str, float]) -> list[str]:
    return [
        *("", name, f"x{more['tokens_per_second_ratio']:.3f}", ""),
        *(f"{more[f'added_{figure}']:+.3f}" for figure in ADDED),
    ]
