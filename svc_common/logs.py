"""Structured logs: readable lines on a terminal, one JSON object per line elsewhere. Nothing is logged per token.

Every line about a request carries its ID as `request_id`, in every process of both services. A capture has the ID of
its request, so `request_id` also names the capture.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import structlog

from residuum.wire.limits import MAX_ID_LENGTH

_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)
"""Processors of every record, from our own loggers and from libraries."""


class _Stderr:
    """Writes the lines of one of our own loggers.

    It bypasses `logging`, whose records would double the cost of a line; services log a line for each request. As with
    `logging`, an unwritable log raises no error.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        """Write a whole line at once."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")  # stderr is line-buffered, also when it is not a terminal

    debug = info = warning = error = critical = msg


def configure_logs(level: str = "info") -> None:
    """Send this process's logs to stderr in one format, including those of libraries that use `logging`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    configure_own_logs(level)


def configure_own_logs(level: str) -> None:
    """Send only our own logs to stderr. For processes of others, whose own logging must stay as it is."""
    structlog.configure(
        processors=[*_SHARED, *_final()],
        logger_factory=_Stderr,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        cache_logger_on_first_use=True,
    )


def quiet_grpc() -> None:
    """Make gRPC's core log only errors, in this process and its children.

    Otherwise it writes an unstructured line for each failed TLS handshake, so anyone who can reach the port could fill
    the disk. Call this before importing grpc, which reads the environment on import. It leaves GRPC_VERBOSITY and
    GRPC_TRACE alone if the operator has set them.
    """
    if "GRPC_TRACE" not in os.environ:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def make_formatter() -> logging.Formatter:
    """Return a `logging` formatter that makes lines of libraries look like our own."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_final()],
    )


def _final() -> list[structlog.typing.Processor]:
    """Return the processors that render an event as a line."""
    if sys.stderr.isatty():
        # structlog's default shows the local variables, such as prompts, and takes a quarter of a second.
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind_request(request_id: str) -> None:
    """Add the request ID to every line that is logged until the enclosing `request_scope` ends."""
    structlog.contextvars.bind_contextvars(request_id=request_id[:MAX_ID_LENGTH])  # callers may send longer IDs


@contextlib.contextmanager
def request_scope() -> Iterator[None]:
    """Restore the bound log fields when the context ends.

    This does not use the reset tokens of context variables. Such a token works only in the context that created it, and
    Python may close a call's generator in another one.
    """
    before = structlog.contextvars.get_contextvars()
    try:
        yield
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(**before)
