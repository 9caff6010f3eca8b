"""Searches for tokens: their request, and how the answers of several stores become one result. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from residuum import exceptions as exc
from residuum.protocol.arguments import check_integer, short
from residuum.protocol.captures.many import check_choice, check_ids
from residuum.protocol.deadlines import list_request
from residuum.protocol.requests import RequestLike
from residuum.v1 import store_pb2
from residuum.values.captures.rows import check_one
from residuum.values.replies.search import LEFT_OUT, SearchHit, SearchResult
from residuum.values.selections.layers_and_positions import Positions, PositionsLike
from residuum.values.selections.points import site_numbers
from residuum.values.tensors.vector import Vector, rows_site
from residuum.wire.limits import MAX_CAPTURES_PER_READ, MAX_SEARCH_CONTEXT, MAX_SEARCH_HITS

if TYPE_CHECKING:
    import numpy.typing as npt

MEASURES = {
    "projection": store_pb2.SEARCH_MEASURE_PROJECTION,
    "cosine": store_pb2.SEARCH_MEASURE_COSINE,
}
ORDERS = {
    "most": store_pb2.SEARCH_ORDER_MOST,
    "least": store_pb2.SEARCH_ORDER_LEAST,
    "absolute": store_pb2.SEARCH_ORDER_ABSOLUTE,
}


def search_request(
    vector: Vector | Mapping[int, Vector] | npt.ArrayLike,
    *,
    layer: int,
    k: int,
    site: str | None,
    measure: str,
    order: str,
    per_capture: int | None,
    context: int,
    captures: Iterable[RequestLike] | None,
    prefix: str,
    states: str | Iterable[str],
    where: str,
    positions: PositionsLike,
) -> store_pb2.SearchRequest:
    """Build the request of a search; see `Client.search`.

    Raises:
        InvalidRequest: An argument is invalid, or rows of the site are of another kind than the directions.
        BadVector: The vector is not one, or is zero.
    """
    check_one(layer, "resid_post" if site is None else site)
    site = rows_site(vector, site)
    _check_choice("measure", measure, MEASURES)
    _check_choice("order", order, ORDERS)
    check_integer("k", k, 1, MAX_SEARCH_HITS)
    check_integer("context", context, 0, MAX_SEARCH_CONTEXT)
    check_integer("layer", layer, 0, (1 << 32) - 1)
    if per_capture is not None:
        check_integer("per_capture", per_capture, 1, (1 << 32) - 1)
    direction = _vector_at(vector, layer)
    if not direction.norm:
        raise exc.BadVector("The vector is zero, so it has no direction to search for.", reason="BAD_VECTOR")
    chosen = list_request(prefix, states, where)
    request = store_pb2.SearchRequest(
        vector=direction.message.values,
        layer=layer,
        site=site_numbers([site])[0],
        measure=MEASURES[measure],
        order=ORDERS[order],
        max_hits=k,
        max_hits_per_capture=per_capture or 0,
        context_tokens=context,
        prefix=chosen.prefix,
        states=chosen.states,
        where=chosen.where,
    )
    if captures is not None:
        check_choice(captures, prefix or ("-" if states else None), where)
        request.capture_ids.extend(check_ids(captures))
        check_integer("the number of captures", len(request.capture_ids), 1, MAX_CAPTURES_PER_READ)
    selected = Positions.of(positions)
    if selected != Positions():
        request.positions.CopyFrom(selected.to_proto())
    return request


def _vector_at(vector: Vector | Mapping[int, Vector] | npt.ArrayLike, layer: int) -> Vector:
    if isinstance(vector, Mapping):
        if layer not in vector:
            raise exc.InvalidRequest(
                f"There is no direction for layer {layer}. Choose among {list(vector)}.", reason="INVALID_FIELD"
            )
        vector = vector[layer]
    return vector if isinstance(vector, Vector) else Vector(vector)


def _check_choice(name: str, given: str, choices: Iterable[str]) -> None:
    if not isinstance(given, str) or given not in choices:
        raise exc.InvalidRequest(
            f"{name} must be one of {', '.join(choices)}, not {short(given)}.",
            reason="INVALID_FIELD",
            metadata={"field": name},
        )


class SearchAnswer:
    """What one store has answered."""

    def __init__(self) -> None:
        self.hits: list[store_pb2.SearchHit] = []
        self.progress = store_pb2.SearchProgress()
        self.unknown: set[str] = set()

    def take(self, response: store_pb2.SearchResponse) -> int:
        """Take a response. Return the bytes that were scanned since the last one."""
        before, self.progress = self.progress.bytes_scanned, response.progress
        self.hits.extend(response.hits)
        self.unknown.update(response.unknown_capture_ids)
        return max(self.progress.bytes_scanned - before, 0)


def merged(request: store_pb2.SearchRequest, answers: Iterable[SearchAnswer]) -> SearchResult:
    """Return the result of a search from the answers of all stores.

    Raises:
        UnknownCapture: No store has some of the captures of the request.
        InvalidRequest: No capture matches, or none could be searched.
    """
    found = list(answers)
    missing = set.intersection(*(answer.unknown for answer in found))
    if missing:
        first = min(missing)
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise exc.UnknownCapture(
            f"No store holds the capture {first!r}{others}: never opened, deleted, or expired. List captures "
            "(residuum ls), or leave them out.",
            reason="UNKNOWN_CAPTURE",
            metadata={"capture_id": first},
        )
    left_out: Counter[str] = Counter()
    for answer in found:
        for item in answer.progress.left_out:
            left_out[LEFT_OUT.get(item.reason, str(int(item.reason)))] += item.count
    hits = sorted((hit for answer in found for hit in answer.hits), key=lambda hit: _order_of(request, hit))
    result = SearchResult(
        tuple(map(SearchHit.from_proto, hits[: request.max_hits])),
        num_captures=sum(answer.progress.num_captures for answer in found),
        rows_scanned=sum(answer.progress.rows_scanned for answer in found),
        bytes_scanned=sum(answer.progress.bytes_scanned for answer in found),
        rows_without_score=sum(answer.progress.rows_without_score for answer in found),
        left_out=dict(left_out),
    )
    _check_searched(request, result)
    return result


def _check_searched(request: store_pb2.SearchRequest, result: SearchResult) -> None:
    if not result.num_captures:
        raise exc.InvalidRequest(
            "There is no capture to search: none matches the filter. `residuum ls` lists them.", reason="INVALID_FIELD"
        )
    if result.num_captures == sum(result.left_out.values()):
        raise exc.InvalidRequest(
            f"No capture could be searched: {result.summary.partition('left out: ')[2]}. The vector has "
            f"{len(request.vector) // 4} elements, for layer {request.layer}. Choose a layer and site that were "
            "captured, and a vector as wide as their rows.",
            reason="INVALID_FIELD",
        )


def _order_of(request: store_pb2.SearchRequest, hit: store_pb2.SearchHit) -> tuple[float, str, str, int, int]:
    cost = hit.score if request.order == ORDERS["least"] else -hit.score
    if request.order == ORDERS["absolute"]:
        cost = -abs(hit.score)
    return cost, hit.capture_id, hit.tenant, hit.sequence, hit.position
