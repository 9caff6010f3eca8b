"""Runs requests through the OpenAI API of a `vllm serve`, with as little work in the client as possible."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp

from bench.processes import RunFailedError
from bench.service.load import Start

_EVENT_END = b"\n\n"
_USAGE = b'"usage":{'
"""Only the last event has it."""
_DONE = b"data: [DONE]"


def new_session() -> aiohttp.ClientSession:
    """Return a session that keeps one connection for each stream, without a limit of connections or time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=None)
    )


def through_http(session: aiohttp.ClientSession, url: str, more: Mapping[str, Any]) -> Start:
    """Return what starts streamed completions of token IDs. `more` has further fields of their bodies.

    The body is written when a request is made ready, before its time begins: a list of 2,000 token IDs takes longer to
    write as JSON than all else that this client does.
    """
    fixed = {
        "temperature": 0.0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip

    def start(name: str, prompt: Sequence[int], decode: int) -> AsyncGenerator[int, None]:
        body = json.dumps({**fixed, "prompt": list(prompt), "max_tokens": decode}).encode()
        return _receive(session, f"{url}/v1/completions", body, name)

    return start


async def _receive(session: aiohttp.ClientSession, url: str, body: bytes, name: str) -> AsyncGenerator[int, None]:
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    async with session.post(url, data=body, headers=headers) as answer:
        if answer.status != 200:  # noqa: PLR2004 - OK
            raise RunFailedError(f"{name}: status {answer.status}: {await answer.text()}")
        reader, seen = EventCounter(name), 0
        async for piece in answer.content.iter_any():
            count = reader.add(piece)
            seen += count
            yield count
        yield reader.finished() - seen


class EventCounter:
    """Counts the events with tokens in a stream of server-sent events, without decoding them."""

    def __init__(self, name: str) -> None:
        """Begin. `name` is the request's, for error messages."""
        self._name = name
        self._rest = b""
        self._tokens: int | None = None

    def add(self, piece: bytes) -> int:
        """Return how many events with tokens end in the next piece of the stream.

        Raises:
            RunFailedError: An event says that the request failed.
        """
        *events, self._rest = (self._rest + piece).split(_EVENT_END)
        return sum(map(self._has_tokens, events))

    def finished(self) -> int:
        """Return the number of tokens, which the last event says. An event may have several.

        Raises:
            RunFailedError: The stream has ended without that event.
        """
        if self._tokens is None:
            raise RunFailedError(f"{self._name}: the stream ended early")
        return self._tokens

    def _has_tokens(self, event: bytes) -> bool:
        if event.startswith(b'data: {"error"'):
            raise RunFailedError(f"{self._name}: {event.decode(errors='replace')}")
        if _USAGE in event:
            self._tokens = int(json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens"])
            return False
        return event.startswith(b"data: ") and event != _DONE
