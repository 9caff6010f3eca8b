"""Dose and response: one prompt with several scales of an operation, and what each does to the reply."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from residuum.ui.answers import Event, body_of, event_stream, invalid, number
from residuum.ui.api.generations import prompt_of, sampling_of
from residuum.ui.gallery import layer_vectors
from residuum.ui.measures import Measure, Projection
from residuum.ui.operations import operations_of
from residuum.ui.scratch import scratch_captures
from residuum.values.captures.capture import Capture

if TYPE_CHECKING:
    from residuum.aio import AsyncClient
    from residuum.values.replies.generation import Reply

_MOST_SCALES = 41


async def sweep(request: Request) -> Response:
    """Generate once for each scale, and stream a "point" for each: the mean projection, the length and the text."""
    client: AsyncClient = request.app.state.client
    body = await body_of(request)
    scales, layer = _scales(body.get("scales")), body.get("layer")
    operation = body.get("operation")
    if not isinstance(operation, dict) or operation.get("kind") not in {"add", "ablate"}:
        raise invalid("operation must be one that adds or ablates: only these have a scale.")
    if not isinstance(layer, int):
        raise invalid(f"layer must be a number, not {layer!r}.")
    gallery = request.app.state.gallery
    directions = gallery.load(str(operation.get("direction", "")))
    measure = Projection(layer_vectors(directions, [layer], str(operation.get("from", ""))))
    steer = [operations_of([{**operation, "scale": scale}], gallery) if scale else None for scale in scales]
    prompt, sampling = prompt_of(body), sampling_of(body.get("sampling", {}))

    async def events() -> AsyncIterator[Event]:
        async with scratch_captures(client, len(scales)) as names:
            batch = client.generate_as_completed(
                [prompt] * len(scales), steer=steer, request_ids=names, progress=False, max_concurrency=8,
                capture=Capture(layers=[layer], sites=[directions.steering_site], positions="generated"), **sampling,
            )  # fmt: skip
            # Its requests end before their captures are deleted.
            async with aclosing(batch):
                async for index, reply in batch:
                    yield "point", {"scale": scales[index], **await _response(client, reply, layer, measure)}

    return event_stream(events())


async def _response(client: AsyncClient, reply: Reply, layer: int, measure: Measure) -> dict[str, Any]:
    """Return what a reply is like."""
    acts = await client.activations(reply)
    values = measure.values(layer, acts[layer])
    projection = number(float(values.mean())) if len(values) else None
    return {"projection": projection, "tokens": reply.usage.generated_tokens, "text": reply.text}


def _scales(given: Any) -> list[float]:
    if not isinstance(given, list) or not 1 <= len(given) <= _MOST_SCALES:
        raise invalid(f"scales must be a list of 1 to {_MOST_SCALES} numbers.")
    for scale in given:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise invalid(f"A scale must be a number, not {scale!r}.")
    return [float(scale) for scale in given]
