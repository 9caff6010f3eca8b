"""Rows of many captures as one stream, some read at the same time. Knows nothing of what they are used for."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, OpenCapture
from residuum.protocol.reading import Reading, ReadPlan, not_complete, plan_read
from residuum.v1 import selection_pb2
from residuum.values.activations import Activations
from residuum.values.capture import SITE_NAMES
from residuum.values.manifest import Manifest
from residuum.values.selections import LayersLike, PositionsLike
from residuum.wire.selection import wanted_positions

if TYPE_CHECKING:
    from residuum._sync.captures import CaptureClient

_Item = TypeVar("_Item")

_LOOK_UPS = 16
"""Manifests that are fetched at the same time."""


class StreamedRows(NamedTuple):
    """Rows of one layer of one capture, and where they are from."""

    capture: int
    """The capture, by its place among those that are read."""
    sequence: int
    """The sequence."""
    site: str
    """The site."""
    layer: int
    """The layer."""
    positions: npt.NDArray[np.int64]
    """Their positions; shape [rows]."""
    token_ids: npt.NDArray[np.int64]
    """The token at each, -1 where it is not known; shape [rows]."""
    rows: npt.NDArray[Any]
    """The rows as they were captured, or decoded; [rows, width]."""


@dataclass(frozen=True)
class RowChoice:
    """Which rows of a capture are read; see `Client.activations`."""

    layers: LayersLike | None
    sites: str | Sequence[str] | None
    sequences: tuple[int, ...] | None
    positions: PositionsLike
    allow_partial: bool

    def plan(self, capture_id: str, sequence: int | None = None) -> ReadPlan:
        """Return the read of what is chosen of a capture, or of one of its sequences."""
        return plan_read(
            capture_id, layers=self.layers, sites=self.sites,
            sequences=self.sequences if sequence is None else sequence, positions=self.positions,
            follow=True, allow_partial=self.allow_partial,
        )  # fmt: skip


def share(count: int, number: int, of: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return which of so many captures fall to the share `number` of `of`, in the order in which they are read.

    All shares together are each capture once. With `shuffle` the order follows from seed and epoch alone, so that all
    who share agree on it without talking.
    """
    order = list(range(count))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - nothing is secret about it
    return order[number::of]


def stream_rows(
    client: CaptureClient,
    captures: Sequence[str],
    order: Iterable[int],
    choice: RowChoice,
    concurrent_reads: int,
    check: Callable[[Manifest], None],
) -> Iterator[StreamedRows]:
    """Yield the rows of captures, each once; so many captures are read at the same time, a piece of each in turn.

    `check` is called with the manifest of each, and raises if its rows are not wanted.

    Raises:
        CaptureNotComplete: One is not complete any more, and partial ones are not allowed: before its first row.
        InvalidRequest: One lacks something that is named: before its first row.
    """

    def reader(number: int) -> Callable[[], Iterator[StreamedRows]]:
        return lambda: _rows_of(client, captures[number], number, choice, check)

    return in_turn((reader(number) for number in order), concurrent_reads)


def stream_aligned(
    client: CaptureClient,
    captures: Sequence[str],
    order: Sequence[int],
    choice: RowChoice,
    concurrent_reads: int,
    check: Callable[[Manifest], None],
) -> Iterator[StreamedRows]:
    """Yield the rows of captures by token: those of one token at all places, [tokens, places, width].

    The places are all sites, and at each site all layers, in the order of `places`. `site` and `layer` say nothing. A
    token that lacks a row at one of the places is left out. So many streams of captures are read at the same time, a
    capture of each in turn; the chosen rows of as many captures are in memory.

    Raises:
        CaptureNotComplete: One is not complete any more, and partial ones are not allowed.
        InvalidRequest: One lacks something that is named.
    """

    def reader(part: Sequence[int]) -> Callable[[], Iterator[StreamedRows]]:
        return lambda: _aligned_of(client, {captures[number]: number for number in part}, choice, check)

    parts = [order[first::concurrent_reads] for first in range(concurrent_reads)]
    return in_turn((reader(part) for part in parts if part), concurrent_reads)


def places(manifest: Manifest, choice: RowChoice) -> tuple[tuple[str, int], ...]:
    """Return the places that are chosen of a capture: (site, layer), all layers of the first site first."""
    request = choice.plan(manifest.capture_id).request
    sites = [SITE_NAMES[site] for site in request.sites] or manifest.sites
    layers = [layer for layer in manifest.layers if not request.layers or layer in request.layers]
    return tuple((site, layer) for site in sites for layer in layers)


def count_rows(manifest: Manifest, choice: RowChoice, *, aligned: bool) -> int:
    """Return how many rows `stream_rows` yields of an ended capture; of `stream_aligned`, how many tokens."""
    request = choice.plan(manifest.capture_id).request
    wanted = set(places(manifest, choice))
    count = max(manifest.proto.description.num_sequences, 1)
    return sum(
        _count(manifest, request.positions, sequence, wanted, aligned=aligned)
        for sequence in (request.sequences or range(count))
    )


def look_up(client: CaptureClient, captures: Sequence[str]) -> Iterator[Manifest]:
    """Yield the manifests of captures, in their order; some are fetched at the same time, and few are kept.

    Raises:
        UnknownCapture: One is not there.
    """
    with ThreadPoolExecutor(_LOOK_UPS) as pool:
        for first in range(0, len(captures), _LOOK_UPS):
            yield from pool.map(client.manifest, captures[first : first + _LOOK_UPS])


