"""`python -m bench.service`: the overhead of the service over vLLM's engine, in throughput and latency."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.capture.workload import Runner
from bench.machine import Machine
from bench.options import add_engine_args, add_model, add_output, model_of, positives, words
from bench.parts import Part, run_parts
from bench.service.compare import ServiceJob, measure
from bench.service.report import bars, show

_SAE_MIB = 512
"""Enough for an encoder of 65,536 features of 2560 elements in 16 bits."""
_ENGINES = 3
"""With --served: the service's, and those of `vllm serve` without and with taps."""
_KV_CACHE_GIB = 4.0
"""With --served, of each engine: 64 streams of 2,200 tokens of a model of 1.5 billion parameters fit."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result. Each model runner is a part."""
    options = parse(arguments)
    names = [runner.value for runner in options.runners]
    run_parts("bench.service", Machine.describe(), names, options.output, lambda name: _measure(name, options))


def _measure(name: str, options: argparse.Namespace) -> Part:
    with (
        tempfile.TemporaryDirectory(prefix="residuum-") as scratch,
        tempfile.TemporaryDirectory(prefix="residuum-", dir=options.store_folder) as data,
    ):
        part = asyncio.run(measure(job_of(options, Runner(name)), Path(scratch), Path(data)))
    return Part(part, show(part), bars(part))


def job_of(options: argparse.Namespace, runner: Runner) -> ServiceJob:
    """Return the job from the command line."""
    model, engine_args = model_of(options)
    engine_args = {**engine_args, "enable_prefix_caching": options.shared_prefix > 0, **options.engine_args}
    length = options.shared_prefix + options.prefill + options.decode
    if options.served:  # together they leave a tenth of the device's memory free
        engine_args = {"gpu_memory_utilization": 0.9 / _ENGINES, **engine_args}
        options.kv_cache_gib = options.kv_cache_gib or _KV_CACHE_GIB
    flags = [
        *("--model", model, "--max-model-len", str(max(length, 64)), "--max-num-seqs", str(max(options.streams))),
        *("--kv-cache-gib", str(options.kv_cache_gib)),
        *("--engine-args", json.dumps(engine_args), "--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        *(["--enforce-eager"] if options.eager else []),
        *(["--sae-mib", str(_SAE_MIB)] if options.features else []),
    ]
    quick = {"requests_per_stream": 2, "least_requests": 2, "rounds": 3} if options.quick else {}
    return ServiceJob(
        tuple(flags),
        options.streams,
        prefill=options.prefill,
        decode=options.decode,
        shared_prefix=options.shared_prefix,
        captures=options.captures,
        probes=options.probes,
        features=options.features,
        served=_vllm_arguments(model, length, options, engine_args) if options.served else None,
        runner=runner,
        shown={"model": Path(model).name, "eager": options.eager, "engine_args": engine_args},
        **{**quick, **({"rounds": options.rounds} if options.rounds else {})},
    )


def _vllm_arguments(
    model: str, length: int, options: argparse.Namespace, engine_args: dict[str, Any]
) -> dict[str, Any]:
    """Return vLLM's arguments for the same engine as the service's."""
    return {
        "model": model,
        "max_model_len": max(length, 64),
        "max_num_seqs": max(options.streams),
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enforce_eager": options.eager,
        "kv_cache_memory_bytes": int(options.kv_cache_gib * (1 << 30)),
        "disable_log_stats": True,
        **engine_args,
    }


def parse(arguments: Sequence[str] | None, prog: str = "python -m bench.service") -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1, 8 and 32 streams, shorter replies, fewer rounds")
    add_model(parser)
    parser.add_argument("--streams", type=positives, help="numbers of concurrent streams (default: 1,2,4,8,16,32,64)")
    parser.add_argument("--prefill", type=int, default=64, help="tokens of each prompt")
    parser.add_argument(
        "--shared-prefix", type=int, default=0, help="tokens that all prompts begin with; switches the prefix cache on"
    )
    parser.add_argument(
        "--captures", action="store_true",
        help="also measure requests that capture the prompt's last token and the reply, at all layers",
    )  # fmt: skip
    parser.add_argument(
        "--served", action="store_true",
        help="also measure `vllm serve` through HTTP: stock, with taps, and with captures (--captures), with "
        "two more engines on the same device",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-gib", type=float, default=0.0,
        help=f"the KV cache of each engine in GiB (default: the service's; with --served {_KV_CACHE_GIB:g})",
    )  # fmt: skip
    parser.add_argument(
        "--probes", type=int, default=0, help="also measure requests with this number of linear probes (default: none)"
    )
    parser.add_argument(
        "--features", type=int, default=0, help="also measure requests that capture the strongest of this number of "
        "features of a sparse autoencoder, at one layer (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--store-folder", type=Path, help="folder of the store's data (default: the folder of temporary files)"
    )
    parser.add_argument("--decode", type=int, help="tokens of each reply (default: 128, with --quick 32)")
    parser.add_argument("--rounds", type=int, help="rounds, each with both ways (default: 5, with --quick 3)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="the most tokens that one step computes"
    )
    parser.add_argument(
        "--runners", type=words(Runner), default=[Runner.DEFAULT],
        help="vLLM's model runners: v1,v2 (default: vLLM's choice)",
    )  # fmt: skip
    add_engine_args(parser)
    add_output(parser)
    options = parser.parse_args(arguments)
    options.streams = options.streams or ((1, 8, 32) if options.quick else ServiceJob.streams)
    options.decode = options.decode or (32 if options.quick else ServiceJob.decode)
    return options


if __name__ == "__main__":
    main()
