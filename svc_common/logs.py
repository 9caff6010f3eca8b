"""Structured logs: for a person on a terminal, one JSON object a line anywhere else. Nothing is logged per token.

A line that concerns a request has its id as `request_id`, in every process of both services. A capture's id is that of
its request, so `request_id` names the capture, too.
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
"""What every record gets, whoever made it."""


class _Stderr:
    """Writes the lines of one of our own loggers.

    Not through `logging`, whose records cost as much again as all the rest of a line, and a service has one of each
    request. As there, a log that nobody can write to any more does not fail what is logged.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        """Write a line, at once and whole."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")  # it is buffered by lines, on a terminal and anywhere else

    debug = info = warning = error = critical = msg


def configure_logs(level: str = "info") -> None:
    """Send this process's logs, and those of the libraries that use `logging`, to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    configure_own_logs(level)


def configure_own_logs(level: str) -> None:
    """Send our own logs to stderr, and leave those of others as they are: for a process that is theirs."""
    structlog.configure(
        processors=[*_SHARED, *_final()],
        logger_factory=_Stderr,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        cache_logger_on_first_use=True,
    )


def quiet_grpc() -> None:
    """Let gRPC's core log errors alone, here and in the processes that are started from here.

    Else it writes a line of its own, in no form of ours, for each failed TLS handshake: whoever reaches the port could
    fill the disk with them. It must come before grpc is imported, which reads the environment then. Whoever set
    GRPC_VERBOSITY or GRPC_TRACE wants to see more, and does.
    """
    if "GRPC_TRACE" not in os.environ:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def make_formatter() -> logging.Formatter:
    """Return the formatter of what a library logs by `logging`: it looks like our own lines."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_final()],
    )


def _final() -> list[structlog.typing.Processor]:
    """Return what makes a line of an event."""
    if sys.stderr.isatty():
        return [structlog.dev.ConsoleRenderer()]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind_request(request_id: str) -> None:
    """Put a request's id into whatever is logged from here on, until the end of the `request_scope` around it."""
    structlog.contextvars.bind_contextvars(request_id=request_id[:MAX_ID_LENGTH])  # whatever somebody sent as an id


@contextlib.contextmanager
def request_scope() -> Iterator[None]:
    """Forget at the end what was bound within.

    Not by the tokens of context variables, which only the context that made them takes back: a generator that is a call
    may be closed in another one.
    """
    before = structlog.contextvars.get_contextvars()
    try:
        yield
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(**before)
