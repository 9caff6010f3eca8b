"""Generation: text as a stream, changes of the steering while it runs, and stop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from residuum.exceptions import InvalidRequest
from residuum.ui.answers import Event, body_of, event_stream, invalid
from residuum.ui.operations import operations_of
from residuum.values.captures.capture import Capture

if TYPE_CHECKING:
    from residuum._async.streams import AsyncStream
    from residuum.aio import AsyncClient

_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
_ROLES = {"system", "user", "assistant"}
_LIVE_FLUSH = 4
"""Positions after which generated rows are sent: often enough to watch them, and not a chunk for each."""


async def generate(request: Request) -> Response:
    """Generate, and stream "started", "token" and "finished". If the page goes away, the request stops.

    "started" has `updatable`: whether `steer` can change the steering. It cannot if an operator's rule may steer.
    """
    client: AsyncClient = request.app.state.client
    body = await body_of(request)
    make = partial(
        client.stream,
        prompt_of(body),
        capture=_capture_of(body.get("capture")),
        steer=operations_of(body.get("operations", []), request.app.state.gallery) or None,
        request_id=body.get("id") or None,
        **sampling_of(body.get("sampling", {})),
    )
    stream, updatable = make(updatable=True), True
    try:
        await stream.open()  # so that a refusal is the answer, with its status code
    except InvalidRequest as error:
        if error.metadata.get("field") != "steering.updatable":
            raise
        stream, updatable = make(), False
        await stream.open()
    return event_stream(_events(stream, updatable=updatable))


async def steer(request: Request) -> Response:
    """Change the steering of a running request. The answer says from which position it holds."""
    client: AsyncClient = request.app.state.client
    body = await body_of(request)
    operations = operations_of(body.get("operations", []), request.app.state.gallery)
    first = await client.update_steering(str(body.get("id", "")), operations or None)
    return JSONResponse({"first_positions": first})


async def stop(request: Request) -> Response:
    """Stop a running request. Its capture then ends aborted."""
    client: AsyncClient = request.app.state.client
    await client.abort(str((await body_of(request)).get("id", "")))
    return JSONResponse({})


def prompt_of(body: dict[str, Any]) -> Any:
    """Return the prompt: a text, or a conversation.

    Raises:
        InvalidRequest: It is neither.
    """
    messages = body.get("messages")
    if messages is None:
        if not isinstance(body.get("prompt"), str):
            raise invalid("Give a prompt as a text, or messages.")
        return body["prompt"]
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list with at least one message.")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise invalid(f"A message needs a role ({', '.join(sorted(_ROLES))}) and a content.")
        if not isinstance(message.get("content"), str):
            raise invalid("A message's content must be a text.")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def sampling_of(given: Any) -> dict[str, Any]:
    """Return the sampling settings that the page may set. The client and the server check their values.

    Raises:
        InvalidRequest: They are not an object.
    """
    if not isinstance(given, dict):
        raise invalid("sampling must be an object.")
    return {name: given[name] for name in _SAMPLING if given.get(name) is not None}


def _capture_of(given: Any) -> Capture | None:
    if not given:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("labels", {}), dict):
        raise invalid("capture must be an object with layers, sites and labels.")
    return Capture(
        layers=given.get("layers") or "all",
        sites=given.get("sites") or ("resid_post",),
        labels=given.get("labels", {}),
        flush_interval=_LIVE_FLUSH,
    )


async def _events(stream: AsyncStream, *, updatable: bool) -> AsyncIterator[Event]:
    begun = time.monotonic()
    async with stream:
        prompt_tokens = len(stream.started.prompt_token_ids)
        yield "started", {"id": stream.request_id, "prompt_tokens": prompt_tokens, "updatable": updatable}
        position = prompt_tokens
        async for delta in stream:
            yield "token", {"text": delta.text, "ids": delta.token_ids, "position": position}
            position += len(delta.token_ids)
        reply = stream.reply
        yield (
            "finished",
            {
                "reason": reply.finish_reason,
                "tokens": reply.usage.generated_tokens,
                "seconds": round(time.monotonic() - begun, 3),
                "captured": reply.captured,
            },
        )
