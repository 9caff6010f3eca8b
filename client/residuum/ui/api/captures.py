"""Lists of captures, manifests, tokens and labels."""

from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from residuum.exceptions import NoMessageSpans, NoTokenTexts
from residuum.ui.answers import body_of, invalid, whole_number
from residuum.values.captures.manifest import Manifest
from residuum.values.captures.manifest_records import SteeringChange, SteeringRecord
from residuum.values.replies.capture_summaries import CaptureSummary
from residuum.values.replies.service_status import StoreStats
from residuum.wire.labels import read_value
from residuum.wire.probes.rules import NEVER

if TYPE_CHECKING:
    from residuum.aio import AsyncClient

_STATES = ("open", "complete", "incomplete", "aborted")


async def list_page(request: Request) -> Response:
    """Return a page of the list of captures, newest first."""
    client = await client_of_own_tenant(request)
    asked = request.query_params
    states = [state for state in asked.get("states", "").split(",") if state in _STATES]
    page = await client.captures_page(
        page_size=whole_number(request.query_params, "size", 500), page_token=asked.get("page", ""),
        prefix=asked.get("prefix", ""), states=states, where=asked.get("where", ""),
    )  # fmt: skip
    return JSONResponse({"captures": [_summary(item) for item in page.captures], "next": page.next_page_token})


async def describe(request: Request) -> Response:
    """Return what a manifest says: what was captured, of which request, and what is missing."""
    manifest = await _manifest(request)
    return JSONResponse(
        {
            "id": manifest.capture_id, "model": manifest.model, "adapter": manifest.adapter, "state": manifest.state,
            "reason": manifest.reason, "detail": manifest.detail, "missing": manifest.describe_missing(),
            "sites": [_site(manifest, site) for site in manifest.sites], "num_layers": manifest.num_layers,
            "hidden_size": manifest.hidden_size, "encoding": manifest.encoding, "dtype": manifest.dtype,
            "features": list(manifest.features), "reduction": manifest.reduction,
            "before_steering": manifest.before_steering,
            "positions": str(manifest.positions), "prompt_tokens": len(manifest.prompt_token_ids),
            "sequences": _sequences(manifest), "rows": manifest.num_rows, "bytes": manifest.num_bytes,
            "steering": [_operation(item) for item in manifest.steering],
            "changes": [
                {"first": _firsts(change), "steering": [_operation(item) for item in change.steering]}
                for change in manifest.steering_changes
            ],
            "opened": _milliseconds(manifest.open_time), "ended": _milliseconds(manifest.end_time),
            "labels": dict(manifest.labels), "vllm": manifest.vllm_version,
        }
    )  # fmt: skip


async def tokens(request: Request) -> Response:
    """Return the token IDs and texts of one sequence, with the prompt, and the messages of a conversation."""
    manifest = await _manifest(request)
    sequence = whole_number(request.query_params, "sequence", 0)
    outcomes = manifest.sequences
    generated = outcomes[sequence].generated_token_ids if sequence < len(outcomes) else ()
    answer: dict[str, Any] = {"ids": [*manifest.prompt_token_ids, *generated], "texts": None, "spans": []}
    try:
        answer["texts"] = list(manifest.tokens(sequence))
    except NoTokenTexts as error:
        is_running = not manifest.is_final
        answer["why"] = "The request still runs. Its text is known when it has ended." if is_running else str(error)
    with contextlib.suppress(NoMessageSpans):  # most prompts are no conversation
        answer["spans"] = [[span.role, span.first, span.last] for span in manifest.spans(sequence)]
    return JSONResponse(answer)


async def label(request: Request) -> Response:
    """Set and remove labels."""
    body = await body_of(request)
    labels, texts = body.get("labels", {}), body.get("texts", {})
    if not isinstance(labels, dict) or not isinstance(texts, dict):
        raise invalid("labels and texts must be objects.")
    labels = {
        **labels,
        **{name: read_value(str(text)) for name, text in texts.items()},
    }  # as `residuum label` reads them
    client: AsyncClient = request.app.state.client
    return JSONResponse({"labels": await client.label(_text(body, "id"), labels)})


async def delete(request: Request) -> Response:
    """Delete one capture."""
    client: AsyncClient = request.app.state.client
    return JSONResponse({"freed": await client.delete(_text(await body_of(request), "id"))})


async def client_of_own_tenant(request: Request) -> AsyncClient:
    """Return the client, for its own tenant if the user chose none.

    An admin's lists and searches have the captures of all tenants, but an ID means a capture of the own tenant. So the
    page would open, and delete, other captures than it lists.
    """
    client: AsyncClient = request.app.state.client
    if client._tenant is None:  # noqa: SLF001 - the page's client is made without a tenant, before the stores are known
        stats = await client.stats(allow_partial=True)
        client._tenant = StoreStats.total(stats).own_tenant  # noqa: SLF001
    return client


async def _manifest(request: Request) -> Manifest:
    client: AsyncClient = request.app.state.client
    return await client.manifest(request.query_params.get("id", ""))


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise invalid(f"{name} must be a text, not {value!r}.")
    return value


def _summary(item: CaptureSummary) -> dict[str, Any]:
    return {
        "id": item.capture_id, "model": item.model, "state": item.state, "rows": item.num_rows, "bytes": item.num_bytes,
        "opened": _milliseconds(item.open_time), "ended": _milliseconds(item.end_time), "store": item.store,
        "labels": dict(item.labels),
    }  # fmt: skip


def _site(manifest: Manifest, site: str) -> dict[str, Any]:
    try:
        width = manifest.format_at(site).decoded_width
    except ValueError:  # this version does not know the encoding
        width = 0
    return {"name": site, "layers": list(manifest.layers_at(site)), "width": width}


def _sequences(manifest: Manifest) -> list[dict[str, Any]]:
    count = max(manifest.proto.description.num_sequences, 1)
    ended = manifest.sequences
    return [
        {
            "tokens": len(manifest.prompt_token_ids) + (len(ended[index].generated_token_ids) if ended else 0),
            "finish": ended[index].finish_reason if index < len(ended) else "",
        }
        for index in range(count)
    ]


def _firsts(change: SteeringChange) -> list[int | None]:
    """Return the first position of each sequence; None: the change is not for it."""
    return [None if first == NEVER else first for first in change.first_positions]


def _operation(item: SteeringRecord) -> dict[str, Any]:
    numbers = {name: getattr(item, name) for name in ("scale", "min", "max", "value")}
    return {
        "operation": item.operation, "layers": list(item.layers), "site": item.site, "positions": str(item.positions),
        "digests": list(item.digests), **{name: value for name, value in numbers.items() if value is not None},
    }  # fmt: skip


def _milliseconds(time: datetime.datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)
