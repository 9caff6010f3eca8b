"""Endpoints for directions: the gallery, new ones from two lists of prompts, and the tokens that project on one."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from residuum.directions.methods import difference_of_means, pca
from residuum.directions.values import Directions
from residuum.exceptions import BadVector, ResiduumError
from residuum.ui.answers import Event, body_of, bytes_of, event_stream, invalid, number, whole_number
from residuum.ui.api.captures import client_of_own_tenant
from residuum.ui.gallery import Gallery, read_file
from residuum.ui.scratch import scratch_captures
from residuum.ui.separation import separations
from residuum.values.captures.activations import Activations
from residuum.values.captures.capture import Capture
from residuum.values.probes.probe import Probe
from residuum.values.selections.layers_and_positions import PositionsLike
from residuum.values.tensors.vector import Vector, rows_site

if TYPE_CHECKING:
    from residuum.aio import AsyncClient

_MOST_PROMPTS = 2000
_METHODS = {"difference_of_means": difference_of_means, "pca": pca}


async def list_all(request: Request) -> Response:
    """Return what the gallery has, with a reason for each file that cannot be read."""
    gallery: Gallery = request.app.state.gallery
    return JSONResponse({"folder": str(gallery.folder), **await asyncio.to_thread(_contents, gallery)})


async def describe(request: Request) -> Response:
    """Return what is known of one direction: its layers, their norms, and how well they separate the examples."""
    gallery: Gallery = request.app.state.gallery
    name = request.query_params.get("name", "")
    directions = gallery.load(name)
    norms = [vector.norm for vector in directions.values()]
    return JSONResponse({**_entry(gallery, name), "norms": norms, "notes": gallery.notes(name)})


async def make(request: Request) -> Response:
    """Make directions from two lists of prompts, and stream "progress" and "made"."""
    client: AsyncClient = request.app.state.client
    gallery: Gallery = request.app.state.gallery
    body = await body_of(request)
    name, method = str(body.get("name", "")), body.get("method", "difference_of_means")
    gallery.check_new(name)
    if method not in _METHODS:
        raise invalid(f"There is no method {method!r}. Choose among {', '.join(_METHODS)}.")
    sides = [_prompts(body, side) for side in ("positive", "negative")]
    positions = body.get("positions") or "last_prompt"
    capture = Capture(layers=body.get("layers") or "all", positions=positions)

    prompts = [prompt for side in sides for prompt in side]
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts] if body.get("chat") else prompts

    async def events() -> AsyncIterator[Event]:
        yield "progress", {"done": 0, "total": len(prompts)}
        async with scratch_captures(client, len(prompts)) as names:
            batch = client.generate_as_completed(
                asked, capture=capture, request_ids=names, max_tokens=0, progress=False
            )
            done = 0
            async for _ in batch:
                done += 1
                yield "progress", {"done": done, "total": len(prompts)}
            acts = await client.activations(names)
            positive, negative = acts[: len(sides[0])], acts[len(sides[0]) :]
            directions, notes = await asyncio.to_thread(_compute, str(method), positive, negative, positions)
            notes["prompts"] = {"positive": sides[0], "negative": sides[1]}
            gallery.save(name, directions, notes)
        yield "made", {"name": name}

    return event_stream(events())


async def upload(request: Request) -> Response:
    """Save the directions or the probe in an uploaded file."""
    asked = request.query_params
    layer = whole_number(request.query_params, "layer") if asked.get("layer") else None
    gallery: Gallery = request.app.state.gallery
    gallery.check_new(asked.get("name", ""))
    content = await bytes_of(request)
    found = await asyncio.to_thread(read_file, asked.get("file", ""), content, layer)
    gallery.save(asked.get("name", ""), found)
    return JSONResponse({"name": asked.get("name"), "kind": "probe" if isinstance(found, Probe) else "direction"})


async def rename(request: Request) -> Response:
    """Give directions another name."""
    body = await body_of(request)
    request.app.state.gallery.rename(str(body.get("name", "")), str(body.get("to", "")))
    return JSONResponse({})


async def delete(request: Request) -> Response:
    """Delete directions from the gallery."""
    request.app.state.gallery.delete(str((await body_of(request)).get("name", "")))
    return JSONResponse({})


async def download(request: Request) -> Response:
    """Return a file with the directions: safetensors as `Directions.save` writes it, or GGUF for llama.cpp."""
    name, form = request.query_params.get("name", ""), request.query_params.get("format", "safetensors")
    if form not in {"safetensors", "gguf"}:
        raise invalid(f"There is no format {form!r}. Choose safetensors or gguf.")
    directions = request.app.state.gallery.load(name)
    content = await asyncio.to_thread(_file, directions, form)
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}  # names have no quotes
    return Response(content, media_type="application/octet-stream", headers=headers)


async def promoted(request: Request) -> Response:
    """Return the tokens that a layer's direction promotes and suppresses, through the model's unembedding."""
    directions = request.app.state.gallery.load(request.query_params.get("name", ""))
    layer = whole_number(request.query_params, "layer")
    if layer not in directions:
        raise invalid(f"The direction has no layer {layer}. Choose among {list(directions.layers)}.")
    rows_site(directions, "resid_post", advice="Only directions of the residual stream promote tokens.")
    client: AsyncClient = request.app.state.client
    values = directions[layer].values
    found = await client.unembed(np.stack([values, -values]), top_k=10)
    texts = [[found.text(int(token)) for token in row] for row in found.top_ids]
    return JSONResponse({"more": texts[0], "less": texts[1]})


async def search(request: Request) -> Response:
    """Find the tokens in the stores whose rows project most onto a direction."""
    body = await body_of(request)
    directions = request.app.state.gallery.load(str(body.get("direction", "")))
    layer = body.get("layer")
    if not isinstance(layer, int) or layer not in directions:
        raise invalid(f"The direction has no layer {layer!r}. Choose among {list(directions.layers)}.")
    client = await client_of_own_tenant(request)
    found = await client.search(
        _unit(directions[layer], layer), layer=layer, k=_count(body.get("k", 50)),
        site=rows_site(directions, str(body.get("site") or "") or None),
        measure=body.get("measure", "projection"), order=body.get("order", "most"), where=str(body.get("where", "")),
        prefix=str(body.get("prefix", "")), per_capture=body.get("per_capture") or None,
        positions=body.get("positions") or None,
    )  # fmt: skip
    hits = [
        {
            "id": hit.capture_id, "sequence": hit.sequence, "position": hit.position, "score": number(hit.score),
            "token": hit.token, "token_id": hit.token_id, "before": hit.before, "after": hit.after,
        }
        for hit in found
    ]  # fmt: skip
    return JSONResponse({"hits": hits, "summary": found.summary})


def _unit(vector: Vector, layer: int) -> Vector:
    """Return a vector of length 1, so that the scores are projections as everywhere on the page."""
    if not vector.norm:
        raise BadVector(f"The direction of layer {layer} is zero, so nothing projects onto it.")
    return Vector(vector.values / vector.norm)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(f"k must be a whole number, not {value!r}.")
    return value


def _contents(gallery: Gallery) -> dict[str, Any]:
    return {
        "directions": [_readable(name, _entry, gallery) for name in gallery.names()],
        "probes": [_readable(name, _probe, gallery) for name in gallery.probes()],
        "saes": [{"name": name, "path": str(gallery.sae_path(name))} for name in gallery.saes()],
    }


def _readable(name: str, describe: Callable[[Gallery, str], dict[str, Any]], gallery: Gallery) -> dict[str, Any]:
    try:
        return describe(gallery, name)
    except (ResiduumError, OSError) as error:
        return {"name": name, "problem": str(error), "layers": []}


def _probe(gallery: Gallery, name: str) -> dict[str, Any]:
    probe = gallery.probe(name)
    places = probe.places
    return {
        "name": name, "layer": ", ".join(str(layer) for _, layer in places) if len(places) > 1 else probe.layer,
        "site": ", ".join(dict.fromkeys(site for site, _ in places)),
        "width": probe.width, "activation": probe.activation,
        "outputs": list(probe.output_names) or [str(index) for index in range(probe.num_outputs)],
        "mlp": len(probe.mlp), "attention": probe.attention is not None,
    }  # fmt: skip


def _entry(gallery: Gallery, name: str) -> dict[str, Any]:
    directions = gallery.load(name)
    return {
        "name": name,
        "layers": list(directions.layers),
        "hidden_size": directions.hidden_size,
        "origin": dataclasses.asdict(directions.origin),
    }


def _prompts(body: dict[str, Any], side: str) -> list[str]:
    prompts = body.get(side)
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid(f"{side} must be a list of texts.")
    if not 1 <= len(prompts) <= _MOST_PROMPTS:
        raise invalid(f"{side} has {len(prompts)} prompts. Give 1 to {_MOST_PROMPTS}.")
    return prompts


def _compute(
    method: str, positive: Sequence[Activations], negative: Sequence[Activations], positions: PositionsLike
) -> tuple[Directions, dict[str, Any]]:
    directions = _METHODS[method](positive, negative, positions=positions)
    return directions, {"separation": separations(positive, negative, directions.layers)}


def _file(directions: Directions, form: str) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"direction.{form}"
        if form == "gguf":
            # llama.cpp cannot steer after layer 0.
            kept = [layer for layer, place, _ in directions.placed() if place]
            directions.to_gguf(path, layers=kept)
        else:
            directions.save(path)
        return path.read_bytes()
