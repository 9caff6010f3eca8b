"""`residuum serve` and `residuum vllm-serve`. The distribution residuum-server implements both."""

from __future__ import annotations

import argparse
from pathlib import Path

from residuum.cli.output import Output
from residuum.serving import installed_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="the model's folder, or its name on the Hugging Face hub (default: none, it must be given)",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--data",
        metavar="FOLDER",
        help="the folder for captures and both services' logs (default: residuum-data, in the current folder)",
    )
    kept.add_argument("--temporary", action="store_true", help="delete captures at the end (default: keep them)")


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-serve`."""
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="MODEL ...", help="the model, and any flags of `vllm serve`"
    )


def run_vllm(options: argparse.Namespace, output: Output) -> int:
    """Run `vllm serve` with the taps."""
    try:
        server = installed_server("vllm-serve")
    except (RuntimeError, ImportError) as error:
        output.error(str(error))
        return 1
    code: int = server.main(options.arguments)
    return code


def run(options: argparse.Namespace, output: Output) -> int:
    """Run both services until Ctrl-C or SIGTERM."""
    try:
        server = installed_server()
    except RuntimeError as error:
        output.error(str(error))
        return 1
    data = Path(options.data) if options.data else None
    code: int = server.main(model=options.model, data=data, temporary=options.temporary, flags=options.flags)
    return code