def check_readable(manifest: Manifest, choice: RowChoice) -> None:
    """Make sure that a capture has the rows that are chosen.

    Raises:
        CaptureNotComplete: It is not complete, and partial ones are not allowed; or it has not ended.
        InvalidRequest: It lacks a layer, a site or a sequence that is named.
    """
    if not manifest.is_complete and not choice.allow_partial:
        raise not_complete(manifest)
    name = manifest.capture_id
    if not manifest.is_final:  # it could go on for ever, and an epoch is to be the same when it is read again
        raise OpenCapture(f"The capture {name} is still being written; take it when it has ended.", manifest)
    request = choice.plan(name).request
    count = max(manifest.proto.description.num_sequences, 1)
    for what, wanted, present in (
        ("layers", request.layers, manifest.layers),
        ("sites", [SITE_NAMES[site] for site in request.sites], manifest.sites),
        ("sequences", request.sequences, range(count)),
    ):
        lacking = [item for item in wanted if item not in present]
        if lacking:
            has = ", ".join(map(str, present))
            raise InvalidRequest(
                f"The capture {name} has no {what} {', '.join(map(str, lacking))}; it has {has}.",
                reason="INVALID_FIELD",
                metadata={"capture_id": name},
            )


def in_turn(makers: Iterable[Callable[[], Iterator[_Item]]], width: int) -> Iterator[_Item]:
    """Yield what some iterators yield, of `width` of them in turn; the next one begins when one has ended."""
    waiting = iter(makers)
    running: deque[Iterator[_Item]] = deque()
    while True:
        while len(running) < width:
            maker = next(waiting, None)
            if maker is None:
                break
            running.append(maker())
        if not running:
            return
        current = running.popleft()
        try:
            item = next(current)
        except StopIteration:
            continue
        running.append(current)
        yield item


def _rows_of(
    client: CaptureClient, capture_id: str, number: int, choice: RowChoice, check: Callable[[Manifest], None]
) -> Iterator[StreamedRows]:
    manifest = client.manifest(capture_id)
    check_readable(manifest, choice)
    check(manifest)
    sequences = choice.sequences
    for sequence in range(max(manifest.proto.description.num_sequences, 1)) if sequences is None else sequences:
        tokens = _tokens(manifest, sequence)
        reading = Reading(choice.plan(capture_id, sequence), keep_values=False, as_float32=False)
        for site, layer, positions, rows in client._follow(reading):  # noqa: SLF001 - `follow` would convert each row
            known = positions < len(tokens)
            token_ids = np.full(len(positions), -1, dtype=np.int64)
            token_ids[known] = tokens[positions[known]]
            yield StreamedRows(number, sequence, site, layer, positions, token_ids, rows)


def _aligned_of(
    client: CaptureClient, numbers: Mapping[str, int], choice: RowChoice, check: Callable[[Manifest], None]
) -> Iterator[StreamedRows]:
    names = list(numbers)
    plan = replace(choice.plan(names[0]), warns_if_empty=False)
    for acts in client._read_many(plan, names, None):  # noqa: SLF001 - one stream, and never more than one capture
        manifest = acts.manifest
        check_readable(manifest, choice)
        check(manifest)
        wanted = places(manifest, choice)
        for sequence in acts.sequences:
            parts = {site: acts.select(sequence=sequence, site=site) for site, _ in wanted}
            yield _aligned(numbers[manifest.capture_id], sequence, wanted, parts)


def _aligned(
    number: int, sequence: int, wanted: Sequence[tuple[str, int]], parts: Mapping[str, Activations]
) -> StreamedRows:
    """Put the rows of one sequence next to each other, those of each token that has them all."""
    present = [part.positions[part.present[part.layers.index(layer)]] for layer, part in _at(wanted, parts)]
    positions = functools.reduce(np.intersect1d, present)
    first = parts[wanted[0][0]]
    rows = np.empty((len(positions), len(wanted), first.width), dtype=first.dtype)
    for place, (layer, part) in enumerate(_at(wanted, parts)):
        rows[:, place] = part.raw(layer)[np.searchsorted(part.positions, positions)]
    token_ids = first.token_ids[np.searchsorted(first.positions, positions)]
    return StreamedRows(number, sequence, "", -1, positions, token_ids, rows)


def _at(wanted: Iterable[tuple[str, int]], parts: Mapping[str, Activations]) -> Iterator[tuple[int, Activations]]:
    return ((layer, parts[site]) for site, layer in wanted)


def _count(
    manifest: Manifest,
    positions: selection_pb2.PositionSelection,
    sequence: int,
    wanted: set[tuple[str, int]],
    *,
    aligned: bool,
) -> int:
    """Return how many rows, or tokens, are chosen of one sequence."""
    sets = [rows for rows in manifest.present if rows.sequence == sequence]
    length = max((last + 1 for rows in sets for _, last in rows.ranges), default=0)
    chosen = wanted_positions(positions, len(manifest.prompt_token_ids), 0, length)
    have = {place: np.zeros(length, dtype=np.bool_) for place in wanted}
    for rows in sets:
        for layer in rows.layers:
            if (rows.site, layer) in have:
                for first, last in rows.ranges:
                    have[rows.site, layer][first : last + 1] = True
    masks = [mask & chosen for mask in have.values()]
    if aligned:
        return int(np.logical_and.reduce(masks).sum())
    return sum(int(mask.sum()) for mask in masks)


def _tokens(manifest: Manifest, sequence: int) -> npt.NDArray[np.int64]:
    outcomes = manifest.sequences
    generated = outcomes[sequence].generated_token_ids if sequence < len(outcomes) else ()
    return np.array(manifest.prompt_token_ids + generated, dtype=np.int64)
