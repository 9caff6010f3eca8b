"""The client of a command: its endpoint, timeout and credentials."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import residuum
from residuum.captures.archive import is_archive
from residuum.cli.output import Output

CALL_SECONDS = 30.0
"""The default timeout of a call."""


def open_client(options: argparse.Namespace, timeout: float | None = None) -> residuum.Client:
    """Return a client for the command line's endpoints and credentials. `timeout` replaces the command line's."""
    return residuum.Client(
        options.endpoint,
        store=options.store,
        timeout=timeout or options.timeout or CALL_SECONDS,
        tenant=options.tenant,
        **credentials_of(options),
    )


def open_captures(options: argparse.Namespace) -> residuum.Client | residuum.Archive:
    """Return what the captures are read from: a client, or an archive if --store is the URL of one."""
    store: list[str] = options.store or []
    if len(store) == 1 and is_archive(store[0]):
        return residuum.Archive(store[0], tenant=options.tenant or "")
    return open_client(options)


def credentials_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the command line's credentials as arguments of a client; None for those not given."""
    files = {
        "ca": options.tls_ca,
        "server_name": options.tls_server_name,
        "cert": options.client_cert,
        "key": options.client_key,
    }
    token = None if options.token_file is None else Path(options.token_file)
    tls = residuum.TLS(**files) if any(files.values()) else options.tls
    return {"token": token, "tls": tls, "insecure": options.insecure}


@contextlib.contextmanager
def silent_stores(output: Output) -> Iterator[list[str]]:
    """Print the warnings about stores that did not answer. The yielded list holds them once the context has ended."""
    silent: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", residuum.SilentStoreWarning)
        yield silent
        silent += [str(item.message) for item in caught if issubclass(item.category, residuum.SilentStoreWarning)]
    for message in silent:
        output.error(message)


@contextlib.contextmanager
def plain_warnings(output: Output) -> Iterator[None]:
    """Print warnings when they come, those about services that do not answer and about no rows each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", residuum.OutageWarning)
        warnings.simplefilter("always", residuum.EmptyCaptureWarning)
        warnings.showwarning = lambda message, *_: output.error(str(message))
        yield


@contextlib.contextmanager
def advice_if_cut_off(advice: str) -> Iterator[None]:
    """Add advice to the errors of a timeout and of Ctrl-C: the state of the work, and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice) from None
    except residuum.DeadlineExceeded as error:
        raise residuum.DeadlineExceeded(f"{error} {advice}", reason=error.reason, metadata=error.metadata) from error
