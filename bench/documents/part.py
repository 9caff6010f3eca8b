"""Measures the part `documents`: a job of residuum beside the engine alone in turn, then other ways."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import residuum
from bench.capture.processes import environment_of
from bench.capture.workload import Runner
from bench.documents.job import DocumentsJob, Way, load_of
from bench.documents.service import Served, serving
from bench.machine import filesystem
from bench.options import model_of
from bench.output import Bar, table
from bench.parts import Part
from bench.processes import RunFailedError, run_child
from bench.rates import by_round, spread
from bench.suite.results import reason
from inference_svc.settings import InferenceSettings
from residuum.exports.writers.safetensors import header

STOCK, OURS = "AsyncLLM", "residuum extract"
LEAST_RATE = 0.9
"""The bar: the least share of AsyncLLM's tokens per second."""
_MOST_DIFFERENCE = 0.05
"""The greatest relative difference of our rows from those of transformers, both computed in 16 bits."""
_SAMPLED = 997
"""Every so many rows are looked at."""


@dataclass(frozen=True)
class Rounds:
    """What a way has done."""

    documents: int
    seconds: Sequence[float]
    bytes_per_token: float = 0.0
    """The bytes of the rows on the disk for each token; 0 if it captures nothing."""


def measure(options: argparse.Namespace) -> Part:
    """Measure all ways."""
    model, engine_args = model_of(options)
    absent: dict[str, str] = {}
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="residuum-", dir=options.folder) as name:
        scratch = Path(name)
        reference = scratch / "reference.safetensors"
        with serving(model, engine_args, options, scratch) as served:
            layers = tuple(sorted(options.layers)) if options.layers else spread_layers(served.client.info().num_layers)
            found = _in_turn(served, layers, options, scratch, reference)
            vocab_size = served.vocab_size
        # The engine has stopped, so the other ways have the whole device.
        is_random = engine_args.get("load_format") == "dummy"
        for way in options.peers:
            with tempfile.TemporaryDirectory(prefix="residuum-", dir=options.folder) as folder:
                job = DocumentsJob(
                    way, model, vocab_size, min(options.prompts, options.peer_prompts), options.prefill, layers,
                    options.rounds, folder, options.batch, options.concurrency, _batched_tokens(options), options.eager,
                    "" if is_random else str(reference), {**engine_args, **options.engine_args},
                )  # fmt: skip
                try:
                    result = _run(job, options.peers_folder, options.peer_seconds)
                except RunFailedError as error:
                    absent[way.value] = reason(str(error), error.log)
                    continue
            if "relative_difference" in result:
                differences[way.value] = result.pop("relative_difference")
            found[way.value] = Rounds(job.documents, **result)
    parameters = {
        "model": Path(model).name, "prompts": options.prompts, "prefill": options.prefill, "layers": list(layers),
        "concurrency": options.concurrency, "max_num_batched_tokens": _batched_tokens(options), "eager": options.eager,
        "batch": options.batch, "peer_prompts": min(options.prompts, options.peer_prompts),
        "filesystem": filesystem(options.folder),
        "store_filesystem": filesystem(options.store_folder or options.folder),
        **{name: _setting(options, name) for name in ("ring_mib", "shippers")},
    }  # fmt: skip
    return part_of(parameters, found, options.prefill, absent, differences)


def part_of(
    parameters: Mapping[str, Any],
    found: Mapping[str, Rounds],
    prefill: int,
    absent: Mapping[str, str],
    differences: Mapping[str, float],
) -> Part:
    """Return the figures of the ways.

    Args:
        parameters: What was measured.
        found: What the ways have done, by name.
        prefill: The tokens of each document.
        absent: Why ways could not run, by name.
        differences: The greatest relative difference of our rows from those of other ways.
    """
    rates = {
        name: [way.documents * prefill / seconds for seconds in way.seconds] for name, way in found.items()
    }  # fmt: skip
    over = {name: by_round(rates, name, STOCK) for name in rates if name != STOCK}
    data = {
        "parameters": dict(parameters),
        "tokens_per_second": {name: [round(rate, 1) for rate in values] for name, values in rates.items()},
        "mb_per_second": {
            name: [round(rate * found[name].bytes_per_token / 1e6, 1) for rate in rates[name]] for name in over
        },
        "bytes_per_token": {name: found[name].bytes_per_token for name in over},
        "ratio": spread(over[OURS]),
        "over_stock": {name: [round(ratio, 4) for ratio in ratios] for name, ratios in over.items()},
        **({"absent": dict(absent)} if absent else {}),
        **({"relative_difference": dict(differences)} if differences else {}),
    }
    wrong = [
        f"our rows differ from those of {name} by {value:.3g} of their size"
        for name, value in differences.items()
        if not value <= _MOST_DIFFERENCE
    ]
    bar = Bar("tokens/s of a job over those of AsyncLLM", data["ratio"]["median"], LEAST_RATE, at_most=False)
    return Part(data, _shown(data), [bar], wrong)


