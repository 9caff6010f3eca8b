"""`residuum.serve`: starts both services on this machine, from Python.

The services are a separate distribution, residuum-server. The client loads it through entry points, not by name.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from residuum.client import Client
from residuum.exceptions import OutageWarning
from residuum.protocol.arguments import check_flag
from residuum.protocol.caller import callers_place
from residuum.rpc.extras import install_server

ENTRY_POINTS = "residuum.commands"
"""The entry points of commands that residuum-server implements."""

_POLL_SECONDS = 0.2
"""How often `serve` checks that its services run."""


@contextmanager
def serve(
    model: str | Path,
    *,
    data: str | Path | None = None,
    temporary: bool = False,
    progress: bool = True,
    **settings: object,
) -> Iterator[Client]:
    """Start a store and an inference service on this machine, and stop both at the end of the block.

    This is `residuum serve` for notebooks and scripts. It needs the distribution `residuum-server`.

    Args:
        model: The model's folder, or its name on the Hugging Face hub.
        data: The folder for captures and both services' logs (default: `residuum-data`).
        temporary: Delete the captures at the end.
        progress: Show on stderr how long the model has been loading.
        settings: Further settings of the inference service, such as `enforce_eager=True` or `max_model_len=1024`.

    Returns:
        A context manager. It yields a client once both services are ready.

    Raises:
        RuntimeError: `residuum-server` is not installed, or a service did not start; the message has the end of its
            log.

    Warns:
        OutageWarning: A service ended before the block; the message has the end of its log.

    Example:
        >>> with residuum.serve("HuggingFaceTB/SmolLM2-135M-Instruct") as client:
        ...     print(client.generate("The capital of France is", max_tokens=8).text)
    """
    check_flag("temporary", temporary)
    check_flag("progress", progress)
    server = installed_server()
    folder = Path(data) if data is not None else None
    flags = flags_of(settings)
    with (
        server.serving(str(model), data=folder, temporary=temporary, flags=flags, progress=progress) as services,
        _watched(services),
        Client(services[1].endpoint) as client,
    ):
        yield client


@contextmanager
def _watched(services: Sequence[Any]) -> Iterator[None]:
    """Warn at once if a service ends within the block."""
    is_over, place = threading.Event(), callers_place()

    def watch() -> None:
        while not is_over.wait(_POLL_SECONDS):
            ended = next((service for service in services if not service.is_running), None)
            if ended is not None:
                text = f"The {ended.name} service has ended. Its log ends:\n{ended.log_end()}"
                warnings.warn_explicit(text, OutageWarning, *place)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def installed_server(command: str = "serve") -> Any:
    """Return the module of residuum-server that implements a command.

    Raises:
        RuntimeError: residuum-server is not installed.
    """
    for entry in metadata.entry_points(group=ENTRY_POINTS, name=command):
        return entry.load()
    raise RuntimeError(f"the services are not installed: {install_server()}")


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Return the flags of an inference service that set these settings."""
    return [_flag(name, value) for name, value in settings.items()]


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, (list, tuple)):
        return f"--{flag}={','.join(map(str, value))}"
    return f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"
