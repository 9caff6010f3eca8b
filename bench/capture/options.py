"""The flags that say what is measured; every benchmark that runs a `Workload` has them."""

from __future__ import annotations

import argparse
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bench.capture.shapes import SHAPES, write_shape
from bench.capture.workload import Sink, Vectors, Workload
from examples.model import default_model
from residuum import ResiduumError
from residuum.values.capture import site_list, site_numbers
from residuum.wire.encodings import ENCODINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Choice = TypeVar("_Choice", bound=Enum)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `workload_of` reads, and `--store-folder`."""
    defaults = Workload(model="")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="the model's folder, or its name on the Hugging Face hub (default: SmolLM2)")
    which.add_argument("--shape", choices=sorted(SHAPES), help="a model's shape with random weights, no tokenizer")
    parser.add_argument("--batch-size", type=positive, default=defaults.batch_size, help="requests submitted at once")
    parser.add_argument("--prefill", type=positive, default=defaults.prefill, help="tokens of each prompt, exactly")
    parser.add_argument("--decode", type=positive, default=defaults.decode, help="tokens of each reply, exactly")
    parser.add_argument("--iterations", type=positive, default=defaults.iterations, help="after one as a warm-up")
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--eager", action="store_true", help="do not compile the model")
    compiling.add_argument("--compiled", dest="eager", action="store_false", help="compile the model (the default)")
    parser.add_argument(
        "--sink", type=Sink, choices=list(Sink), default=defaults.sink, metavar="{store,ring}",
        help="where captured rows go: through shippers into a store (the default), or no further than the ring",
    )  # fmt: skip
    parser.add_argument(
        "--vectors", type=Vectors, choices=list(Vectors), default=defaults.vectors, metavar="{request,layer}",
        help="what steers: a vector for each request, used after every layer (the default), or one for each layer",
    )  # fmt: skip
    parser.add_argument(
        "--max-num-batched-tokens", type=positive, default=defaults.max_num_batched_tokens,
        help="tokens that one step computes at most",
    )  # fmt: skip
    parser.add_argument("--kv-cache-gib", type=float, default=defaults.kv_cache_gib, help="memory of the KV cache")
    parser.add_argument("--ring-mib", type=positive, default=defaults.ring_mib, help="shared memory of the ring")
    parser.add_argument(
        "--store-folder", type=Path, help="where the store's data lie (default: where temporary files do)"
    )
    parser.add_argument("--stores", type=positive, default=defaults.stores, help="stores that take the captures")
    parser.add_argument("--shippers", type=positive, default=defaults.shippers, help="processes that feed the store")
    parser.add_argument(
        "--capture-sites", type=sites, default=defaults.capture_sites, metavar="SITE,...",
        help="the sites that are armed, and that the modes which capture capture, as for the service "
        f"(default: {','.join(defaults.capture_sites)})",
    )  # fmt: skip
    parser.add_argument(
        "--encoding", choices=sorted(ENCODINGS.keys() - {"project"}), default=defaults.encoding,
        help=f"what all-layers+encoded does (default: {defaults.encoding})",
    )  # fmt: skip
    parser.add_argument(
        "--dimensions", type=int, default=defaults.dimensions,
        help=f"its dimensions, 0 for an encoding that has none (default: {defaults.dimensions})",
    )  # fmt: skip
    parser.add_argument(
        "--fold-norms", action=argparse.BooleanOptionalAction,
        help="fold taps into the norms that follow them, or do not (default: as the service does)",
    )  # fmt: skip
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more of vLLM's arguments, as a JSON object")


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the workload that the command line asks for."""
    shaped = SHAPES[options.shape].engine_args if options.shape else {}
    return Workload(
        model=write_shape(options.shape) if options.shape else options.model or default_model(),
        batch_size=options.batch_size,
        prefill=options.prefill,
        decode=options.decode,
        iterations=options.iterations,
        eager=options.eager,
        sink=options.sink,
        vectors=options.vectors,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_gib=options.kv_cache_gib,
        ring_mib=options.ring_mib,
        shippers=options.shippers,
        stores=options.stores,
        capture_sites=options.capture_sites,
        encoding=options.encoding,
        dimensions=options.dimensions,
        fold_norms=options.fold_norms,
        engine_args={**shaped, **options.engine_args},
    )


def positive(text: str) -> int:
    """Read a number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def sites(text: str) -> tuple[str, ...]:
    """Read the names of sites, separated by commas."""
    try:
        site_numbers(text)
    except ResiduumError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return site_list(text)


def names(kind: type[_Choice], allowed: Sequence[_Choice] = ()) -> Callable[[str], list[_Choice]]:
    """Return a reader of names that are separated by commas; all of a kind are allowed if none are named."""
    choices = {member.value: member for member in allowed or kind}

    def read(text: str) -> list[_Choice]:
        try:
            return [choices[name] for name in text.split(",")]
        except KeyError:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(choices)}") from None

    return read
