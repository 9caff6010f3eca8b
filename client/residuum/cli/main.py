"""The command line: commands, arguments and exit codes.

Exit codes: 0 success; 1 failure, with one line on stderr that says why; 2 wrong usage; 130 interrupted.
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
    _Groups = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - it has no public name

DEFAULT_ENDPOINT = "localhost:50051"
INTERRUPTED = 130

Command = Callable[[argparse.Namespace, Output], int]

_POSITIONS = ("all", "prompt", "generated", "last_prompt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: The command line after the program's name; by default the process's own.
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
        stop_tracing = start_tracing("residuum-client")  # does nothing unless the environment configures tracing
        try:
            return command(options, output)
        finally:
            stop_tracing()
    except KeyboardInterrupt:
        output.error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
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
        "--version", action="version", version=f"residuum {residuum.__version__}", help="show the version and exit"
    )
    groups = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(groups, "info", commands.info, "show the served model and the limits")
    _add_generate(groups)
    _add_list(groups)
    _add_pull(groups)
    _add_manifest(groups)
    removing = _add(groups, "rm", commands.remove, "delete captures")
    removing.add_argument("ids", nargs="+", metavar="ID", help="a capture's ID")
    _add(groups, "stats", commands.stats, "show what the stores hold, and how long they keep it")
    _add_vectors(groups)
    _add(groups, "doctor", doctor.run, "check the connections to and between the services, with advice for failures")
    _add_health(groups)
    _add_token(groups)
    _add_serve(groups)
    return parser


def _add(
    groups: _Groups, name: str, run: Command, help_text: str, *, timeout: float | None = commands.CALL_SECONDS
) -> argparse.ArgumentParser:
    parser = _add_bare(groups, name, run, help_text, endpoint_text="the inference service", timeout=timeout)
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        help="for admins: the captures' tenant (default: the token's own; lists show all tenants)",
    )
    parser.add_argument(
        "--store",
        action="append",
        metavar="[NAME=]HOST:PORT",
        help="the store's address, if the advertised one does not work from here; repeat it or use commas for several "
        "stores, with the names that the inference service uses (default: as the inference service advertises)",
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
    no_limit = f"none, and {commands.CALL_SECONDS:g} for each short call"
    limit = no_limit if timeout is None else f"{timeout:g}"
    seconds = f"the timeout in seconds (default: {limit})"
    parser.add_argument("--timeout", type=_seconds, default=timeout, metavar="S", help=seconds)
    parser.add_argument(
        "--json", action="store_true", help="print JSON objects, one per line, for programs (default: text for people)"
    )
    _add_credentials(parser)
    return parser


def _add_credentials(parser: argparse.ArgumentParser) -> None:
    # No flag takes the token itself, because all users of a machine can read its processes' command lines.
    group = parser.add_argument_group("credentials", "RESIDUUM_TOKEN may hold the token itself")
    for flag, metavar, text in (
        ("--token-file", "FILE", "a file that holds the token (default: RESIDUUM_TOKEN_FILE)"),
        ("--tls-ca", "FILE", "connect with TLS and trust these CAs (default: RESIDUUM_TLS_CA)"),
        ("--tls-server-name", "NAME", "the certificate's name (default: RESIDUUM_TLS_SERVER_NAME, or the host)"),
        ("--client-cert", "FILE", "your own certificate, for mutual TLS (default: RESIDUUM_CLIENT_CERT)"),
        ("--client-key", "FILE", "your certificate's private key (default: RESIDUUM_CLIENT_KEY)"),
    ):
        group.add_argument(flag, metavar=metavar, help=text)
    group.add_argument(
        "--tls",
        action="store_true",
        default=None,
        help="connect with TLS and trust public CAs (default: RESIDUUM_TLS)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow sending a token to another machine in plain text (default: RESIDUUM_INSECURE, or refuse)",
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
    text = "generate text, optionally with capture and steering"
    parser = _add(groups, "generate", commands.generate, text, timeout=None)
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="treat the prompt as a user's message in a chat (default: as plain text)"
    )
    parser.add_argument(
        "--capture", metavar="LAYERS", help="capture these layers: all, 12 or 0,5,10-20 (default: capture nothing)"
    )
    parser.add_argument(
        "--positions",
        choices=_POSITIONS,
        help="the positions to capture (default: all)",
    )
    parser.add_argument(
        "--sites",
        metavar="SITES",
        help="the sites to capture, separated by commas; `residuum info` lists them (default: resid_post)",
    )
    parser.add_argument(
        "--before-steering",
        action="store_true",
        help="capture rows as they were before steering (default: as the model continues with them)",
    )
    _add_encoding(parser)
    parser.add_argument(
        "--flush-interval",
        type=int,
        metavar="N",
        help="send the rows of generated tokens after this many captured positions, 1 to 32 (default: 32)",
    )
    parser.add_argument(
        "--id", dest="request_id", help="your own ID for the request and its capture (default: the server's choice)"
    )
    for name, (kind, help_text) in commands.SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[0].upper(), help=help_text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated (default: none)"
    )
    for flag, name, metavar, help_text in (
        ("--stop-token-id", "stop_token_ids", "ID", "stop after this token; may be repeated (default: none)"),
        ("--bad-word", "bad_words", "WORD", "a word that the reply must not contain; may be repeated (default: none)"),
        ("--logit-bias", "logit_bias", "ID:BIAS", "add to a token's logit; may be repeated (default: none)"),
    ):
        kind = int if name == "stop_token_ids" else str
        parser.add_argument(flag, dest=name, action="append", type=kind, metavar=metavar, help=help_text)
    parser.add_argument(
        "--json-schema",
        metavar="FILE",
        help="make the reply JSON that matches this schema: a file, or JSON (default: none)",
    )
    _add_steering(parser)


def _add_encoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encoding",
        choices=ENCODINGS,
        help="the encoding of captured rows; see docs/encodings.md (default: the server's, usually raw)",
    )
    parser.add_argument(
        "--dimensions",
        type=_count,
        metavar="K",
        help="the dimensions of rp8 and rp, or the elements that topk8 and topk keep (default: the server's, usually "
        "512 and 128)",
    )
    parser.add_argument("--encoding-seed", type=int, metavar="N", help="the seed of rp8 and rp (default: 0)")
    parser.add_argument(
        "--axis", choices=AXES, help="which numbers share a scale in full8: those of a row or dimension (default: row)"
    )
    parser.add_argument(
        "--onto",
        action="append",
        metavar="FILE",
        help="project captured rows onto the vectors of this file, as for --add; may be repeated (default: none)",
    )
    parser.add_argument(
        "--reduction",
        choices=REDUCTIONS,
        help="capture one row for the prompt and one for the generated tokens, reduced this way (default: none)",
    )


def _add_steering(parser: argparse.ArgumentParser) -> None:
    bounds = "either bound may be left empty, as in joy.npy@12::3.5"
    vector = (
        "VECTOR is a .npy file, FILE.safetensors:NAME, or a file of Directions.save, which has a vector for each layer"
    )
    scale = "LAYERS as for --capture; SCALE defaults to 1"
    for name, metavar, help_text in (
        ("add", "VECTOR@LAYERS*SCALE", f"add a vector; {vector}; {scale} (default: none)"),
        ("ablate", "VECTOR@LAYERS*SCALE", "remove a direction (default: none)"),
        ("cap", "VECTOR@LAYERS:MIN:MAX", f"keep a projection between two bounds; {bounds} (default: none)"),
        ("replace", "VECTOR@LAYERS:VALUE", "set a projection (default: none)"),
        ("set", "VECTOR@LAYERS", "set whole rows to a vector (default: none)"),
    ):
        parser.add_argument(
            f"--{name}",
            dest="steer",
            action="append",
            default=[],
            type=functools.partial(_named, name),
            metavar=metavar,
            help=f"{help_text}; may be repeated; operations apply in the order given",
        )

    parser.add_argument("--steer-positions", choices=_POSITIONS, help="the positions to steer (default: all)")
    parser.add_argument(
        "--keep-norm",
        action="store_true",
        help="after each operation, scale rows back to the norm that they had before it (default: no)",
    )


def _named(name: str, text: str) -> tuple[str, str]:
    return name, text


def _add_list(groups: _Groups) -> None:
    parser = _add(groups, "ls", commands.list_captures, "list captures, newest first")
    parser.add_argument("--prefix", default="", help="only captures whose ID starts with this (default: all)")
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        choices=["open", "complete", "incomplete", "aborted"],
        help="only captures in this state; may be repeated (default: all)",
    )
    parser.add_argument(
        "-n", "--limit", type=_count, default=None, metavar="N", help="at most this many (default: all)"
    )


def _add_pull(groups: _Groups) -> None:
    text = "fetch a capture into a file"
    parser = _add(groups, "pull", commands.pull, text, timeout=None)
    parser.add_argument("id", metavar="ID", help="the capture's ID")
    parser.add_argument("--out", metavar="FILE", help="the file to write (default: ID with the format's suffix)")
    parser.add_argument(
        "--format", choices=list(FORMATS), help="the file's format (default: by FILE's suffix, else safetensors)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists (default: fail)")
    parser.add_argument("--layers", metavar="LAYERS", help="only these layers: 12 or 0,5,10-20 (default: all)")
    parser.add_argument("--sites", metavar="SITES", help="only these sites, separated by commas (default: all)")
    parser.add_argument(
        "--allow-partial", action="store_true", help="write the present rows of an incomplete capture (default: fail)"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="fail if the capture is still open (default: wait until it ends)"
    )


def _add_manifest(groups: _Groups) -> None:
    text = "print a capture's manifest as one JSON document"
    parser = _add(groups, "manifest", commands.manifest, text, timeout=None)
    parser.add_argument("id", metavar="ID", help="the capture's ID")
    parser.add_argument(
        "--wait", action="store_true", help="wait until the capture ends, at most --timeout (default: do not wait)"
    )


def _add_health(groups: _Groups) -> None:
    text = "check whether one service is serving: exit code 0 if so, else 1"
    either = "either service, inference or store"
    parser = _add_bare(groups, "health", health.run, text, endpoint_text=either, timeout=health.SECONDS)
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="check this service: inference, store, or a full service name; fails if another service listens there "
        "(default: the server as a whole)",
    )


def _add_token(groups: _Groups) -> None:
    text = "create a token and its entry for the services' tokens file"
    parser = groups.add_parser("token", help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=token.run, usage_error=parser.error)
    token.add_arguments(parser)


def _add_vectors(groups: _Groups) -> None:
    parser = groups.add_parser("vectors", help="send steering vectors, or find those that the server lacks")
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, text in (
        ("put", commands.put_vectors, "send the vectors that the server lacks"),
        ("find", commands.find_vectors, "show which vectors the server has"),
    ):
        _add(inner, name, run, text).add_argument("files", nargs="+", metavar="FILE", help=".npy or .safetensors")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
