"""The command line: which commands there are, what they take, and how a failure ends.

Exit codes: 0 done; 1 failed, with one line on stderr that says why; 2 a wrong command line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from residuum.cli import commands, doctor, health
from residuum.cli.output import Output
from residuum.exceptions import ResiduumError

DEFAULT_ENDPOINT = "localhost:50051"
INTERRUPTED = 130

Command = Callable[[argparse.Namespace, Output], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: The command line after the program's name; by default that of the process.
    """
    options = _parser().parse_args(arguments)
    output = Output(as_json=options.json)
    command: Command = options.run
    try:
        return command(options, output)
    except KeyboardInterrupt:
        output.error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output had enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ResiduumError, OSError, TypeError) as error:
        output.error(str(error))
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="residuum", description="Capture and steer the residual stream of a served model."
    )
    groups = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(groups, "info", commands.info, "show what is served, and within which limits")
    _add_generate(groups)
    _add_list(groups)
    _add_pull(groups)
    removing = _add(groups, "rm", commands.remove, "delete captures")
    removing.add_argument("ids", nargs="+", metavar="ID", help="a capture's id")
    _add_vectors(groups)
    _add(groups, "doctor", doctor.run, "check every step of the way to both services, and say what to do")
    _add_health(groups)
    return parser


def _add(
    groups: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: Command, help_text: str
) -> argparse.ArgumentParser:
    parser = _add_bare(groups, name, run, help_text, endpoint_text="the inference service")
    parser.add_argument("--store", metavar="HOST:PORT", help="the store, if its own word does not work from here")
    return parser


def _add_bare(
    groups: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Command,
    help_text: str,
    *,
    endpoint_text: str,
    timeout: float = 30.0,
) -> argparse.ArgumentParser:
    parser = groups.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
    parser.set_defaults(run=run)
    endpoint = os.environ.get("RESIDUUM_ENDPOINT", DEFAULT_ENDPOINT)
    parser.add_argument(
        "--endpoint",
        default=endpoint,
        metavar="HOST:PORT",
        help=f"{endpoint_text} (RESIDUUM_ENDPOINT; now {endpoint})",
    )
    seconds = f"seconds that a call may take ({timeout:g})"
    parser.add_argument("--timeout", type=float, default=timeout, metavar="S", help=seconds)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for programs")
    return parser


def _add_generate(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(groups, "generate", commands.generate, "generate text, and capture or steer while at it")
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn of a conversation")
    parser.add_argument("--capture", metavar="LAYERS", help="capture these layers: all, 12 or 0,5,10-20")
    parser.add_argument("--positions", default="all", choices=["all", "prompt", "generated", "last_prompt"])
    parser.add_argument("--id", dest="request_id", help="your own name for the request and its capture")
    for name, kind in commands.SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[0].upper())
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated")
    steering = "VECTOR is a .npy file, or FILE.safetensors:NAME; LAYERS as for --capture"
    parser.add_argument("--add", action="append", default=[], metavar="VECTOR@LAYERS*SCALE", help=steering)
    parser.add_argument("--ablate", action="append", default=[], metavar="VECTOR@LAYERS", help="as --add")


def _add_list(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(groups, "ls", commands.list_captures, "list captures, newest first")
    parser.add_argument("--prefix", default="", help="only ids that start with this")
    parser.add_argument("--state", action="append", default=[], choices=["open", "complete", "incomplete", "aborted"])
    parser.add_argument("-n", "--limit", type=int, default=None, metavar="N", help="at most so many")


def _add_pull(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(groups, "pull", commands.pull, "fetch a capture into a safetensors file")
    parser.add_argument("id", metavar="ID", help="the capture's id")
    parser.add_argument("--out", metavar="FILE", help="where to write (ID.safetensors)")
    parser.add_argument("--layers", metavar="LAYERS", help="only these: 12 or 0,5,10-20")
    parser.add_argument("--allow-partial", action="store_true", help="take what is there of an incomplete capture")
    parser.add_argument("--no-wait", action="store_true", help="fail if the capture is still being written")


def _add_health(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "ask one service whether it serves: exit code 0 if so, else 1"
    _add_bare(groups, "health", health.run, text, endpoint_text="either service, inference or store", timeout=5.0)


def _add_vectors(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("vectors", help="send steering vectors, or see which the server lacks")
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, text in (
        ("put", commands.put_vectors, "send the vectors that the server lacks"),
        ("find", commands.find_vectors, "say which vectors the server has"),
    ):
        _add(inner, name, run, text).add_argument("files", nargs="+", metavar="FILE", help=".npy or .safetensors")
