"""Part `engine`: a whole engine whose batch has 0, 1, ... or as many steering configurations as requests."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.capture.processes import environment_of
from bench.capture.shapes import SHAPES, write_shape
from bench.capture.workload import Runner, Sink, Workload
from bench.output import Bar, table
from bench.processes import RunFailedError, run_child

STOCK = "stock"
_BAR_MOST, _BAR_ONE = 0.85, 0.93
_MOST_REPLIES_AS_UNSTEERED = 0.5


@dataclass(frozen=True)
class Case:
    """How a batch is steered: request i has configuration i modulo their number, after every layer."""

    configurations: int
    """The number of configurations; 0 for no steering."""
    per_layer: bool = False
    """Whether a configuration has a vector for each layer instead of one for all layers."""

    @property
    def name(self) -> str:
        """Its name in the result."""
        return f"K={self.configurations}{' per layer' if self.per_layer else ''}"


@dataclass(frozen=True)
class EngineJob:
    """What to measure."""

    shape: str
    cases: tuple[Case, ...]
    runner: Runner = Runner.DEFAULT
    rounds: int = 1
    batch_size: int = 256
    prefill: int = 128
    decode: int = 128
    iterations: int = 5
    eager: bool = False
    max_num_batched_tokens: int = 8192
    kv_cache_gib: float = 4.0

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(SHAPES[self.shape].config["num_hidden_layers"])

    @property
    def bank_rows(self) -> int:
        """The number of vectors that are active together."""
        last = self.num_layers - 1
        return 1 + max(bank_row(case, self.num_layers, case.configurations - 1, last) for case in self.cases)

    def workload(self) -> Workload:
        """Return the workload for bench.capture, whose subjects and prompts this benchmark uses."""
        return Workload(
            model=write_shape(self.shape),
            batch_size=self.batch_size,
            prefill=self.prefill,
            decode=self.decode,
            iterations=self.iterations,
            eager=self.eager,
            sink=Sink.RING,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_gib=self.kv_cache_gib,
            engine_args=SHAPES[self.shape].engine_args,
        )


def bank_row(case: Case, num_layers: int, configuration: int, layer: int) -> int:
    """Return the row in the bank of a configuration's vector for a layer."""
    return configuration * num_layers + layer if case.per_layer else configuration


def rotated(cases: Sequence[Case], number: int) -> list[Case]:
    """Return the cases in the order of an iteration. Each begins with another case, and every second is reversed.

    So a drift of the machine favours no case, and no case always follows the same other case.
    """
    at = number % len(cases)
    order = [*cases[at:], *cases[:at]]
    return order if number % 2 == 0 else order[::-1]


def measure(job: EngineJob) -> dict[str, Any]:
    """Measure stock vLLM and the taps, each with its own engine; return the part of the result."""
    runs = [
        _run(job, subject, number)
        for number in range(job.rounds)
        for subject in ((STOCK, "taps") if number % 2 == 0 else ("taps", STOCK))
    ]
    return summarise(job, runs)


def _run(job: EngineJob, subject: str, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        folder = Path(scratch)
        told = {"job": asdict(job), "stock": subject == STOCK, "folder": scratch}
        what = f"engine, {subject}, round {number + 1}, model runner {job.runner.value}"
        run = run_child("bench.steering.engine_child", told, folder, environment_of(folder, job.runner), what)
        return {"round": number, "subject": subject, **run}


def summarise(job: EngineJob, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of the result: each case over all its iterations, compared with other cases."""
    names = [STOCK, *(case.name for case in job.cases)]
    iterations = {
        name: sorted(
            ({"round": run["round"], **item} for run in runs for item in run["iterations"] if item["case"] == name),
            key=lambda item: (item["round"], item["number"]),
        )
        for name in names
    }
    _check_steering(job, iterations)
    tokens = job.batch_size * job.decode
    rates = {
        name: [tokens / item["seconds"] for item in items if not item["warmup"]] for name, items in iterations.items()
    }
    medians = {name: statistics.median(values) for name, values in rates.items()}
    cases = [
        {
            "case": name,
            "tokens_per_second": medians[name],
            "fastest": max(rates[name]),
            "slowest": min(rates[name]),
            "ratio_to_stock": medians[name] / medians[STOCK],
            "ratio_to_unsteered": medians[name] / medians["K=0"] if "K=0" in medians else None,
            "seconds": [item["seconds"] for item in iterations[name] if not item["warmup"]],
            "first_seconds": [item["seconds"] for item in iterations[name] if item["warmup"]],
            "replies_as_stock": _agreement(iterations[name], iterations[STOCK]),
        }
        for name in names
    ]
    plain = [{key: value for key, value in run.items() if key != "iterations"} for run in runs]
    parameters = {**asdict(job), "runner": job.runner.value, "cases": [case.name for case in job.cases]}
    return {"parameters": parameters, "runs": plain, "cases": cases}


def _check_steering(job: EngineJob, iterations: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for case in job.cases:
        if not case.configurations:
            continue
        as_stock = _agreement(iterations[case.name], iterations[STOCK])
        if as_stock > _MOST_REPLIES_AS_UNSTEERED:
            raise RunFailedError(f"engine, {case.name}: {as_stock:.0%} of the replies are the same as without steering")
        one = Case(1, case.per_layer)
        if case.configurations > 1 and one in job.cases:
            # Only for requests whose configuration differs from the one that all have with K = 1.
            others = [index for index in range(job.batch_size) if index % case.configurations]
            as_one = _agreement(iterations[case.name], iterations[one.name], others)
            if as_one > _MOST_REPLIES_AS_UNSTEERED:
                raise RunFailedError(
                    f"engine, {case.name}: {as_one:.0%} of the replies equal those with one configuration"
                )


def _agreement(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], requests: Sequence[int] | None = None
) -> float:
    """Return the share of replies that are equal, token by token, between iterations with the same prompts."""
    same = [
        a["replies"][index] == b["replies"][index]
        for a, b in zip(one, other, strict=True)
        for index in (requests if requests is not None else range(len(a["replies"])))
    ]
    return statistics.mean(same) if same else 0.0


def bars(job: EngineJob, part: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the cases that were measured."""
    rates = {case["case"]: case["tokens_per_second"] for case in part["cases"]}
    found = []
    for per_layer in (False, True):
        kinds = [case for case in job.cases if case.per_layer is per_layer and case.configurations]
        one = Case(1, per_layer)
        if one not in kinds:
            continue
        most = max(kinds, key=lambda case: case.configurations)
        if most != one:
            ratio = rates[most.name] / rates[one.name]
            found.append(Bar(f"{most.name} over {one.name}, tokens/s", ratio, _BAR_MOST, at_most=False))
        if "K=0" in rates:
            ratio = rates[one.name] / rates["K=0"]
            found.append(Bar(f"{one.name} over unsteered, tokens/s", ratio, _BAR_ONE, at_most=False))
    return found


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table."""
    head = ["case", "tokens/s", "over stock", "over unsteered", "slowest", "fastest", "first, s", "as stock"]
    rows = [
        [
            case["case"],
            f"{case['tokens_per_second']:.0f}",
            f"{case['ratio_to_stock']:.3f}",
            "" if case["ratio_to_unsteered"] is None else f"{case['ratio_to_unsteered']:.3f}",
            f"{case['slowest']:.0f}",
            f"{case['fastest']:.0f}",
            " ".join(f"{seconds:.2f}" for seconds in case["first_seconds"]),
            f"{case['replies_as_stock']:.0%}",
        ]
        for case in part["cases"]
    ]
    yield table(head, rows)
