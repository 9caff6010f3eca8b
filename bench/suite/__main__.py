"""`python -m bench.suite`: runs every configuration and every peer in separate processes, and writes a report."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.capture.options import add_runner, add_workload_arguments, workload_of
from bench.capture.workload import Workload
from bench.isolated.configuration import Peer
from bench.isolated.run import PEERS_FOLDER, Surroundings, document, measure
from bench.machine import ROOT, Machine, describe, filesystem, is_committed
from bench.options import positive, words
from bench.output import write_result
from bench.parts import OtherRunError, read_earlier
from bench.processes import RunFailedError, measuring
from bench.suite.plan import Planned, entries, schedule
from bench.suite.report import write_report
from bench.suite.results import reason
from svc_common.launcher import ServiceFailedError

BENCHMARK = "bench.suite"
RESULT = "suite.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the configurations without a result. Write each result immediately, and the report at the end."""
    options = parse(arguments)
    workload = workload_of(options)
    machine = Machine.describe()
    if options.gpu and machine.kind == "cpu":
        sys.exit("torch finds no GPU on this machine; see bench/README.md for the environment that --gpu needs.")
    folder = options.folder or ROOT / "bench" / "results" / machine.kind
    context = {
        **describe(machine),
        "workload": {**workload.shown(), "runner": options.runner.value},
        "filesystem": filesystem(options.store_folder),
    }
    file = folder / RESULT
    parts = earlier_parts(file, context, replace=options.folder is None and is_committed(file))
    plan = schedule(entries(layers_of(workload.model), options.peers, eager=workload.eager), options.rounds)
    surroundings = Surroundings(
        options.runner, options.store_folder, options.peers_folder, peer_seconds=options.peer_seconds
    )
    with measuring():
        try:
            failed = run_all(plan, workload, surroundings, file, context, parts, options.stop_after)
        except KeyboardInterrupt:
            print(
                f"Stopped with {len(parts)} of {len(plan)} processes in {file}. Run the same command again to continue."
            )
            raise
    if parts:
        print(write_report(file))
    left = sum(planned.key not in parts for planned in plan) - len(failed)
    if left:
        print(f"{left} of {len(plan)} processes are left; run the same command again.")
    if failed:
        sys.exit("\n".join(f"BENCH FAILED: {failure}" for failure in failed))


def earlier_parts(file: Path, context: dict[str, Any], *, replace: bool) -> dict[str, Any]:
    """Return the parts that an earlier run with the same context has measured.

    Args:
        file: The result file of the earlier run.
        context: The fields that must be equal for figures to be comparable.
        replace: Whether figures of another context are replaced, when this run has its first figure. Committed results
            of other revisions are always replaced. Otherwise the process exits with an error.
    """
    try:
        return read_earlier(file, BENCHMARK, context)
    except OtherRunError as error:
        if not replace:
            sys.exit(str(error))
        print(f"{file.relative_to(ROOT)} was measured differently ({error.differs}), so it is replaced.", flush=True)
        return {}


def run_all(
    plan: Sequence[Planned],
    workload: Workload,
    surroundings: Surroundings,
    file: Path,
    context: dict[str, Any],
    parts: dict[str, Any],
    stop_after: float | None,
) -> list[str]:
    """Run the configurations without a part; return the failures. A peer that fails counts as a result."""
    failed = []
    started = time.monotonic()
    for number, planned in enumerate(plan, 1):
        if planned.key in parts:
            continue
        if stop_after is not None and time.monotonic() - started > stop_after:
            break
        print(f"{number}/{len(plan)}\t{planned.key}", flush=True)
        try:
            part = run_one(planned, workload, surroundings)
        except (RunFailedError, ServiceFailedError) as error:
            if planned.entry.configuration.peer is None:
                failed.append(f"{planned.key}: {error}")
                continue
            part = {"failed": reason(str(error), getattr(error, "log", ""))}
            print(f"\tcannot run: {part['failed']}", flush=True)
        parts[planned.key] = {"name": planned.entry.name, "round": planned.round, **part}
        write_result(file, {"benchmark": BENCHMARK, **context, "parts": parts})
    return failed


def run_one(planned: Planned, workload: Workload, surroundings: Surroundings) -> dict[str, Any]:
    """Run a process, and return its measurements."""
    entry = planned.entry
    base = dataclasses.replace(workload, eager=workload.eager or entry.eager, sink=entry.sink or workload.sink)
    load, started = os.getloadavg()[0], time.monotonic()
    run = measure(entry.configuration, base, surroundings, planned.round)
    print(f"\t{run.line()}", flush=True)
    return {
        **document(entry.configuration, entry.configuration.workload(base), run),
        "load_before": round(load, 2),
        "process_seconds": round(time.monotonic() - started, 1),
    }


def layers_of(model: str) -> int:
    """Return the number of decoder layers of a model."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.suite", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=2, help="rounds of the reference configurations")
    parser.add_argument(
        "--peers", type=words(Peer), default=list(Peer), help="names, separated by commas (default: all)"
    )
    parser.add_argument(
        "--no-peers", dest="peers", action="store_const", const=[], help="measure only residuum's configurations"
    )
    parser.add_argument(
        "--peer-seconds",
        type=positive,
        default=240,
        help="timeout of a peer in seconds; then it counts as failed",
    )
    parser.add_argument("--peers-folder", type=Path, default=PEERS_FOLDER, help="folder of packages for peers only")
    parser.add_argument(
        "--stop-after", type=positive, metavar="SECONDS",
        help="start no further process after this time; run the same command again to continue",
    )  # fmt: skip
    add_runner(parser)
    parser.add_argument("--folder", type=Path, help="folder of the result (default: bench/results/MACHINE)")
    parser.add_argument("--gpu", action="store_true", help="exit with an error if there is no GPU")
    add_workload_arguments(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
