"""`python -m bench.sites`: the cost of sites that are enabled while nobody captures, compared with stock vLLM.

For each group of sites, an engine with these sites and `resid_post` generates without any capture. It accepts the
workload's flags of bench.capture.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.capture.options import add_runner, add_workload_arguments, sites, workload_of
from bench.capture.processes import run_turn
from bench.capture.results import Run, times_of
from bench.capture.workload import Mode, Turn
from bench.machine import describe
from bench.options import add_output, positive
from bench.output import Bar, percent, table, write_result
from bench.processes import measuring

_ALWAYS = "resid_post"
_FIGURE = "generation_seconds"
_GROUPS = (
    "",
    "resid_pre,attn_in,resid_mid,mlp_in",
    "attn_out,mlp_out,final_norm",
    "q,k,v",
    "q_pre,k_pre",
    "z,mlp_act",
    "resid_pre,attn_in,attn_out,resid_mid,mlp_in,mlp_out,final_norm,q,k,v,q_pre,k_pre,z,mlp_act",
)
"""The last group has all sites of a dense model."""
_WORKLOAD = (
    *("--shape", "qwen2.5-3b", "--batch-size", "32", "--prefill", "512", "--decode", "128", "--iterations", "5"),
    *("--max-num-batched-tokens", "8192", "--kv-cache-gib", "4", "--ring-mib", "256", "--sink", "ring"),
)
POINT_LIMIT = 1.003
"""The limit of a point's generation, relative to stock's. A point is a site in one layer."""
_IN_ONE_LAYER = {"resid_pre", "final_norm"}
"""Sites that add one point to the graph, whatever the number of layers."""


@dataclass(frozen=True)
class GroupCost:
    """The generation with a group of sites enabled, relative to stock's."""

    sites: tuple[str, ...]
    points: int
    """The points that the group adds to the graph."""
    ratio_to_stock: float | None
    """Median over stock's median, over all rounds."""
    ratio_of_best: float | None
    """The shortest time over stock's shortest. Other load on the machine affects it least."""
    ratio_by_round: tuple[float, ...]
    per_point: float | None
    """What a point adds to the ratio of `resid_post` alone; None for a group without points."""

    @property
    def name(self) -> str:
        """The sites as a text."""
        return named(self.sites)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result. Each group is measured as soon as the one before it."""
    options = parse(arguments)
    workload = workload_of(options)
    groups: list[tuple[str, ...] | None] = [None, *options.groups]  # None: stock
    runs: dict[tuple[str, ...] | None, list[Run]] = {group: [] for group in groups}
    written = {"benchmark": "bench.sites", **describe(), "rounds": options.rounds, "workload": workload.shown()}
    with measuring():
        for number in range(options.rounds):
            for group in groups if number % 2 == 0 else groups[::-1]:
                mode = Mode.STOCK if group is None else Mode.IDLE
                enabled = workload if group is None else replace(workload, capture_sites=(_ALWAYS, *group))
                run = run_turn(Turn(number, options.runner, (mode,)), enabled)[0]
                runs[group].append(run)
                print(f"round {number + 1}  {'stock' if group is None else named(group)}: {run.line()}", flush=True)
            measured = {group: each for group, each in runs.items() if group is not None and each}
            costs = summarise(runs[None], measured)
            if options.output:
                write_result(
                    options.output,
                    {**written, "rounds": number + 1, "groups": [asdict(cost) for cost in costs], "runs": plain(runs)},
                )
    print(show(costs))
    print(*(bar.line() for bar in bars(costs)), sep="\n")


def summarise(stock: Sequence[Run], groups: Mapping[tuple[str, ...], Sequence[Run]]) -> list[GroupCost]:
    """Return the cost of each group. The first has no sites."""
    times = {group: times_of(runs, stock, _FIGURE) for group, runs in groups.items()}
    base, whole = next(iter(times.values())).median, times_of(stock, stock, _FIGURE).median
    points = {group: points_of(group, runs[0].num_layers) for group, runs in groups.items()}
    return [
        GroupCost(
            sites=group,
            points=points[group],
            ratio_to_stock=measured.ratio_to_stock,
            ratio_of_best=measured.ratio_of_best,
            ratio_by_round=measured.ratio_by_round,
            per_point=(measured.median - base) / whole / points[group] if points[group] else None,
        )
        for group, measured in times.items()
    ]


def points_of(group: Sequence[str], num_layers: int) -> int:
    """Return the points that a group adds to the graph."""
    return sum(1 if site in _IN_ONE_LAYER else num_layers for site in group)


def named(group: Sequence[str]) -> str:
    """Return the sites of a group as a text."""
    return ", ".join(group) or f"{_ALWAYS} alone"


def bars(costs: Sequence[GroupCost]) -> list[Bar]:
    """Return the bar of each group: the cost of one of its points."""
    return [
        Bar(f"a point of {cost.name}", 1 + cost.per_point, POINT_LIMIT) for cost in costs if cost.per_point is not None
    ]


def show(costs: Sequence[GroupCost]) -> str:
    """Return the printed table."""
    rows = [
        (
            *(cost.name, f"{cost.points}", percent(cost.ratio_to_stock), percent(cost.ratio_of_best)),
            ", ".join(map(percent, cost.ratio_by_round)),
            "" if cost.per_point is None else percent(1 + cost.per_point, 3),
        )
        for cost in costs
    ]
    return table(("sites", "points", "over stock", "best", "by round", "each point"), rows)


def plain(runs: Mapping[tuple[str, ...] | None, Sequence[Run]]) -> list[dict[str, Any]]:
    """Return the runs as plain data, without the digests of replies."""
    return [
        {
            "sites": None if group is None else list(group),
            "round": run.round,
            "model_runner": run.model_runner,
            "device": run.device,
            "start_seconds": run.start_seconds,
            "memory": asdict(run.memory),
            "generation_seconds": [iteration.generation_seconds for iteration in run.iterations],
        }
        for group, each in runs.items()
        for run in each
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.sites", description=__doc__)
    add_workload_arguments(parser)
    parser.set_defaults(**vars(parser.parse_args(_WORKLOAD)))
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each group, each in a fresh process")
    parser.add_argument(
        "--groups", type=_groups, default=[_group(text) for text in _GROUPS], metavar="SITE,...;...",
        help=f"groups of sites, separated by semicolons; an empty one is {_ALWAYS} alone, with which the others are "
        "compared, and comes first (default: all sites of a dense model, in seven groups)",
    )  # fmt: skip
    add_runner(parser)
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.groups[0]:
        parser.error(f"the first group must be empty: the cost of a point is what it adds to {_ALWAYS} alone")
    return options


def _group(text: str) -> tuple[str, ...]:
    return sites(text) if text else ()


def _groups(text: str) -> list[tuple[str, ...]]:
    return [_group(group) for group in text.split(";")]


if __name__ == "__main__":
    main()
