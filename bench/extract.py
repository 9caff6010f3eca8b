"""`python -m bench.extract`: how fast jobs over datasets run, and how fast their rows are read in a random order.

Parts: `job` compares prompts per second with the engine alone, `shuffle` compares bytes per second with reading the
same files in their order. `documents` compares tokens per second with the engine alone and with other systems, for all
tokens of long documents; it is meant for GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import residuum
from bench.documents import part as documents
from bench.documents.job import Way
from bench.documents.service import serving
from bench.isolated.run import PEERS_FOLDER
from bench.machine import Machine
from bench.options import add_engine_args, add_model, add_output, model_of, numbers, positive, words
from bench.output import Bar
from bench.parts import Part, run_parts
from bench.rates import compared, shown
from bench.service.load import Load
from residuum.exports.writers.safetensors import header
from residuum.extraction import shards
from residuum.extraction.shards import ShardInfo
from residuum.training import ActivationBatches

DEFAULT_PARTS = ("job", "shuffle")
PARTS = (*DEFAULT_PARTS, "documents")
_LEAST_RATE = 0.9
"""The bar: the least share of AsyncLLM's prompts per second."""
_SETTINGS = {
    "--max-num-batched-tokens": "most tokens that one step computes",
    "--ring-mib": "the ring between worker and shippers",
    "--shippers": "processes that send rows to the store",
}
_WIDTH, _BATCH = 576, 4096
"""The rows of the part `shuffle`: SmolLM2's width, in bfloat16."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    options = parse(arguments)
    measure = {"job": _job, "shuffle": _shuffle, "documents": documents.measure}
    run_parts("bench.extract", Machine.describe(), options.parts, options.output, lambda name: measure[name](options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.extract", description=__doc__)
    parser.add_argument("--parts", type=words(PARTS), default=list(DEFAULT_PARTS), help="parts, separated by commas")
    add_model(parser)
    parser.add_argument("--prompts", type=positive, default=2000, help="prompts of a job")
    parser.add_argument("--prefill", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--layer", type=int, default=12, help="the captured layer of the part job")
    parser.add_argument("--layers", type=numbers, help="those of the part documents (default: three, evenly spread)")
    parser.add_argument("--concurrency", type=positive, default=64, help="prompts that the engine runs at once")
    parser.add_argument("--mib", type=positive, default=2048, help="size of the files of the part shuffle")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds, each with all ways")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--folder", type=Path, help="where files are written (default: that of temporary files)")
    parser.add_argument("--store-folder", type=Path, help="where the store has its data (default: the same)")
    for name, what in _SETTINGS.items():
        parser.add_argument(name, type=positive, help=f"{what} (default: the service's own)")
    parser.add_argument("--peers", type=words(Way), default=list(Way), help="other ways of the part documents")
    parser.add_argument("--peer-prompts", type=positive, default=64, help="the most documents of each of them")
    parser.add_argument("--peers-folder", type=Path, default=PEERS_FOLDER, help="folder of packages for peers only")
    parser.add_argument("--peer-seconds", type=float, default=600.0, help="the longest time for each of them")
    parser.add_argument("--batch", type=positive, default=8, help="documents in a batch of transformers")
    add_engine_args(parser)
    add_output(parser, parts=True)
    return parser.parse_args(arguments)


# ------------------------------------------------------------------------------------------------------------- the job


def _job(options: argparse.Namespace) -> Part:
    """Run the same prompts as a job, and through AsyncLLM in the service's process without capture, in turn.

    Both ways have twice as many prompts there as the engine runs at once, which is the default of a job.
    """
    model, engine_args = model_of(options)
    seconds: dict[str, list[float]] = {"AsyncLLM": [], "residuum extract": []}
    with (
        tempfile.TemporaryDirectory(prefix="residuum-", dir=options.folder) as name,
        serving(model, engine_args, options, Path(name)) as served,
    ):
        for number in range(-1, options.rounds):  # round -1 is a warm-up
            count = options.prompts if number >= 0 else min(options.prompts, 2 * options.concurrency)
            load = Load(f"round{number}", 2 * options.concurrency, count, options.prefill, 1, served.vocab_size)
            for way in seconds if number % 2 == 0 else [*seconds][::-1]:
                if way == "AsyncLLM":
                    taken = served.alone(load)
                else:
                    taken = _extract(served.client, load, Path(name, f"rows{number}"), options)
                if number >= 0:
                    seconds[way].append(taken)
    rates = {name: [options.prompts / each for each in taken] for name, taken in seconds.items()}
    data = {
        "parameters": {
            "model": Path(model).name, "prompts": options.prompts, "prefill": options.prefill, "layer": options.layer,
            "concurrency": options.concurrency, "eager": options.eager,
        },
        **compared("prompts_per_second", rates, "residuum extract", "AsyncLLM"),
    }  # fmt: skip
    bar = Bar("prompts/s of a job over those of AsyncLLM", data["ratio"]["median"], _LEAST_RATE, at_most=False)
    return Part(data, [shown("prompts/s", rates, data)], [bar])


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
            found = compared("mb_per_second", rates, "residuum.training, shuffled", "numpy memmap, in order")
            data[state] = found
            lines.append(f"{state}\n{shown('MB/s', rates, found)}")
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
    (folder / "job.json").write_text(json.dumps({"format": shards.FORMAT, "spec": {"prompts": number, "keep": []}}))
    return folder


def _drop_from_memory(folder: Path) -> None:
    """Ask the kernel to drop the files' pages, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


if __name__ == "__main__":
    main()
