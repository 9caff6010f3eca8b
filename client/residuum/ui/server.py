"""Runs the app on a loopback address until it is interrupted."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from residuum.ui.access import new_token
from residuum.ui.app import make_app

if TYPE_CHECKING:
    from pathlib import Path

    from residuum.aio import AsyncClient
    from residuum.ui.api.health import Diagnosis

HOST = "127.0.0.1"


def run(
    client: AsyncClient,
    *,
    port: int,
    gallery: Path,
    diagnose: Diagnosis,
    ready: Callable[[str], None],
    store: str = "",
) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        client: The client of both services.
        port: The port; 0 chooses a free one.
        gallery: The folder with directions.
        diagnose: Returns the findings that the page shows under Health.
        ready: Called with the page's address, which has the token, once it can be opened.
        store: The stores that the client was created with; empty if the inference service names them.

    Raises:
        OSError: The port is taken.
    """
    token = new_token()
    app = make_app(client, token=token, gallery=gallery, diagnose=diagnose, store=store)
    with _listening(port) as listener:
        ready(f"http://{HOST}:{listener.getsockname()[1]}/?token={token}")
        # No access log: it would show nothing that a user needs.
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
        config.timeout_graceful_shutdown = 1  # streams to the page do not end by themselves
        uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise OSError(f"Port {port} of {HOST} cannot be used: {error.strerror}. Choose another --port.") from None
        listener.listen(128)
        yield listener
