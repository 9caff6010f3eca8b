"""The credentials for stores on a shipper's command line. It holds only paths: the secrets stay in their files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from residuum.rpc.credentials import TLS, Credentials

_TLS_FIELDS = {
    "ca": "trust the CAs in this PEM file",
    "cert": "a PEM file with the shipper's certificate (mutual TLS)",
    "key": "a PEM file with the private key of --tls-cert",
    "server_name": "the name that the store's certificate must have, if it differs from its host",
}
"""The fields of `TLS`, with their help texts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for credentials to a command line."""
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token for the store")
    parser.add_argument("--tls", action="store_true", help="connect with TLS")
    for name, text in _TLS_FIELDS.items():
        metavar = "NAME" if name == "server_name" else "FILE"
        parser.add_argument(f"--tls-{name.replace('_', '-')}", metavar=metavar, help=text)
    parser.add_argument("--insecure", action="store_true", help="send the token in plain text to other machines too")


def from_options(options: argparse.Namespace) -> Credentials:
    """Return the credentials that a command line names."""
    files = {name: getattr(options, f"tls_{name}") for name in _TLS_FIELDS}
    tls = TLS(**files) if options.tls or any(files.values()) else None
    return Credentials(tls=tls, token_file=options.token_file, insecure=options.insecure)


def to_arguments(credentials: Credentials) -> Iterator[str]:
    """Yield the command-line arguments from which `from_options` restores these credentials."""
    if credentials.token_file:
        yield from ("--token-file", os.fspath(credentials.token_file))
    if credentials.insecure:
        yield "--insecure"
    if credentials.tls is None:
        return
    yield "--tls"
    for name in _TLS_FIELDS:
        value = getattr(credentials.tls, name)
        if value:
            yield from (f"--tls-{name.replace('_', '-')}", os.fspath(value))
