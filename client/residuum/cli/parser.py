"""The parser of the command line, and the flags that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from residuum.cli.connection import CALL_SECONDS
from residuum.cli.output import Output

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]  # noqa: SLF001 - it has no public name

DEFAULT_ENDPOINT = "localhost:50051"

Command = Callable[[argparse.Namespace, Output], int]


class Parser(argparse.ArgumentParser):
    """A parser that prints only the error for a wrong command line, not all flags."""

    read_spec: Callable[[str, Collection[str]], Iterable[str]] | None = None
    """Returns the flags in the file that --spec names, for a command that has this flag. The second argument is the
    flags that may be repeated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # So that `--positions -4:` is a value, as `--positions -4` is; argparse has no public way to say so.
        self._negative_number_matcher = re.compile(r"-\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse a command line. Its flags replace those of the file that --spec names, wherever it names it."""
        if self.read_spec is None:
            return super().parse_known_args(args, namespace)
        blank = dict.fromkeys(action.dest for action in self._actions if action.default != argparse.SUPPRESS)
        given, further = super().parse_known_args(args, argparse.Namespace(**blank))
        if given.spec is None:
            return super().parse_known_args(args, namespace)
        try:
            tokens = list(self.read_spec(given.spec, self._repeated_flags()))
        except (ImportError, OSError, ValueError) as error:
            self.error(f"--spec {given.spec} cannot be used: {error}")
        found, unknown = super().parse_known_args(tokens, namespace)
        if unknown:
            self.error(f"--spec {given.spec} has unrecognized arguments: {' '.join(unknown)}")
        for name, value in vars(given).items():
            if value is not None:
                setattr(found, name, value)
        return found, further

    def _repeated_flags(self) -> set[str]:
        repeated = (action for action in self._actions if isinstance(action, argparse._AppendAction))  # noqa: SLF001
        return {flag for action in repeated for flag in action.option_strings}

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the help is, and exit with code 2."""
        print(f"{self.prog}: {message}\nSee {self.prog} --help.", file=sys.stderr)
        sys.exit(2)


def add_command(
    commands: Commands,
    name: str,
    run: Command,
    help_text: str,
    *,
    arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None,
    timeout: float | None = CALL_SECONDS,
    examples: str = "",
    many_endpoints: bool = False,
) -> None:
    """Add a command that calls both services.

    Args:
        commands: The commands to add it to.
        name: The command's name.
        run: The function that runs it.
        help_text: A short description.
        arguments: Adds the command's own arguments. The help shows them before those of the connection.
        timeout: The default timeout in seconds; None means no limit.
        examples: Examples, one per line. The first is the usage line; the help starts with the others.
        many_endpoints: Whether --endpoint may be repeated; `options.endpoint` is then a list, or None.
    """
    parser = _new(commands, name, run, help_text, examples)
    arguments(parser)
    group = _add_connection(parser, "the inference service", timeout, many=many_endpoints)
    group.add_argument(
        "--tenant",
        metavar="NAME",
        help="for admins: the captures' tenant (default: the token's own; lists show all tenants)",
    )
    group.add_argument(
        "--store",
        action="append",
        metavar="[NAME=]HOST:PORT",
        help="the store's address, if the advertised one does not work from here; repeat it or use commas for several "
        "stores, with the names that the inference service uses; ls, pull and manifest also take the URL of an "
        "archive, such as s3://bucket/prefix (default: as the inference service advertises)",
    )
    _add_credentials(parser)


def add_service_command(
    commands: Commands,
    name: str,
    run: Command,
    help_text: str,
    *,
    arguments: Callable[[argparse.ArgumentParser], None],
    endpoint_text: str,
    timeout: float,
) -> None:
    """Add a command that calls one service, which may be either; see `add_command`."""
    parser = _new(commands, name, run, help_text, "")
    arguments(parser)
    _add_connection(parser, endpoint_text, timeout)
    _add_credentials(parser)


def _new(commands: Commands, name: str, run: Command, help_text: str, examples: str) -> Parser:
    description = f"{help_text[0].upper()}{help_text[1:]}."
    parser = commands.add_parser(
        name,
        help=help_text,
        usage=None if not examples else f"%(prog)s [options] {examples.splitlines()[0]}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter,
    )
    if examples:
        lines = "\n".join(f"  {line}" for line in examples.splitlines()[1:])
        parser.description = f"{description}\n\nexamples:\n{lines}"
    parser.set_defaults(run=run, usage_error=parser.error)
    return parser


def _add_connection(
    parser: argparse.ArgumentParser, endpoint_text: str, timeout: float | None, *, many: bool = False
) -> argparse._ArgumentGroup:
    """Add the flags for the connection and the output. Return their group."""
    group = parser.add_argument_group("connection and output")
    endpoint = os.environ.get("RESIDUUM_ENDPOINT", DEFAULT_ENDPOINT)
    repeated = "; may be repeated, for several services of one model" if many else ""
    group.add_argument(
        "--endpoint",
        action="append" if many else "store",
        default=None if many else endpoint,
        metavar="HOST:PORT",
        help=f"{endpoint_text}{repeated} (default: RESIDUUM_ENDPOINT, now "
        + endpoint.replace("%", "%%")  # argparse formats the text; an IPv6 zone has a %
        + ")",
    )
    limit = f"none, and {CALL_SECONDS:g} for each short call" if timeout is None else f"{timeout:g}"
    seconds = f"the timeout in seconds (default: {limit})"
    group.add_argument("--timeout", type=positive_seconds, default=timeout, metavar="S", help=seconds)
    group.add_argument(
        "--json", action="store_true", help="print JSON objects, one per line, for programs (default: text for people)"
    )
    return group


def _add_credentials(parser: argparse.ArgumentParser) -> None:
    """Add the flags for tokens and TLS."""
    # No flag takes the token itself, because all users of a machine can read its processes' command lines.
    group = parser.add_argument_group("credentials", "RESIDUUM_TOKEN may hold the token itself")
    for flag, metavar, text in (
        ("--token-file", "FILE", "a file that holds the token (default: RESIDUUM_TOKEN_FILE)"),
        ("--tls-ca", "FILE", "connect with TLS and trust these CAs (default: RESIDUUM_TLS_CA)"),
        ("--tls-server-name", "NAME", "the certificate's name (default: RESIDUUM_TLS_SERVER_NAME, or the host)"),
        ("--client-cert", "FILE", "your own certificate, for mutual TLS (default: RESIDUUM_CLIENT_CERT)"),
        ("--client-key", "FILE", "your certificate's private key (default: RESIDUUM_CLIENT_KEY)"),
    ):
        group.add_argument(flag, type=_not_empty, metavar=metavar, help=text)
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


def _not_empty(text: str) -> str:
    """Return a text that is not empty, as that of an unset variable of a shell is."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty; give one, or leave the flag out")
    return text


def positive_count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_seconds(text: str) -> float:
    """Return a number of seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