def spread_layers(num_layers: int) -> tuple[int, ...]:
    """Return three layers, at a quarter, a half and three quarters of a model's depth."""
    return tuple(sorted({num_layers * quarter // 4 for quarter in (1, 2, 3)}))


def _in_turn(
    served: Served, layers: Sequence[int], options: argparse.Namespace, scratch: Path, reference: Path
) -> dict[str, Rounds]:
    """Run the documents as a job, and through AsyncLLM in the service's process without capture, in turn."""
    seconds: dict[str, list[float]] = {STOCK: [], OURS: []}
    bytes_per_token = 0.0
    for number in range(-1, options.rounds):  # round -1 is a warm-up
        count = options.prompts if number >= 0 else min(options.prompts, options.concurrency)
        # A job also has twice as many prompts there as the engine runs at once.
        load = load_of(number, count, options.prefill, served.vocab_size, streams=2 * options.concurrency)
        for name in seconds if number % 2 == 0 else [*seconds][::-1]:
            if name == STOCK:
                taken = served.alone(load)
            else:
                prompts = load.prompts()
                folder = scratch / f"rows{number}"
                what = residuum.Capture(layers=list(layers), positions="all")
                began = time.perf_counter()
                rows = served.client.extract(prompts, folder, capture=what, progress=False)
                taken = time.perf_counter() - began
                check(rows, prompts, layers)
                bytes_per_token = sum(rows.layer(layer)[:1].nbytes for layer in layers)
                if number == options.rounds - 1:
                    _write_reference(rows, layers, options.prefill, reference)
                del rows
                shutil.rmtree(folder)  # the next round has as much room
                os.sync()  # and does not wait for what this one has written
            if number >= 0:
                seconds[name].append(taken)
    return {
        STOCK: Rounds(options.prompts, seconds[STOCK]),
        OURS: Rounds(options.prompts, seconds[OURS], bytes_per_token),
    }


def check(rows: residuum.Extracted, prompts: Sequence[Sequence[int]], layers: Sequence[int]) -> None:
    """Check the rows of a job.

    Raises:
        RunFailedError: Rows, tokens or positions are missing or wrong, or rows are not finite or only zeros.
    """
    tokens = np.concatenate([np.asarray(prompt) for prompt in prompts])
    positions = np.concatenate([np.arange(len(prompt)) for prompt in prompts])
    if not np.array_equal(rows.token_ids, tokens) or not np.array_equal(rows.positions, positions):
        raise RunFailedError(f"the job has {len(rows)} rows of {len(tokens)} tokens, or wrong ones")
    for layer in layers:
        found = rows.layer(layer)
        if len(found) != len(tokens):
            raise RunFailedError(f"the job has {len(found)} rows of {len(tokens)} tokens at layer {layer}")
        sample = np.asarray(found[np.arange(0, len(tokens), _SAMPLED)], np.float32)
        if not np.isfinite(sample).all() or not sample.any(axis=1).all():
            raise RunFailedError(f"rows of layer {layer} are not finite, or only zeros")


def _write_reference(rows: residuum.Extracted, layers: Sequence[int], count: int, file: Path) -> None:
    """Write the rows of the first document, which other ways compare with theirs."""
    arrays = {str(layer): np.ascontiguousarray(np.asarray(rows.layer(layer)[:count])) for layer in layers}
    with file.open("wb") as written:
        written.write(header({}, [(name, array.dtype, array.shape) for name, array in arrays.items()]))
        for array in arrays.values():
            written.write(array.view(np.uint8).data)


def _run(job: DocumentsJob, peers_folder: Path, seconds: float) -> dict[str, Any]:
    """Run another way in a process of its own. Only its process finds the packages of peers: some change vLLM."""
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        environment = environment_of(Path(scratch), Runner.DEFAULT)
        if peers_folder.is_dir() and job.way is not Way.LOOP:
            paths = [*environment.get("PYTHONPATH", "").split(os.pathsep), str(peers_folder.absolute())]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        result: dict[str, Any] = run_child(
            "bench.documents.child", asdict(job), Path(scratch), environment, job.way.value, seconds
        )
        return result


def _batched_tokens(options: argparse.Namespace) -> int:
    return int(_setting(options, "max_num_batched_tokens"))


def _setting(options: argparse.Namespace, name: str) -> Any:
    """Return a setting of the service: that of the command line, or the default."""
    value = getattr(options, name)
    return InferenceSettings.model_fields[name].default if value is None else value


def _shown(data: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, rates in data["tokens_per_second"].items():
        over = data["over_stock"].get(name)
        lines.append(
            [
                name,
                *(f"{value:,.0f}" for value in (statistics.median(rates), min(rates), max(rates))),
                f"{statistics.median(data['mb_per_second'][name]):,.0f}" if over else "",
                f"{data['bytes_per_token'][name]:,.0f}" if over else "",
                " ".join(f"{ratio:.3f}" for ratio in over) if over else "",
            ]
        )
    head = ["tokens/s", "median", "lowest", "highest", "MB/s to disk", "bytes/token", f"over {STOCK}, by round"]
    ratio = data["ratio"]
    return [
        table(head, lines),
        f"ratio: {ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f})",
        *(f"{name} could not run here: {why}" for name, why in data.get("absent", {}).items()),
        *(
            f"our rows differ from those of {name} by {value:.2g} of their size"
            for name, value in data.get("relative_difference", {}).items()
            if math.isfinite(value)
        ),
    ]
