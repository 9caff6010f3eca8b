"""A store's credentials on a shipper's command line. Secrets stay in their files: only paths stand there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from residuum.rpc.credentials import TLS, Credentials

_TLS_FILES = ("ca", "cert", "key", "server_name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a command line take credentials."""
    parser.add_argument("--token-file", metavar="FILE", help="the file that holds the store's token")
    parser.add_argument("--tls", action="store_true", help="connect with TLS")
    for name in _TLS_FILES:
        parser.add_argument(f"--tls-{name.replace('_', '-')}", metavar="FILE" if name != "server_name" else "NAME")
    parser.add_argument("--insecure", action="store_true", help="send the token in plain text to another machine, too")


def from_options(options: argparse.Namespace) -> Credentials:
    """Return the credentials of a command line."""
    files = {name: getattr(options, f"tls_{name}") for name in _TLS_FILES}
    tls = TLS(**files) if options.tls or any(files.values()) else None
    return Credentials(tls=tls, token_file=options.token_file, insecure=options.insecure)


def to_arguments(credentials: Credentials) -> Iterator[str]:
    """Yield the words that `from_options` makes the same credentials of."""
    if credentials.token_file:
        yield from ("--token-file", os.fspath(credentials.token_file))
    if credentials.insecure:
        yield "--insecure"
    if credentials.tls is None:
        return
    yield "--tls"
    for name in _TLS_FILES:
        value = getattr(credentials.tls, name)
        if value:
            yield from (f"--tls-{name.replace('_', '-')}", os.fspath(value))
