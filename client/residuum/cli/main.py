"""The command line: which commands there are, what they take, and how a failure ends.

Exit codes: 0 done; 1 failed, with one line on stderr that says why; 2 a wrong command line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import residuum
from residuum.cli import commands, doctor, health, serve, token
from residuum.cli.output import Output
from residuum.exceptions import ResiduumError
from residuum.exports.formats import FORMATS
from residuum.rpc.tracing import TracingError, start_tracing
from residuum.values.capture import AXES, REDUCTIONS
from residuum.wire.encodings import ENCODINGS

if TYPE_CHECKING:
    _Groups = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - its only name

DEFAULT_ENDPOINT = "localhost:50051"
INTERRUPTED = 130

Command = Callable[[argparse.Namespace, Output], int]

_POSITIONS = ("all", "prompt", "generated", "last_prompt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: The command line after the program's name; by default that of the process.
    """
    parser = _parser()
    options, further = parser.parse_known_args(arguments)
    if options.run is serve.run:
        options.flags = further
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    output = Output(as_json=options.json)
    command: Command = options.run
    try:
        stop_tracing = start_tracing("residuum-client")  # if the environment says where to
        try:
            return command(options, output)
        finally:
            stop_tracing()
    except KeyboardInterrupt:
        output.error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output had enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ResiduumError, ImportError, OSError, TracingError, TypeError) as error:
        output.error(str(error))
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="residuum", description="Capture and steer the residual stream of a served model."
    )
    parser.add_argument(
        "--version", action="version", version=f"residuum {residuum.__version__}", help="show the version, and end"
    )
    groups = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(groups, "info", commands.info, "show what is served, and within which limits")
    _add_generate(groups)
    _add_list(groups)
    _add_pull(groups)
    _add_manifest(groups)
    removing = _add(groups, "rm", commands.remove, "delete captures")
    removing.add_argument("ids", nargs="+", metavar="ID", help="a capture's id")
    _add(groups, "stats", commands.stats, "show what the stores hold, keep, and for how long")
    _add_vectors(groups)
    _add(groups, "doctor", doctor.run, "check every step of the way to both services, and say what to do")
    _add_health(groups)
    _add_token(groups)
    _add_serve(groups)
    return parser


def _add(
    groups: _Groups, name: str, run: Command, help_text: str, *, timeout: float | None = commands.CALL_SECONDS
) -> argparse.ArgumentParser:
    parser = _add_bare(groups, name, run, help_text, endpoint_text="the inference service", timeout=timeout)
    parser.add_argument(
        "--tenant", metavar="NAME", help="for admins: whose captures are meant (default: one's own, lists: everybody's)"
    )
    parser.add_argument(
        "--store",
        action="append",
        metavar="[NAME=]HOST:PORT",
        help="the store, if its own word does not work from here; several by repeating it, or between commas, with the "
        "names that the inference service calls them by (default: what the inference service says)",
    )
    return parser


def _add_bare(
    groups: _Groups,
    name: str,
    run: Command,
    help_text: str,
    *,
    endpoint_text: str,
    timeout: float | None = commands.CALL_SECONDS,
) -> argparse.ArgumentParser:
    parser = groups.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
    parser.set_defaults(run=run, usage_error=parser.error)
    endpoint = os.environ.get("RESIDUUM_ENDPOINT", DEFAULT_ENDPOINT)
    parser.add_argument(
        "--endpoint",
        default=endpoint,
        metavar="HOST:PORT",
        help=f"{endpoint_text} (default: RESIDUUM_ENDPOINT, now {endpoint})",
    )
    no_limit = f"as long as it takes, and {commands.CALL_SECONDS:g} for each smaller call"
    limit = no_limit if timeout is None else f"{timeout:g}"
    seconds = f"seconds that it may take (default: {limit})"
    parser.add_argument("--timeout", type=_seconds, default=timeout, metavar="S", help=seconds)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, for programs (default: for people)"
    )
    _add_credentials(parser)
    return parser


