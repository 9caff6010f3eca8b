"""JSON, server-sent events and errors, as the page reads them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from residuum import exceptions as exc

LARGEST_BODY = 64 << 20
"""Bytes of a request's body. The largest are uploaded directions."""

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (exc.InvalidRequest, 400),
    (exc.NotFound, 404),
    (exc.AlreadyExists, 409),
    (exc.CaptureNotComplete, 409),
    (exc.NotUpdatable, 409),
    (exc.ResourceExhausted, 429),
    (exc.Unavailable, 503),
    (exc.DeadlineExceeded, 504),
    (exc.ResiduumError, 502),
    (FileExistsError, 409),
    (FileNotFoundError, 404),
    (ImportError, 501),
    (OSError, 500),
    (LookupError, 404),
    (TypeError, 400),
    (ValueError, 400),
)
"""The HTTP status of each kind of failure. The first that fits holds. 401 and 403 are those of the page's own token."""

Event = tuple[str, Mapping[str, Any]]
"""A server-sent event: its name, and its data as JSON."""


def describe(error: Exception) -> dict[str, str]:
    """Return a failure as the page shows it."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, exc.BatchFailed):  # its own message tells programs where the other replies are
        first = min(error.errors)
        message = (
            f"{len(error.errors)} of {len(error.replies)} prompts failed. Prompt {first + 1}: {error.errors[first]}"
        )
    return {"kind": type(error).__name__, "message": message}


def failed(_: Request, error: Exception) -> Response:
    """Return the response for an exception of an endpoint."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return JSONResponse({"error": describe(error)}, status_code=status)


FAILURES: tuple[type[Exception], ...] = tuple(kind for kind, _ in _STATUS)
"""The exceptions that `failed` explains."""


async def body_of(request: Request, most: int | None = None) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        InvalidRequest: It is too large, or not a JSON object.
    """
    try:
        value = json.loads(await bytes_of(request, most))
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request's body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"The request's body must be a JSON object, not {type(value).__name__}.")
    return value


async def bytes_of(request: Request, most: int | None = None) -> bytes:
    """Return a request's body of at most `most` bytes.

    Raises:
        InvalidRequest: It is larger than that; `LARGEST_BODY` if none is given.
    """
    most = LARGEST_BODY if most is None else most
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise invalid(f"The request's body has more than {most} bytes. Send a smaller one.")
        parts.append(part)
    return b"".join(parts)


def whole_number(asked: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a parameter, such as one of the URL, as a number of at least 0.

    Raises:
        InvalidRequest: It is missing, or not such a number.
    """
    text = str(asked.get(name, "" if default is None else default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):  # noqa: PLR2004 - fits into 32 bits
        raise invalid(f"{name}={text!r} is not a whole number of at least 0.")
    return int(text)


def invalid(message: str) -> exc.InvalidRequest:
    """Return the exception for a request of the page that makes no sense."""
    return exc.InvalidRequest(message, reason="INVALID_FIELD")


def floats(values: npt.NDArray[Any]) -> str:
    """Return an array's elements as little-endian float32 in base64: compact, and with NaN, which JSON lacks."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()


def number(value: float) -> float | None:
    """Return a number for JSON; None for NaN and infinity."""
    return float(value) if np.isfinite(value) else None


async def merged(sources: Sequence[AsyncGenerator[Event, None]]) -> AsyncIterator[Event]:
    """Yield the events of several streams as they come, until all have ended. All of them are closed at the end."""
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                yield event
                waiting[asyncio.ensure_future(anext(source))] = source
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def event_stream(events: AsyncIterator[Event]) -> Response:
    """Return events as a stream. A failure becomes the last event, "error"."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for name, data in events:
                yield f"event: {name}\ndata: {json.dumps(data)}\n\n"
        except FAILURES as error:
            yield f"event: error\ndata: {json.dumps(describe(error))}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
