"""`python -m bench.steering`: what steering costs in a kernel, in a request on its way in, and in a whole engine."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from bench.capture.options import add_runner
from bench.capture.shapes import SHAPES
from bench.machine import Machine
from bench.options import add_output, numbers, positive, words
from bench.parts import Part, run_parts
from bench.processes import run_child
from bench.steering import engine, rpc
from bench.steering.engine import Case, EngineJob
from bench.steering.rpc import RpcJob

_CONFIGURATIONS = (0, 1, 8, 32, 64, 128, 256)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    machine = Machine.describe()
    options = parse(arguments, has_gpu=bool(machine.gpu))
    run_parts("bench.steering", machine, options.parts, options.output, lambda name: MEASURES[name](options))


def _measure_kernel(options: argparse.Namespace) -> Part:
    from bench.steering import kernel  # imports Triton

    job = kernel.KernelJob(options.hidden, options.unique, compile_seconds=options.compile_seconds)
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        # In a separate process, because a CUDA context here would take memory from the engine.
        part = run_child("bench.steering.kernel", asdict(job), Path(scratch), dict(os.environ), "kernel")
    measurements = [kernel.Measurement(**item) for item in part["measurements"]]
    failed = [item for item in measurements if item.failed]
    lines = [
        *kernel.show(job, measurements, part["copy_bytes_per_second"]),
        *(f"failed\t{' '.join(map(str, item.key))}\t{item.failed}" for item in failed),
    ]
    ours = [f"{item.key}: {item.failed}" for item in failed if item.way in kernel.OURS]
    return Part(part, lines, kernel.bars(measurements), ours)


def _measure_rpc(options: argparse.Namespace) -> Part:
    part = rpc.measure(RpcJob(options.hidden, repeats=options.repeats))
    return Part(part, rpc.show(part))


def _measure_engine(options: argparse.Namespace) -> Part:
    job = engine_job(options)
    part = engine.measure(job)
    return Part(part, engine.show(part), engine.bars(job, part))


MEASURES: dict[str, Callable[[argparse.Namespace], Part]] = {
    "kernel": _measure_kernel,
    "rpc": _measure_rpc,
    "engine": _measure_engine,
}
"""The parts."""


def engine_job(options: argparse.Namespace) -> EngineJob:
    """Return the job of part `engine` from the command line."""
    kinds = (False, True) if options.per_layer_vectors else (False,)
    cases = [Case(number, per_layer) for per_layer in kinds for number in options.configurations]
    names = {field.name for field in fields(EngineJob)} & vars(options).keys()
    chosen = {name: getattr(options, name) for name in names}
    return EngineJob(**chosen, cases=tuple(case for case in cases if case.configurations or not case.per_layer))


def parse(arguments: Sequence[str] | None, *, has_gpu: bool) -> argparse.Namespace:
    """Read the command line."""
    job = EngineJob(shape="", cases=())
    parser = argparse.ArgumentParser(prog="python -m bench.steering", description=__doc__)
    parser.add_argument(
        "--parts", type=words(MEASURES), default=[name for name in MEASURES if has_gpu or name != "kernel"],
        help="kernel, rpc, engine, separated by commas (default: all that this machine can run; kernel needs a GPU)",
    )  # fmt: skip
    add_output(parser, parts=True)
    parser.add_argument("--hidden", type=numbers, default=(2560, 4096), help="kernel, rpc: hidden sizes")
    kernels = parser.add_argument_group("kernel")
    kernels.add_argument("--unique", type=numbers, default=(1, 2, 4, 8, 16, 32), help="unique operations of a batch")
    kernels.add_argument(
        "--compile-seconds", type=float, default=60.0,
        help="stop compiling loops after this many seconds; 0: compile none",
    )  # fmt: skip
    calls = parser.add_argument_group("rpc")
    calls.add_argument("--repeats", type=positive, default=RpcJob().repeats, help="repetitions of each call")
    engines = parser.add_argument_group("engine")
    engines.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen2.5-1.5b" if has_gpu else "tiny",
        help="a model's shape with random weights (default: qwen2.5-1.5b, without a GPU tiny)",
    )  # fmt: skip
    add_runner(parser)
    engines.add_argument("--batch-size", type=positive, default=job.batch_size, help="requests submitted together")
    engines.add_argument("--prefill", type=positive, default=job.prefill, help="tokens of each prompt, exactly")
    engines.add_argument("--decode", type=positive, default=job.decode, help="tokens of each reply, exactly")
    engines.add_argument("--configurations", type=numbers, help="distinct configurations of a batch; 0: unsteered")
    engines.add_argument(
        "--per-layer-vectors", action="store_true",
        help="also measure configurations with a vector for each layer, not only with one for all layers",
    )  # fmt: skip
    engines.add_argument("--iterations", type=positive, default=job.iterations, help="iterations after one warm-up")
    engines.add_argument("--rounds", type=positive, default=job.rounds, help="rounds, each with new engines")
    engines.add_argument("--eager", action="store_true", help="do not compile the model")
    engines.add_argument(
        "--max-num-batched-tokens", type=positive, default=job.max_num_batched_tokens,
        help="the most tokens that one step computes",
    )  # fmt: skip
    engines.add_argument("--kv-cache-gib", type=float, default=job.kv_cache_gib, help="memory of the KV cache")
    options = parser.parse_args(arguments)
    if options.configurations is None:
        options.configurations = [number for number in _CONFIGURATIONS if number <= options.batch_size]
    elif max(options.configurations) > options.batch_size:
        parser.error("--configurations: must not exceed the number of requests (--batch-size)")
    return options


if __name__ == "__main__":
    main()