def _add_credentials(parser: argparse.ArgumentParser) -> None:
    # No flag takes the token itself: every user of a machine can read the command lines of its processes.
    group = parser.add_argument_group("credentials", "the token itself may stand in RESIDUUM_TOKEN")
    for flag, metavar, text in (
        ("--token-file", "FILE", "the file that holds the token (default: RESIDUUM_TOKEN_FILE)"),
        ("--tls-ca", "FILE", "connect with TLS, and trust these CAs (default: RESIDUUM_TLS_CA)"),
        ("--tls-server-name", "NAME", "the name in the certificate (default: RESIDUUM_TLS_SERVER_NAME, or the host)"),
        ("--client-cert", "FILE", "a certificate of your own, for mutual TLS (default: RESIDUUM_CLIENT_CERT)"),
        ("--client-key", "FILE", "its private key (default: RESIDUUM_CLIENT_KEY)"),
    ):
        group.add_argument(flag, metavar=metavar, help=text)
    group.add_argument(
        "--tls",
        action="store_true",
        default=None,
        help="connect with TLS, trusting public CAs (default: RESIDUUM_TLS)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="send a token to another machine in plain text, too (default: RESIDUUM_INSECURE, or refuse)",
    )


def _add_serve(groups: _Groups) -> None:
    parser = groups.add_parser(
        "serve",
        help="start a store and an inference service here, until Ctrl-C (needs residuum-server)",
        description="Start a store and an inference service on this machine, until Ctrl-C. Further flags are those of "
        "the inference service, such as --enforce-eager or --max-model-len 1024; see python -m inference_svc --help.",
        allow_abbrev=False,  # --d is not --data: it may be meant for the inference service
    )
    parser.set_defaults(run=serve.run, usage_error=parser.error, json=False)
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
        help="where captures are kept, and both services' logs (default: residuum-data, in the current folder)",
    )
    kept.add_argument("--temporary", action="store_true", help="delete captures at the end (default: keep them)")


def _add_generate(groups: _Groups) -> None:
    text = "generate text, and capture or steer while at it"
    parser = _add(groups, "generate", commands.generate, text, timeout=None)
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's turn of a conversation (default: no)"
    )
    parser.add_argument(
        "--capture", metavar="LAYERS", help="capture these layers: all, 12 or 0,5,10-20 (default: capture nothing)"
    )
    parser.add_argument(
        "--positions",
        choices=_POSITIONS,
        help="which tokens --capture captures (default: all)",
    )
    parser.add_argument(
        "--sites",
        metavar="SITES",
        help="where in these layers, separated by commas: those that `residuum info` names (default: resid_post)",
    )
    parser.add_argument(
        "--before-steering",
        action="store_true",
        help="capture rows as they were before they were steered (default: as the model goes on with them)",
    )
    _add_encoding(parser)
    parser.add_argument(
        "--id", dest="request_id", help="your own name for the request and its capture (default: the server makes one)"
    )
    for name, (kind, help_text) in commands.SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[0].upper(), help=help_text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated (default: at none)"
    )
    _add_steering(parser)


def _add_encoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encoding",
        choices=ENCODINGS,
        help="how captured rows are stored; docs/encodings.md tells more (default: as the server has it, mostly raw)",
    )
    parser.add_argument(
        "--dimensions",
        type=_count,
        metavar="K",
        help="what rp8 and rp project to, or how many elements topk8 and topk keep (default: as the server has it, "
        "mostly 512 and 128)",
    )
    parser.add_argument("--encoding-seed", type=int, metavar="N", help="the seed of rp8 and rp (default: 0)")
    parser.add_argument(
        "--axis", choices=AXES, help="what shares a scale in full8: a row, or a dimension of a block (default: row)"
    )
    parser.add_argument(
        "--onto",
        action="append",
        metavar="FILE",
        help="project captured rows onto the vectors of this file, as for --add; may be repeated (default: onto none)",
    )
    parser.add_argument(
        "--reduction",
        choices=REDUCTIONS,
        help="capture this of the prompt's rows and of the generated tokens' instead of all (default: none)",
    )


