"""`python -m bench.conformance`: compares captured rows with transformers, architecture by architecture.

For each architecture, the real services serve a tiny random model. Every row of every layer goes through the ring, a
shipper and the store, and is then compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.conformance.architectures import ARCHITECTURES, Architecture
from bench.conformance.check import check, to_json
from bench.conformance.quantized import QUANTIZATIONS
from bench.conformance.reference import ALL_SITES
from bench.conformance.results import Outcome, Verdict, sites_refused
from bench.conformance.setup import Setup
from bench.machine import describe as describe_origin
from bench.options import add_engine_args, add_output, named, positive, words
from bench.output import write_result
from bench.processes import measuring, running_store

_LINE = "{:<15} {:<8} {:>6} {:>7} {:>7} {:>12} {:>12} {:>10}  {:<14} {:>6}"
_HEADS = ("architecture", "verdict", "layers", "rows", "missing", "min cos", "mean cos", "max error", "captures", "s")


@dataclass(frozen=True)
class Case:
    """An architecture, and the setup of its engine."""

    architecture: Architecture
    setup: Setup
    repetition: int = 0
    rest: int = 0
    """How often sites were left out because the service had refused them."""

    @property
    def name(self) -> str:
        """The architecture's name, with what distinguishes the case from its others."""
        setup = self.setup
        layout = [setup.tensor_parallel_size, setup.pipeline_parallel_size]
        layout += [setup.data_parallel_size] * (setup.data_parallel_size > 1)
        name = self.architecture.name + ("" if layout == [1, 1] else f"-{'x'.join(map(str, layout))}")
        name += "-rest" + (f"{self.rest}" if self.rest > 1 else "") if self.rest else ""
        name += f"-{self.setup.quantization}" if self.setup.quantization else ""
        return f"{name}#{self.repetition + 1}" if self.repetition else name


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result. The exit code is 1 if an architecture is neither exact nor refused."""
    options = parse(arguments)
    setup = setup_of(options)
    context = {"benchmark": "bench.conformance", **describe_origin(), "setup": asdict(setup)}

    def keep_result(outcomes: Sequence[Outcome]) -> None:
        # After each outcome: a run of an hour that is interrupted keeps what it has found.
        if options.output:
            write_result(options.output, {**context, "architectures": [to_json(outcome) for outcome in outcomes]})

    with measuring():
        outcomes = run_all(cases_of(options, setup), jobs=options.jobs, keep=options.keep, report=keep_result)
    sys.exit(0 if all(outcome.holds for outcome in outcomes) else 1)


def run_all(
    cases: Sequence[Case], *, jobs: int, keep: Path | None, report: Callable[[Sequence[Outcome]], None]
) -> list[Outcome]:
    """Run the cases with one store, `jobs` at a time. Print each outcome when it is known, and report all so far."""
    print(_LINE.format(*_HEADS), flush=True)
    outcomes: list[tuple[int, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch, ThreadPoolExecutor(jobs) as pool:
        folder = keep or Path(scratch)
        with running_store(folder) as store:

            def run(case: Case) -> Outcome:
                try:
                    return check(case.architecture, case.setup, store.endpoint, folder / f"run-{case.name}")
                except Exception as error:  # noqa: BLE001 - for example, transformers may be too old; other cases go on
                    return Outcome(case.architecture.name, Verdict.FAILED, f"{type(error).__name__}: {error}")

            def run_with_rest(case: Case) -> list[tuple[Case, Outcome]]:
                found = [(case, run(case))]
                while (rest := rest_of(*found[-1])) is not None:
                    found.append((rest, run(rest)))
                return found

            try:
                running = {pool.submit(run_with_rest, case): place for place, case in enumerate(cases)}
                for future in as_completed(running):
                    for case, outcome in future.result():
                        outcomes.append((running[future], outcome))
                        print(describe(case.name, outcome), flush=True)
                    report(in_order(outcomes))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return in_order(outcomes)


def in_order(outcomes: Sequence[tuple[int, Outcome]]) -> list[Outcome]:
    """Return the outcomes in the order of their cases; cases end in another order."""
    return [outcome for _, outcome in sorted(outcomes, key=itemgetter(0))]


def rest_of(case: Case, outcome: Outcome) -> Case | None:
    """Return the case without the sites that the service refused by name; None if there are none, or no others."""
    refused = sites_refused(outcome.detail) if outcome.verdict is Verdict.REFUSED else frozenset()
    rest = tuple(site for site in case.setup.sites if site not in refused)
    if not rest or rest == case.setup.sites:
        return None
    return replace(case, setup=replace(case.setup, sites=rest), rest=case.rest + 1)


def describe(name: str, outcome: Outcome) -> str:
    """Return an outcome as a line, with further lines for other experts and for the reason if it is not exact."""
    figures: tuple[Any, ...] = ("", "", "", "", "", "", "")
    if outcome.rows:
        figures = (
            outcome.layers,
            outcome.rows,
            outcome.missing,
            f"{outcome.min_cosine:.8f}",
            f"{outcome.mean_cosine:.8f}",
            f"{outcome.max_error:.1e}",
            ", ".join(f"{count} {state}" for state, count in outcome.states.items()),
        )
    lines = [_LINE.format(name, outcome.verdict.value, *figures, f"{outcome.seconds:.1f}")]
    if outcome.changed_rows is not None:
        lines.append(f"rows after a change of steering: {outcome.changed_rows}")
    if outcome.ends_killed is not None:
        ends = ", ".join(f"{count} {end}" for end, count in outcome.ends_killed.items())
        lines.append(f"captures after a worker was killed: {ends or 'none'}")
    if outcome.rows_alone:
        lines.append(f"other bits in the batch than alone: {outcome.other_bits} of {outcome.rows_alone} rows")
        lines += [f"{place}: {count}" for place, count in outcome.other_places.items()]
    if outcome.other_experts:
        lines.append(f"other experts at near ties: {outcome.other_experts} times, gap at most {outcome.widest_tie:.4f}")
    if outcome.verdict is not Verdict.EXACT:
        lines.append(outcome.detail)
    return "\n    ".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    defaults = Setup()
    parser = argparse.ArgumentParser(prog="python -m bench.conformance", description=__doc__)
    parser.add_argument(
        "--architectures", type=named(ARCHITECTURES), default=list(ARCHITECTURES.values()),
        help=f"names, separated by commas (default: all): {', '.join(ARCHITECTURES)}",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=defaults.dtype)
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--eager", action="store_true", default=defaults.eager, help="do not compile (the default)")
    compiling.add_argument("--compiled", dest="eager", action="store_false", help="compile, as the service does")
    parser.add_argument(
        "--layouts", type=_layouts, default=[(1, 1, 1)], metavar="TPxPP[xDP],...",
        help="tensor, pipeline and data parallel size, such as 2x1,1x2,1x1x2; on a CPU, more than 1x1 needs "
        "VLLM_CPU_OMP_THREADS_BIND, such as '0|1', and more than one replica 'nobind' (default: 1x1)",
    )  # fmt: skip
    parser.add_argument(
        "--sites", type=words(ALL_SITES), default=defaults.sites, help=f"separated by commas: {', '.join(ALL_SITES)}"
    )
    parser.add_argument(
        "--quantization", type=words(QUANTIZATIONS), default=[""], help="formats of the weights, separated by commas: "
        f"{', '.join(QUANTIZATIONS)}; then the reference is stock vLLM, and the only site resid_post (default: none)",
    )  # fmt: skip
    parser.add_argument("--kv-cache-gib", type=float, default=defaults.kv_cache_gib, help="memory of the KV cache")
    add_engine_args(parser)
    parser.add_argument(
        "--garbage", action="store_true", help="fill the workers' uninitialised memory with garbage; needs --eager"
    )
    parser.add_argument(
        "--alone", action="store_true", help="run each request alone, too, and count the rows that have other bits in "
        "the batch; with VLLM_BATCH_INVARIANT=1 in the environment, one is enough for WRONG",
    )  # fmt: skip
    parser.add_argument(
        "--head-size", type=positive, help="the elements of each attention head, for architectures whose configuration "
        "has `head_dim` (default: the architecture's, mostly 32)",
    )  # fmt: skip
    parser.add_argument(
        "--changes", action="store_true", help="also change the steering of a request while it generates"
    )
    parser.add_argument(
        "--kill", action="store_true", help="at the end, kill a worker of the engine while requests are captured: each "
        "capture must end INCOMPLETE, with the reason",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1, help="runs of each architecture")
    parser.add_argument(
        "--max-error", type=float, help="the largest allowed error of a row; a GPU that rounds to TF32 needs 1e-2"
    )
    parser.add_argument("--jobs", type=int, default=1, help="architectures that run at the same time")
    parser.add_argument("--keep", type=Path, help="an empty folder in which models and logs are kept")
    add_output(parser)
    options = parser.parse_args(arguments)
    if (options.alone or options.changes) and options.quantization != [""]:
        parser.error("--alone and --changes are not for --quantization: there each request runs alone, unsteered")
    if options.head_size:
        options.architectures = [with_head_size(each, options.head_size) for each in options.architectures]
    return options


def with_head_size(architecture: Architecture, size: int) -> Architecture:
    """Return an architecture whose attention heads have this size."""
    return replace(architecture, values={**architecture.values, "head_dim": size})


def setup_of(options: argparse.Namespace) -> Setup:
    """Return the setup that the command line defines."""
    return Setup(
        dtype=options.dtype,
        eager=options.eager,
        sites=tuple(options.sites),
        kv_cache_gib=options.kv_cache_gib,
        engine_args=options.engine_args,
        garbage=options.garbage,
        max_error=options.max_error or 0.0,
        alone=options.alone,
        head_size=options.head_size or 0,
        changes=options.changes,
        kill=options.kill,
        batch_invariant=os.environ.get("VLLM_BATCH_INVARIANT", "0") not in {"", "0"},
    )


def cases_of(options: argparse.Namespace, setup: Setup) -> list[Case]:
    """Return each selected architecture in each selected layout."""
    return [
        Case(
            architecture,
            replace(
                setup,
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                data_parallel_size=replicas,
                sites=architecture.compared(setup.sites),
                quantization=quantization,
            ),
            time,
        )
        for architecture in options.architectures
        for quantization in options.quantization
        for tensor, pipeline, replicas in options.layouts
        for time in range(options.repeat)
    ]


def _layouts(text: str) -> list[tuple[int, int, int]]:
    layouts = []
    for layout in text.split(","):
        sizes = [int(size) for size in layout.split("x")]
        if not len(("tensor", "pipeline")) <= len(sizes) <= len(("tensor", "pipeline", "data")) or min(sizes) < 1:
            raise argparse.ArgumentTypeError(f"{layout!r} is not a layout; write it like 2x1, or 1x1x2 with replicas")
        layouts.append((sizes[0], sizes[1], sizes[2] if len(sizes) > len(("tensor", "pipeline")) else 1))
    return layouts


if __name__ == "__main__":
    main()
