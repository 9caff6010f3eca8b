"""`residuum ui`: serves the page in the browser. The package `residuum.ui` implements it, with the extra `ui`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import residuum
from residuum.cli.connection import CALL_SECONDS, credentials_of, open_client
from residuum.cli.output import Output
from residuum.cli.services import doctor
from residuum.rpc.extras import install_extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--port", type=int, default=8808, metavar="PORT", help="the page's port on 127.0.0.1; 0 is any (default: 8808)"
    )
    parser.add_argument(
        "--gallery",
        metavar="FOLDER",
        help="the folder with directions (default: ~/.local/share/residuum/directions)",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Serve the page until Ctrl-C.

    It does not start a browser: the address has the token, and all users of a machine can read command lines.
    """
    try:
        from residuum.ui import gallery, server
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"starlette", "uvicorn"}:
            raise
        output.error(f"the page needs {package}: {install_extra('ui')}")
        return 1
    if not 0 <= options.port < 1 << 16:
        options.usage_error(f"--port: {options.port} is not a port")

    client = residuum.AsyncClient(
        options.endpoint,
        store=options.store,
        timeout=options.timeout or CALL_SECONDS,
        tenant=options.tenant,
        **credentials_of(options),
    )

    def diagnose() -> Iterator[doctor.Finding]:
        with open_client(options) as checked:
            yield from doctor.examine(checked, named_store=options.store is not None)

    def ready(address: str) -> None:
        if output.as_json:
            output.json({"address": address})
        else:
            output.say(f"page       {address}\nservices   {options.endpoint}\nCtrl-C stops the page.")

    named = options.store if isinstance(options.store, str) else ",".join(options.store or ())
    folder = Path(options.gallery) if options.gallery else gallery.default_folder()
    try:
        server.run(client, port=options.port, gallery=folder, diagnose=diagnose, ready=ready, store=named)
    except KeyboardInterrupt:  # the usual end
        output.note("stopped")
    return 0