def _add_steering(parser: argparse.ArgumentParser) -> None:
    bounds = "either bound may be left empty, as in joy.npy@12::3.5"
    vector = (
        "VECTOR is a .npy file, FILE.safetensors:NAME, or a file of Directions.save, which has a vector for each layer"
    )
    scale = "LAYERS as for --capture; SCALE is 1 if it is left out"
    for name, metavar, help_text in (
        ("add", "VECTOR@LAYERS*SCALE", f"add a vector; {vector}; {scale} (default: none)"),
        ("ablate", "VECTOR@LAYERS*SCALE", "remove a direction (default: none)"),
        ("cap", "VECTOR@LAYERS:MIN:MAX", f"keep a projection between two bounds; {bounds} (default: none)"),
        ("replace", "VECTOR@LAYERS:VALUE", "set a projection (default: none)"),
    ):
        parser.add_argument(
            f"--{name}",
            dest="steer",
            action="append",
            default=[],
            type=functools.partial(_named, name),
            metavar=metavar,
            help=f"{help_text}; may be repeated, applied in this order",
        )

    parser.add_argument("--steer-positions", choices=_POSITIONS, help="which tokens are steered (default: all)")
    parser.add_argument(
        "--keep-norm",
        action="store_true",
        help="scale rows, after each of these operations, to the norm that they had before it (default: no)",
    )


def _named(name: str, text: str) -> tuple[str, str]:
    return name, text


def _add_list(groups: _Groups) -> None:
    parser = _add(groups, "ls", commands.list_captures, "list captures, newest first")
    parser.add_argument("--prefix", default="", help="only ids that start with this (default: all)")
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        choices=["open", "complete", "incomplete", "aborted"],
        help="only captures in this state; may be repeated (default: all)",
    )
    parser.add_argument("-n", "--limit", type=_count, default=None, metavar="N", help="at most so many (default: all)")


def _add_pull(groups: _Groups) -> None:
    text = "fetch a capture into a file"
    parser = _add(groups, "pull", commands.pull, text, timeout=None)
    parser.add_argument("id", metavar="ID", help="the capture's id")
    parser.add_argument("--out", metavar="FILE", help="where to write (default: ID and the format's suffix)")
    parser.add_argument(
        "--format", choices=list(FORMATS), help="what to write (default: as FILE is named, or else safetensors)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there (default: fail)")
    parser.add_argument("--layers", metavar="LAYERS", help="only these: 12 or 0,5,10-20 (default: all)")
    parser.add_argument("--sites", metavar="SITES", help="only these, separated by commas (default: all)")
    parser.add_argument(
        "--allow-partial", action="store_true", help="take what is there of an incomplete capture (default: fail)"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="fail if the capture is still being written (default: wait for its end)"
    )


def _add_manifest(groups: _Groups) -> None:
    text = "print what is known of a capture, as one JSON document"
    parser = _add(groups, "manifest", commands.manifest, text, timeout=None)
    parser.add_argument("id", metavar="ID", help="the capture's id")
    parser.add_argument(
        "--wait", action="store_true", help="wait for the capture's end, or for the --timeout (default: as it is now)"
    )


def _add_health(groups: _Groups) -> None:
    text = "ask one service whether it serves: exit code 0 if so, else 1"
    either = "either service, inference or store"
    parser = _add_bare(groups, "health", health.run, text, endpoint_text=either, timeout=health.SECONDS)
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="ask for this service, and so whether it is this one that listens there: inference, store, or the full "
        "name of another (default: for the server as a whole)",
    )


def _add_token(groups: _Groups) -> None:
    text = "make a token, and its entry in the tokens file of the services"
    parser = groups.add_parser("token", help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=token.run, usage_error=parser.error)
    token.add_arguments(parser)


def _add_vectors(groups: _Groups) -> None:
    parser = groups.add_parser("vectors", help="send steering vectors, or see which the server lacks")
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, text in (
        ("put", commands.put_vectors, "send the vectors that the server lacks"),
        ("find", commands.find_vectors, "say which vectors the server has"),
    ):
        _add(inner, name, run, text).add_argument("files", nargs="+", metavar="FILE", help=".npy or .safetensors")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
