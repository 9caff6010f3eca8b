"""`python -m bench.extract`: how fast jobs over datasets run, and how fast their rows are read in a random order.

Parts: `job` compares prompts per second with the engine alone, `shuffle` compares bytes per second with reading the
same files in their order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import residuum
from bench.capture.processes import environment_of
from bench.capture.workload import Runner
from bench.machine import Machine
from bench.options import add_engine_args, add_model, add_output, model_of, positive, words
from bench.output import Bar, table
from bench.parts import Part, run_parts
from bench.processes import Helper, running_store
from bench.service.load import Load, Measured
from residuum.exports.safetensors import header
from residuum.extraction import shards
from residuum.extraction.shards import ShardInfo
from residuum.training import ActivationBatches

PARTS = ("job", "shuffle")
_LEAST_RATE = 0.9
"""The bar: the least share of AsyncLLM's prompts per second."""
_WIDTH, _BATCH = 576, 4096
"""The rows of the part `shuffle`: SmolLM2's width, in bfloat16."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    options = parse(arguments)
    measure = {"job": _job, "shuffle": _shuffle}
    run_parts("bench.extract", Machine.describe(), options.parts, options.output, lambda name: measure[name](options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.extract", description=__doc__)
    parser.add_argument("--parts", type=words(PARTS), default=list(PARTS), help="parts, separated by commas")
    add_model(parser)
    parser.add_argument("--prompts", type=positive, default=2000, help="prompts of a job")
    parser.add_argument("--prefill", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--layer", type=int, default=12, help="the captured layer")
    parser.add_argument("--concurrency", type=positive, default=64, help="prompts that the engine runs at once")
    parser.add_argument("--mib", type=positive, default=2048, help="size of the files of the part shuffle")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds, each with all ways")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--folder", type=Path, help="where files are written (default: that of temporary files)")
    add_engine_args(parser)
    add_output(parser, parts=True)
    return parser.parse_args(arguments)


# ------------------------------------------------------------------------------------------------------------- the job


def _job(options: argparse.Namespace) -> Part:
    """Run the same prompts as a job, and through AsyncLLM in the service's process without capture, in turn.

    Both ways have twice as many prompts there as the engine runs at once, which is the default of a job.
    """
    model, engine_args = model_of(options)
    flags = [
        *("--model", model, "--max-model-len", str(max(options.prefill + 2, 64))),
        *("--max-num-seqs", str(options.concurrency)),
        *("--engine-args", json.dumps({**engine_args, "enable_prefix_caching": False, **options.engine_args})),
        *(["--enforce-eager"] if options.eager else []),
    ]
    seconds: dict[str, list[float]] = {"AsyncLLM": [], "residuum extract": []}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="residuum-", dir=options.folder)))
        flags += ["--store", stack.enter_context(running_store(scratch / "store")).endpoint]
        environment = environment_of(scratch, Runner.DEFAULT)
        host = Helper("bench.service.host", flags, scratch / "service.log", environment)
        stack.callback(host.stop)
        client = stack.enter_context(residuum.Client(f"127.0.0.1:{host.first['port']}", timeout=None))
        for number in range(-1, options.rounds):  # round -1 is a warm-up
            count = options.prompts if number >= 0 else min(options.prompts, 2 * options.concurrency)
            load = Load(f"round{number}", 2 * options.concurrency, count, options.prefill, 1, host.first["vocab_size"])
            folder = scratch / f"rows{number}"
            for name in seconds if number % 2 == 0 else [*seconds][::-1]:
                if name == "AsyncLLM":
                    taken = Measured(**host.call(asdict(load))).seconds
                else:
                    taken = _extract(client, load, folder, options)
                if number >= 0:
                    seconds[name].append(taken)
    rates = {name: [options.prompts / each for each in taken] for name, taken in seconds.items()}
    data = {
        "parameters": {
            "model": Path(model).name, "prompts": options.prompts, "prefill": options.prefill, "layer": options.layer,
            "concurrency": options.concurrency, "eager": options.eager,
        },
        **_compared("prompts_per_second", rates, "residuum extract", "AsyncLLM"),
    }  # fmt: skip
    bar = Bar("prompts/s of a job over those of AsyncLLM", data["ratio"]["median"], _LEAST_RATE, at_most=False)
    return Part(data, [_shown("prompts/s", rates, data)], [bar])


def _extract(client: residuum.Client, load: Load, folder: Path, options: argparse.Namespace) -> float:
    """Return the seconds from the call until all rows are on the disk and the captures deleted."""
    prompts = load.prompts()
    what = residuum.Capture(layers=[options.layer], positions="last_prompt")
    began = time.perf_counter()
    rows = client.extract(prompts, folder, capture=what, progress=False)
    seconds = time.perf_counter() - began
    if len(rows) != load.requests or rows.token_ids.tolist() != [prompt[-1] for prompt in prompts]:
        raise RuntimeError(f"the job has {len(rows)} rows of {load.requests} prompts, or wrong ones")
    return seconds


# ------------------------------------------------------------------------------------------------------- reading rows


def _shuffle(options: argparse.Namespace) -> Part:
    """Read all rows in batches, in the order of the files and in a random order, in turn."""
    data: dict[str, Any] = {"parameters": {"mib": options.mib, "width": _WIDTH, "batch_size": _BATCH}}
    lines = []
    with tempfile.TemporaryDirectory(prefix="residuum-", dir=options.folder) as scratch:
        folder = write_rows(Path(scratch, "rows"), options.mib)
        rows = residuum.Extracted(folder)
        size = len(rows) * _WIDTH * 2 / 1e6
        for state in ("cached", "from disk"):
            rates: dict[str, list[float]] = {"numpy memmap, in order": [], "residuum.training, shuffled": []}
            for number in range(-1, options.rounds):
                ways = list(zip(rates, (_read_in_order, _read_shuffled), strict=True))
                for name, read in ways if number % 2 == 0 else ways[::-1]:
                    if state == "from disk":
                        _drop_from_memory(folder)
                    began = time.perf_counter()
                    count = read(residuum.Extracted(folder), number)
                    taken = time.perf_counter() - began
                    if count != len(rows):
                        raise RuntimeError(f"{name} has read {count} of {len(rows)} rows")
                    if number >= 0:
                        rates[name].append(size / taken)
            found = _compared("mb_per_second", rates, "residuum.training, shuffled", "numpy memmap, in order")
            data[state] = found
            lines.append(f"{state}\n{_shown('MB/s', rates, found)}")
    return Part(data, lines)


def _read_in_order(rows: residuum.Extracted, _: int) -> int:
    count = 0
    for part in rows.layer(12).shards:
        for first in range(0, len(part), _BATCH):
            count += len(np.array(part[first : first + _BATCH].view(np.uint16)))
    return count


def _read_shuffled(rows: residuum.Extracted, seed: int) -> int:
    batches = ActivationBatches(rows, "resid_post.12", batch_size=_BATCH, epochs=1, seed=seed + 1, dtype=None)
    try:
        return sum(len(batch.rows) for batch in batches)
    finally:
        batches.close()


def write_rows(folder: Path, mib: int) -> Path:
    """Write a folder as a job leaves it, with random rows in files of 256 MiB."""
    folder.mkdir()
    left, number = (mib << 20) // (2 * _WIDTH), 0
    rng = np.random.default_rng(0)
    while left:
        count = min(left, (256 << 20) // (2 * _WIDTH))
        info = ShardInfo(number, number, 1, 0, count, count, count * _WIDTH * 2, {})
        arrays = {
            "offsets": np.array([0, count], np.int64),
            "positions": np.arange(count),
            "prompt": np.full(count, number, np.int64),
            "sequences": np.zeros(count, np.int64),
            "token_ids": np.zeros(count, np.int64),
            "resid_post.12": rng.integers(0, 1 << 15, (count, _WIDTH), np.uint16).view(ml_dtypes.bfloat16),
        }
        facts = shards._metadata(info)  # noqa: SLF001 - the files must be those of a job
        with (folder / info.rows_file).open("wb") as file:
            file.write(header(facts, [(name, array.dtype, array.shape) for name, array in arrays.items()]))
            for array in arrays.values():
                file.write(array.view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        (folder / info.prompts_file).write_text('{"labels": {}, "input_row": 0}\n')
        left, number = left - count, number + 1
    (folder / "job.json").write_text(json.dumps({"spec": {"prompts": number, "keep": []}}))
    return folder


def _drop_from_memory(folder: Path) -> None:
    """Ask the kernel to drop the files' pages, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


# ------------------------------------------------------------------------------------------------------------- figures


def _compared(unit: str, rates: Mapping[str, Sequence[float]], ours: str, other: str) -> dict[str, Any]:
    """Return the rates of all rounds, and the ratios of two ways round by round."""
    ratios = [one / two for one, two in zip(rates[ours], rates[other], strict=True)]
    return {
        unit: {name: [round(rate, 3) for rate in found] for name, found in rates.items()},
        "ratio": {
            "median": round(statistics.median(ratios), 4), "lowest": round(min(ratios), 4),
            "highest": round(max(ratios), 4),
        },
    }  # fmt: skip


def _shown(unit: str, rates: Mapping[str, Sequence[float]], data: Mapping[str, Any]) -> str:
    lines = [[name, f"{statistics.median(found):.1f}", f"{min(found):.1f}", f"{max(found):.1f}"]
             for name, found in rates.items()]  # fmt: skip
    ratio = data["ratio"]
    return (
        table([unit, "median", "lowest", "highest"], lines)
        + f"\nratio: {ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f})"
    )


if __name__ == "__main__":
    main()
