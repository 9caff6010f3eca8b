"""Endpoints for layer × position grids of a measure, the values of one layer, and single rows."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from residuum.exceptions import ResiduumError
from residuum.protocol.generation.lens import Unembedding
from residuum.ui.answers import (
    FAILURES,
    Event,
    body_of,
    describe,
    event_stream,
    floats,
    invalid,
    merged,
    number,
    whole_number,
)
from residuum.ui.measure_choice import chosen_measure
from residuum.ui.measures import FloatArray, Grid, Measure, statistics
from residuum.values.captures.manifest import Manifest

if TYPE_CHECKING:
    from residuum.aio import AsyncClient
    from residuum.ui.gallery import Gallery

_CACHE_BYTES = 256 << 20
"""Bytes of grids that are kept, so that other layers and zooms need no further read."""

_MOST_COLUMNS = 4096
_MOST_POSITIONS = 1 << 22
_MOST_LIVE = 8
_EVENT_SECONDS = 0.1
"""How often a live stream sends what has come."""

_EVENT_VALUES = 1 << 14
"""After how many values it sends before that: the page stays smooth while it reads a long prompt."""

Piece = tuple[int, npt.NDArray[np.int64], FloatArray]
"""A layer, positions, and their values."""

_STREAM_SITES = {"resid_post", "resid_pre", "resid_mid"}
"""The sites whose rows the model's unembedding can be applied to."""


class GridCache:
    """Computes grids of captures that have ended, and keeps the latest ones."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._grids: OrderedDict[Any, Grid] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, manifest: Manifest, site: str, sequence: int, measure: Measure, key: Any) -> Grid:
        """Return a grid. The rows are read as a stream, so the memory is that of the grid and of one message.

        Args:
            manifest: The capture's manifest; it has ended.
            site: The site.
            sequence: The sequence.
            measure: What to compute.
            key: Names the measure with its direction.
        """
        name = (manifest.capture_id, manifest.open_time, site, sequence, key)
        lock = self._locks.setdefault(manifest.capture_id, asyncio.Lock())
        async with lock:  # two views of one capture share one read, and no other capture waits for it
            grid = self._grids.get(name)
            if grid is None:
                grid = Grid(manifest.layers_at(site), _positions(manifest, sequence), measure.quantiles)
                async for layer, positions, values in _measured(self._client, manifest, site, sequence, measure):
                    grid.put(layer, positions, values)
                self._grids[name] = grid
                while len(self._grids) > 1 and sum(kept.values.nbytes for kept in self._grids.values()) > _CACHE_BYTES:
                    self._grids.popitem(last=False)
            self._grids.move_to_end(name)
            return grid


async def grid(request: Request) -> Response:
    """Return a window of a grid, in as many columns as the page can show, and of at least `span` positions."""
    found = await _grid(request)
    span = min(whole_number(request.query_params, "span", 0), _MOST_POSITIONS)
    end = max(found.values.shape[1], span, 1) - 1
    first = min(whole_number(request.query_params, "first", 0), end)
    last = max(first, min(whole_number(request.query_params, "last", end), end))
    columns = min(max(whole_number(request.query_params, "columns", 1024), 1), _MOST_COLUMNS)
    part = found.window(first, last, columns)
    return JSONResponse(
        {
            "layers": found.layers, "positions": end + 1, "first": first, "last": last,
            "columns": part.shape[1], "values": floats(part), "ranges": found.ranges(),
        }
    )  # fmt: skip


async def scores(request: Request) -> Response:
    """Return the values of one layer at every position."""
    found = await _grid(request)
    return JSONResponse({"values": floats(found.row(whole_number(request.query_params, "layer")))})


async def live(request: Request) -> Response:
    """Stream the values of captures while their requests generate, and end with the last of them.

    All captures of a view share one stream, because a browser opens at most six connections to a host. Each event has
    the index of its capture. A capture that cannot be followed gives the event "problem"; the others go on.
    """
    items = (await body_of(request)).get("captures")
    if not isinstance(items, list) or not 1 <= len(items) <= _MOST_LIVE or not all(isinstance(i, dict) for i in items):
        raise invalid(f"captures must be a list of 1 to {_MOST_LIVE} objects.")
    return event_stream(merged([_growing(request, index, item) for index, item in enumerate(items)]))


async def _growing(request: Request, index: int, asked: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
    client: AsyncClient = request.app.state.client
    try:
        manifest, site, sequence, measure, _ = await _wanted(request, asked)
        layers = list(manifest.layers_at(site))
        yield "start", {"index": index, "layers": layers, "prompt_tokens": len(manifest.prompt_token_ids)}
        async for tiles in _batches(_measured(client, manifest, site, sequence, measure)):
            yield "tiles", {"index": index, "tiles": tiles}
        yield "end", {"index": index}
    except FAILURES as error:
        yield "problem", {"index": index, **describe(error)}


async def _batches(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield the tiles of pieces together, and the last ones also while no further piece comes."""
    tiles: list[dict[str, Any]] = []
    sent, count = 0.0, 0
    waiting = asyncio.ensure_future(anext(pieces))
    try:
        while True:
            rest = max(sent + _EVENT_SECONDS - time.monotonic(), 0.0) if tiles else None
            done, _ = await asyncio.wait([waiting], timeout=rest)
            if done:
                try:
                    layer, positions, values = waiting.result()
                except StopAsyncIteration:
                    break
                tiles.extend(_tiles(layer, positions, values))
                count += len(values)
                waiting = asyncio.ensure_future(anext(pieces))
            if tiles and (count >= _EVENT_VALUES or time.monotonic() - sent >= _EVENT_SECONDS):
                yield tiles
                tiles, sent, count = [], time.monotonic(), 0
        if tiles:
            yield tiles
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pieces.aclose()


