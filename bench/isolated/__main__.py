"""`python -m bench.isolated`: one configuration in a fresh process, until a client holds the captured rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.capture.options import add_runner, add_workload_arguments, workload_of
from bench.isolated.configuration import BadConfigurationError, Configuration, IsolatedMode, Peer, Tap
from bench.isolated.run import PEERS_FOLDER, Surroundings, document, measure
from bench.machine import describe, filesystem
from bench.options import add_output, numbers
from bench.output import write_result
from bench.processes import measuring


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result."""
    options = parse(arguments)
    configuration = configuration_of(options)
    base = workload_of(options)
    context = {"benchmark": "bench.isolated", **describe(), "filesystem": filesystem(options.store_folder)}
    surroundings = Surroundings(options.runner, options.store_folder, options.peers_folder, options.profile)
    with measuring():
        run = measure(configuration, base, surroundings)
    result = document(configuration, configuration.workload(base), run)
    show(result)
    if options.output:
        write_result(options.output, {**context, **result})


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    print("iteration\tgeneration s\tfetch s\ttotal s\ttokens/s")
    for item in result["iterations"]:
        print(_line(str(item["iteration"]), item))
    for word in ("mean", "median", "min", "max"):
        summary = result["summary"]
        print(_line(word, {name.removeprefix(f"{word}_"): value for name, value in summary.items()}))


def _line(head: str, figures: dict[str, Any]) -> str:
    fetch = figures["fetch_time"]
    times = f"{figures['generation_time']:.4f}\t{'' if fetch is None else f'{fetch:.4f}'}\t{figures['total_time']:.4f}"
    return f"{head}\t{times}\t{figures['throughput_tokens_per_sec']:.1f}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.isolated", description=__doc__)
    parser.add_argument(
        "--mode", type=IsolatedMode, choices=list(IsolatedMode), required=True,
        metavar="{" + ",".join(mode.value for mode in IsolatedMode) + "}",
        help="stock vLLM; residuum without captures; every layer of every token; the layers of --layers",
    )  # fmt: skip
    parser.add_argument("--layers", type=numbers, default=(), help="layers that mode custom captures, such as 0,5,10")
    parser.add_argument(
        "--capture-machinery", choices=["on", "off"], default="on",
        help="off: vLLM's own worker, without taps",
    )  # fmt: skip
    parser.add_argument(
        "--tap", type=Tap, choices=list(Tap), default=Tap.FULL, metavar="{full,noop}",
        help="noop: the ops are in the graph but do nothing (needs mode zero-layer)",
    )  # fmt: skip
    parser.add_argument(
        "--peer", type=Peer, choices=list(Peer), metavar="{" + ",".join(peer.value for peer in Peer) + "}",
        help="capture with another system",
    )  # fmt: skip
    parser.add_argument("--profile", type=Path, help="folder for a torch profiler trace of one more iteration")
    add_runner(parser)
    parser.add_argument("--peers-folder", type=Path, default=PEERS_FOLDER, help="folder of packages for peers only")
    add_workload_arguments(parser)
    add_output(parser)
    return parser.parse_args(arguments)


def configuration_of(options: argparse.Namespace) -> Configuration:
    """Return the configuration from the command line; exit with a message if it is invalid."""
    try:
        return Configuration(
            mode=options.mode,
            layers=options.layers,
            machinery=options.capture_machinery == "on",
            tap=options.tap,
            peer=options.peer,
        )
    except BadConfigurationError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
