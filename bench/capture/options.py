"""The flags that define the workload, for every benchmark that runs a `Workload`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from bench.capture.workload import Runner, Sink, Vectors, Workload
from bench.options import add_engine_args, add_model, model_of, positive
from residuum import ResiduumError
from residuum.values.selections.points import site_list, site_numbers
from residuum.wire.rows.encodings import ENCODINGS


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `workload_of` reads, and `--store-folder`."""
    defaults = Workload(model="")
    add_model(parser)
    parser.add_argument("--batch-size", type=positive, default=defaults.batch_size, help="requests submitted together")
    parser.add_argument("--prefill", type=positive, default=defaults.prefill, help="tokens of each prompt, exactly")
    parser.add_argument("--decode", type=positive, default=defaults.decode, help="tokens of each reply, exactly")
    parser.add_argument("--iterations", type=positive, default=defaults.iterations, help="iterations after one warm-up")
    parser.add_argument(
        "--at-once", action="store_true",
        help="start the engine and the clock when the engine has all requests of an iteration. Otherwise the first "
        "step has only those that have arrived, and with pipeline parallelism the batches in flight differ in size",
    )  # fmt: skip
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--eager", action="store_true", help="do not compile the model")
    compiling.add_argument("--compiled", dest="eager", action="store_false", help="compile the model (the default)")
    parser.add_argument(
        "--sink", type=Sink, choices=list(Sink), default=defaults.sink, metavar="{store,ring}",
        help="where captured rows go: through shippers into a store (the default), or only into the ring",
    )  # fmt: skip
    parser.add_argument(
        "--vectors", type=Vectors, choices=list(Vectors), default=defaults.vectors, metavar="{request,layer}",
        help="steering vectors: one for each request, added after every layer (the default), or one for each layer",
    )  # fmt: skip
    parser.add_argument(
        "--max-num-batched-tokens", type=positive, default=defaults.max_num_batched_tokens,
        help="the most tokens that one step computes",
    )  # fmt: skip
    parser.add_argument("--kv-cache-gib", type=float, default=defaults.kv_cache_gib, help="memory of the KV cache")
    parser.add_argument("--ring-mib", type=positive, default=defaults.ring_mib, help="shared memory of the ring")
    parser.add_argument(
        "--store-folder", type=Path, help="folder of the store's data (default: the folder of temporary files)"
    )
    parser.add_argument("--stores", type=positive, default=defaults.stores, help="stores that share the captures")
    parser.add_argument("--shippers", type=positive, default=defaults.shippers, help="shipper processes")
    parser.add_argument(
        "--capture-sites", type=sites, default=defaults.capture_sites, metavar="SITE,...",
        help="the sites that are enabled and captured, as for the service "
        f"(default: {','.join(defaults.capture_sites)})",
    )  # fmt: skip
    parser.add_argument(
        "--encoding", choices=sorted(ENCODINGS.keys() - {"project"}), default=defaults.encoding,
        help=f"the encoding of mode all-layers+encoded (default: {defaults.encoding})",
    )  # fmt: skip
    parser.add_argument(
        "--dimensions", type=int, default=defaults.dimensions,
        help=f"dimensions of that encoding, 0 if it has none (default: {defaults.dimensions})",
    )  # fmt: skip
    parser.add_argument(
        "--fold-norms", action=argparse.BooleanOptionalAction,
        help="whether taps are folded into the norms that follow them (default: the service's default)",
    )  # fmt: skip
    add_engine_args(parser)


def add_runner(parser: argparse.ArgumentParser) -> None:
    """Add the flag that selects one of vLLM's model runners."""
    parser.add_argument(
        "--runner", type=Runner, choices=list(Runner), default=Runner.DEFAULT,
        metavar="{default,v1,v2,batch-invariant}", help="vLLM's model runner (default: vLLM's choice)",
    )  # fmt: skip


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the workload that the command line defines."""
    model, engine_args = model_of(options)
    names = {field.name for field in fields(Workload)} & vars(options).keys()
    chosen = {name: getattr(options, name) for name in names}
    return Workload(**{**chosen, "model": model, "engine_args": {**engine_args, **options.engine_args}})


def sites(text: str) -> tuple[str, ...]:
    """Return the sites in a list of names that is separated by commas."""
    try:
        site_numbers(text)
    except ResiduumError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return site_list(text)