def _tiles(layer: int, positions: npt.NDArray[np.int64], values: FloatArray) -> Iterator[dict[str, Any]]:
    """Yield the values of a layer as runs of positions that follow each other."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    for places, part in zip(np.split(positions, cuts), np.split(values, cuts), strict=True):
        if len(places):
            yield {"layer": layer, "first": int(places[0]), "values": floats(part)}


async def row(request: Request) -> Response:
    """Return facts about one row, and the tokens that it predicts through the model's unembedding.

    A position without a row is no failure: the last token of every reply is one.
    """
    manifest, site, sequence, measure, _ = await _wanted(request, request.query_params)
    layer, position = whole_number(request.query_params, "layer"), whole_number(request.query_params, "position")
    client: AsyncClient = request.app.state.client
    acts = await client.activations(
        manifest.capture_id, layers=[layer], sites=[site], sequences=sequence, positions=[position],
        wait=False, allow_partial=True,
    )  # fmt: skip
    if not acts.present.any():
        return JSONResponse({"missing": f"The capture has no row of layer {layer} at position {position}."})
    values = acts[layer][0]
    answer = {**statistics(values), "measure": number(float(measure.values(layer, values[None])[0]))}
    is_of_stream = site in _STREAM_SITES and manifest.format_at(site).decodes_to_rows
    if is_of_stream and len(values) == manifest.hidden_size and not answer["not_finite"]:
        try:
            answer["lens"] = _lens(await client.unembed(values, top_k=8))
            answer["lens_model"] = (await client.info()).model
        except ResiduumError as error:  # the store may be read without an inference service
            answer["lens_error"] = describe(error)["message"]
    return JSONResponse(answer)


def _lens(found: Unembedding) -> list[list[Any]]:
    return [
        [int(token), found.text(int(token)), number(float(value))]
        for token, value in zip(found.top_ids.ravel(), found.top.ravel(), strict=True)
    ]


async def _grid(request: Request) -> Grid:
    manifest, site, sequence, measure, key = await _wanted(request, request.query_params)
    if not manifest.is_final:
        raise invalid(f"{manifest.capture_id} is still open. Follow it live, or wait until it has ended.")
    cache: GridCache = request.app.state.grids
    return await cache.get(manifest, site, sequence, measure, key)


async def _wanted(request: Request, asked: Mapping[str, Any]) -> tuple[Manifest, str, int, Measure, Any]:
    """Return what a request names: the capture, the site, the sequence, the measure, and a key of the measure."""
    client: AsyncClient = request.app.state.client
    manifest = await client.manifest(str(asked.get("id", "")))
    site = str(asked.get("site") or manifest.sites[0])
    sequence = whole_number(asked, "sequence", 0)
    if sequence >= max(manifest.proto.description.num_sequences, 1):
        raise invalid(f"{manifest.capture_id} has no sequence {sequence}.")
    gallery: Gallery = request.app.state.gallery
    # Reading a sparse autoencoder takes a while.
    measure, key = await asyncio.to_thread(chosen_measure, gallery, manifest, site, asked)
    return manifest, site, sequence, measure, key


async def _measured(
    client: AsyncClient, manifest: Manifest, site: str, sequence: int, measure: Measure
) -> AsyncGenerator[Piece, None]:
    """Yield (layer, positions, values) of a capture as its rows arrive, until it has ended."""
    pieces = client.follow(manifest.capture_id, sites=[site], sequence=sequence, allow_partial=True)
    async for _, layer, positions, rows in pieces:
        yield layer, positions, measure.values(layer, rows)


def _positions(manifest: Manifest, sequence: int) -> int:
    ended = manifest.sequences
    generated = len(ended[sequence].generated_token_ids) if sequence < len(ended) else 0
    last = max((run[1] for rows in manifest.present if rows.sequence == sequence for run in rows.ranges), default=-1)
    return max(len(manifest.prompt_token_ids) + generated, last + 1)
