"""The command line: commands and exit codes.

Exit codes: 0 success; 1 failure, with one line on stderr that says why; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import residuum
from residuum.cli import captures, labels, search
from residuum.cli.generation import extract, generate, lens, patch, vectors
from residuum.cli.output import Output, drop_output, prepare_streams, print_error
from residuum.cli.parser import Command, Parser, add_command, add_service_command
from residuum.cli.services import doctor, health, info_and_stats, serve, token, ui
from residuum.exceptions import ResiduumError
from residuum.rpc.tracing import TracingError, start_tracing

if TYPE_CHECKING:
    from residuum.cli.parser import Commands

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: The command line after the program's name; by default the process's own.
    """
    prepare_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # else Python finds a closed pipe or a full disk when it ends, and exits with 120
    except KeyboardInterrupt as interruption:
        print_error(". ".join(["interrupted", *map(str, interruption.args)]))
        code = INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        code = 0
    except (ResiduumError, ImportError, OSError, TracingError, TypeError) as error:
        print_error(_in_words(error))
        code = 1
    drop_output()
    return code


def _run(arguments: Sequence[str] | None) -> int:
    options, further = make_parser().parse_known_args(arguments)
    if options.run is serve.run:
        options.flags = further
    elif further:
        options.usage_error(f"unrecognized arguments: {' '.join(further)}")
    command: Command = options.run
    stop_tracing = start_tracing("residuum-client")  # does nothing unless the environment requests tracing
    try:
        return command(options, Output(as_json=options.json))
    finally:
        stop_tracing()


def _in_words(error: Exception) -> str:
    """Return an error's message. The system's own about a file, such as "[Errno 2] ...", is put into words."""
    if not isinstance(error, OSError) or error.filename is None or error.filename2 is not None:
        return str(error)
    if isinstance(error, FileNotFoundError):
        folder = Path(error.filename).parent  # of a file to be written, perhaps
        return f"{error.filename} does not exist." if folder.exists() else f"The folder {folder} does not exist."
    if isinstance(error, IsADirectoryError):
        return f"{error.filename} is a folder, not a file."
    return f"{error.filename} cannot be used: {error.strerror}."


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with every command."""
    parser = Parser(prog="residuum", description="Capture and steer the residual stream of a served model.")
    parser.add_argument(
        "--version", action="version", version=f"residuum {residuum.__version__}", help="show the version and exit"
    )
    commands: Commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
    add_command(
        commands,
        "generate",
        generate.generate,
        "generate text, optionally with capture and steering",
        arguments=generate.add_arguments,
        timeout=None,
        examples=generate.EXAMPLES,
    )
    add_command(
        commands,
        "extract",
        extract.extract,
        "capture the rows of all prompts of a dataset into files",
        arguments=extract.add_arguments,
        timeout=None,
        examples=extract.EXAMPLES,
        many_endpoints=True,
    )
    _add_captures(commands)
    _add_vectors(commands)
    add_command(
        commands,
        "patch",
        patch.run,
        "find out which rows of one prompt bring about its answer, by putting them into another prompt",
        arguments=patch.add_arguments,
        timeout=None,
        examples=patch.EXAMPLES,
    )
    add_command(
        commands,
        "lens",
        lens.run,
        "show which tokens each layer predicts (logit lens)",
        arguments=lens.add_arguments,
        timeout=None,
        examples=lens.EXAMPLES,
    )
    add_command(commands, "info", info_and_stats.info, "show the served model and the limits")
    add_command(commands, "stats", info_and_stats.stats, "show what the stores hold, and how long they keep it")
    text = "check the connections to and between the services, with advice for failures"
    add_command(commands, "doctor", doctor.run, text)
    add_command(
        commands,
        "ui",
        ui.run,
        "serve a page for the browser, to explore captures and to steer",
        arguments=ui.add_arguments,
    )
    _add_health(commands)
    _add_token(commands)
    return parser


def _add_captures(commands: Commands) -> None:
    text = "list captures, newest first: ID, state, rows, bytes, model, labels and start"
    add_command(commands, "ls", captures.list_captures, text, arguments=captures.add_list_arguments)
    for name, run, text, arguments in (
        ("pull", captures.pull, "fetch captures into files", captures.add_pull_arguments),
        ("follow", captures.follow, "show a capture's rows as they arrive", captures.add_follow_arguments),
        (
            "manifest",
            captures.manifest,
            "print a capture's manifest as one JSON document",
            captures.add_manifest_arguments,
        ),
    ):
        add_command(commands, name, run, text, arguments=arguments, timeout=None)
    add_command(
        commands,
        "search",
        search.run,
        "find the tokens whose rows project most onto a direction",
        arguments=search.add_arguments,
        timeout=None,
        examples=search.EXAMPLES,
    )
    text = "set and remove labels of a capture"
    add_command(commands, "label", labels.label, text, arguments=labels.add_arguments)
    add_command(commands, "rm", captures.remove, "delete captures", arguments=captures.add_remove_arguments)
    text = "stop running requests; their captures end aborted"
    add_command(commands, "abort", captures.abort, text, arguments=captures.add_abort_arguments)


def _add_vectors(commands: Commands) -> None:
    add_command(
        commands,
        "directions",
        vectors.directions,
        "compute directions for steering from two sets of prompts",
        arguments=vectors.add_directions_arguments,
        timeout=None,
        examples=vectors.DIRECTIONS_EXAMPLES,
    )
    parser = commands.add_parser("vectors", help="send steering vectors, or find those that the server lacks")
    inner: Commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    text = "send the vectors that the server lacks"
    add_command(inner, "put", vectors.put_vectors, text, arguments=vectors.add_files)
    add_command(inner, "find", vectors.find_vectors, "show which vectors the server has", arguments=vectors.add_files)


def _add_health(commands: Commands) -> None:
    add_service_command(
        commands,
        "health",
        health.run,
        "check whether one service is serving: exit code 0 if so, else 1",
        arguments=health.add_arguments,
        endpoint_text="either service, inference or store",
        timeout=health.SECONDS,
    )


def _add_token(commands: Commands) -> None:
    text = "create a token and its entry for the services' tokens file"
    parser = commands.add_parser("token", help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=token.run, usage_error=parser.error)
    token.add_arguments(parser)


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="start a store and an inference service here, until Ctrl-C (needs residuum-server)",
        description="Start a store and an inference service on this machine, until Ctrl-C. Further flags are those of "
        "the inference service, such as --enforce-eager or --max-model-len 1024; see python -m inference_svc --help.",
        allow_abbrev=False,  # --d is not --data: it may be meant for the inference service
    )
    parser.set_defaults(run=serve.run, usage_error=parser.error, json=False)
    serve.add_arguments(parser)
    parser = commands.add_parser(
        "vllm-serve",
        help="run `vllm serve` with capture and steering (needs residuum-server)",
        description="Run `vllm serve` with residuum's worker, on a GPU or with vLLM's CPU build. All arguments go to "
        "vLLM. RESIDUUM_STORE names the store, and other RESIDUUM_ variables the settings; see docs/vllm-serve.md.",
    )
    parser.set_defaults(run=serve.run_vllm, usage_error=parser.error, json=False)
    serve.add_vllm_arguments(parser)
