"""Reads the rows of many captures as one stream, several captures at a time. `residuum.torch` uses it."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, OpenCapture
from residuum.protocol.arguments import check_flag
from residuum.protocol.captures.reading import Piece, Reading, ReadPlan, chosen_layers, not_complete, plan_read
from residuum.v1 import selection_pb2
from residuum.values.captures.activations import Activations
from residuum.values.captures.manifest import Manifest
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike
from residuum.values.selections.points import SITE_NAMES
from residuum.wire.rows.encodings import RowFormat
from residuum.wire.selection import wanted_positions

_Item = TypeVar("_Item")

_LOOK_UPS = 16
"""The number of manifests to fetch at the same time."""

_TURN_ROWS = 128
"""The rows that each of several captures yields in turn."""


class Source(Protocol):
    """Where captures are read from: a `Client`, or an `Archive`."""

    def manifest(self, request_id: str, /) -> Manifest:
        """Return the manifest of a capture."""
        ...

    def _follow(self, reading: Reading, /) -> Iterator[Piece]: ...

    def _read_many(
        self, plan: ReadPlan, capture_ids: Sequence[str], timeout: float | None, /
    ) -> Iterator[Activations]: ...


class StreamedRows(NamedTuple):
    """Rows of one layer of one capture, with their origin."""

    capture: int
    """The capture, as an index of the list of captures."""
    sequence: int
    """The sequence."""
    site: str
    """The site."""
    layer: int
    """The layer."""
    positions: npt.NDArray[np.int64]
    """The position of each row; shape [rows]."""
    token_ids: npt.NDArray[np.int64]
    """The token ID at each position, -1 if unknown; shape [rows]."""
    rows: npt.NDArray[Any]
    """The rows in their captured dtype, or decoded; [rows, width]."""


@dataclass(frozen=True)
class RowChoice:
    """Which rows of a capture are read; see `Client.activations`."""

    layers: LayersLike | None
    sites: str | Sequence[str] | None
    sequences: tuple[int, ...] | None
    positions: PositionsLike
    allow_partial: bool

    def __post_init__(self) -> None:
        check_flag("allow_partial", self.allow_partial)

    def plan(self, capture_id: str, sequence: int | None = None) -> ReadPlan:
        """Return the plan to read the chosen rows of a capture, or of one of its sequences."""
        return plan_read(
            capture_id, layers=self.layers, sites=self.sites,
            sequences=self.sequences if sequence is None else sequence, positions=self.positions,
            follow=True, allow_partial=self.allow_partial,
        )  # fmt: skip


def share(count: int, number: int, of: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return the indices of the captures in share `number` of `of` shares, in the order in which to read them.

    A share has every `of`-th of the `count` captures, so each capture is in exactly one. With `shuffle`, the order
    depends only on the seed and the epoch, so all processes compute the same shares without communication.
    """
    order = list(range(count))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - the order is not a secret
    return order[number::of]


def stream_rows(
    client: Source,
    captures: Sequence[str],
    order: Iterable[int],
    choice: RowChoice,
    concurrent_reads: int,
    check: Callable[[Manifest], None],
) -> Iterator[StreamedRows]:
    """Yield each row of the captures once. `concurrent_reads` captures are read at a time, some rows of each in turn.

    Before the first row of a capture, `check` is called with its manifest. It raises if the rows are not wanted.

    Raises:
        CaptureNotComplete: A capture is not complete any more, and partial captures are not allowed.
        InvalidRequest: A capture lacks a chosen layer, site or sequence.
    """

    def reader(number: int) -> Callable[[], Iterator[list[StreamedRows]]]:
        return lambda: turns(_rows_of(client, captures[number], number, choice, check), _TURN_ROWS)

    for turn in in_turn((reader(number) for number in order), concurrent_reads):
        yield from turn


def stream_aligned(
    client: Source,
    captures: Sequence[str],
    order: Sequence[int],
    choice: RowChoice,
    concurrent_reads: int,
    check: Callable[[Manifest], None],
) -> Iterator[StreamedRows]:
    """Yield the rows of captures by token: each token with its rows at all places, [tokens, places, width].

    A place is a site and a layer; `places` gives their order. `site` is "" and `layer` is -1. Tokens that lack a row at
    any place are left out. `concurrent_reads` streams are read at a time, one capture of each in turn, so the chosen
    rows of that many captures are in memory.

    Raises:
        CaptureNotComplete: A capture is not complete any more, and partial captures are not allowed.
        InvalidRequest: A capture lacks a chosen layer, site or sequence.
    """

    def reader(part: Sequence[int]) -> Callable[[], Iterator[StreamedRows]]:
        return lambda: _aligned_of(client, {captures[number]: number for number in part}, choice, check)

    parts = [order[first::concurrent_reads] for first in range(concurrent_reads)]
    return in_turn((reader(part) for part in parts if part), concurrent_reads)


def places(manifest: Manifest, choice: RowChoice) -> tuple[tuple[str, int], ...]:
    """Return the chosen places of a capture as (site, layer): all layers of the first site, then of the next."""
    chosen = chosen_layers(manifest, choice.plan(manifest.capture_id).request)
    return tuple((site, layer) for site, layers in chosen.items() for layer in layers)


def count_rows(manifest: Manifest, choice: RowChoice, *, aligned: bool) -> int:
    """Return how many rows `stream_rows`, or tokens `stream_aligned`, yields of an ended capture."""
    request = choice.plan(manifest.capture_id).request
    wanted = set(places(manifest, choice))
    count = max(manifest.proto.description.num_sequences, 1)
    return sum(
        _count(manifest, request.positions, sequence, wanted, aligned=aligned)
        for sequence in (request.sequences or range(count))
    )


def look_up(client: Source, captures: Sequence[str]) -> Iterator[Manifest]:
    """Yield the manifests of captures in order. Several are fetched at a time, and only these are kept.

    Raises:
        UnknownCapture: A capture does not exist.
    """
    with ThreadPoolExecutor(_LOOK_UPS) as pool:
        for first in range(0, len(captures), _LOOK_UPS):
            yield from pool.map(client.manifest, captures[first : first + _LOOK_UPS])


def check_readable(manifest: Manifest, choice: RowChoice) -> None:
    """Check that a capture has ended and has the chosen layers, sites and sequences.

    Raises:
        CaptureNotComplete: It is open; or it is not complete and partial captures are not allowed.
        InvalidRequest: It lacks a chosen layer, site or sequence.
    """
    if not manifest.is_complete and not choice.allow_partial:
        raise not_complete(manifest)
    name = manifest.capture_id
    if not manifest.is_final:  # its rows may still change, but every epoch must read the same rows
        raise OpenCapture(f"The capture {name} is still being written. Wait until it has ended.", manifest)
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
                f"The capture {name} has no {what} {', '.join(map(str, lacking))}. It has {has}. Choose among these.",
                reason="INVALID_FIELD",
                metadata={"capture_id": name},
            )
    chosen_layers(manifest, request)


def row_format(manifest: Manifest, choice: RowChoice) -> RowFormat:
    """Return the format of a capture's rows at the chosen sites.

    Raises:
        InvalidRequest: Their rows have different widths.
    """
    sites = sorted({site for site, _ in places(manifest, choice)}, key=manifest.sites.index)
    formats = {site: manifest.format_at(site) for site in sites}
    if len(set(formats.values())) > 1:
        widths = ", ".join(f"{site} {form.width}" for site, form in formats.items())
        raise InvalidRequest(
            f"The rows of {manifest.capture_id} have different numbers of elements: {widths}. Read the sites of one "
            "width at a time; choose them with sites=.",
            reason="INVALID_FIELD",
            metadata={"capture_id": manifest.capture_id},
        )
    return formats[sites[0]]


def in_turn(makers: Iterable[Callable[[], Iterator[_Item]]], width: int) -> Iterator[_Item]:
    """Yield the items of iterators, of `width` of them in turn. When an iterator ends, the next one takes its place."""
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


def turns(pieces: Iterable[StreamedRows], count: int) -> Iterator[list[StreamedRows]]:
    """Cut pieces into turns of `count` rows; the last one may have fewer.

    How many rows a store sends at once depends on its disk, on shared memory, and on whether the rows are in the
    archive. The order of the rows of several captures must not depend on that: an iteration that resumes skips rows by
    their number.
    """
    turn: list[StreamedRows] = []
    room = count
    for piece in pieces:
        start = 0
        while start < len(piece.positions):
            part = slice(start, start + room)
            taken = piece._replace(
                positions=piece.positions[part], token_ids=piece.token_ids[part], rows=piece.rows[part]
            )
            turn.append(taken)
            start, room = start + len(taken.positions), room - len(taken.positions)
            if not room:
                yield turn
                turn, room = [], count
    if turn:
        yield turn


def _rows_of(
    client: Source, capture_id: str, number: int, choice: RowChoice, check: Callable[[Manifest], None]
) -> Iterator[StreamedRows]:
    manifest = client.manifest(capture_id)
    check_readable(manifest, choice)
    check(manifest)
    sequences = choice.sequences
    for sequence in range(max(manifest.proto.description.num_sequences, 1)) if sequences is None else sequences:
        tokens = _tokens(manifest, sequence)
        plan = choice.plan(capture_id, sequence)
        reading = Reading(plan, keep_values=False, as_float32=False, of=manifest.proto)
        for site, layer, positions, rows in client._follow(reading):  # noqa: SLF001 - `follow` would convert each row
            known = positions < len(tokens)
            token_ids = np.full(len(positions), -1, dtype=np.int64)
            token_ids[known] = tokens[positions[known]]
            yield StreamedRows(number, sequence, site, layer, positions, token_ids, rows)


def _aligned_of(
    client: Source, numbers: Mapping[str, int], choice: RowChoice, check: Callable[[Manifest], None]
) -> Iterator[StreamedRows]:
    names = list(numbers)
    plan = choice.plan(names[0])
    for acts in client._read_many(plan, names, None):  # noqa: SLF001 - `activations` would keep all captures in memory
        manifest = acts.manifest
        check_readable(manifest, choice)
        check(manifest)
        row_format(manifest, choice)
        wanted = places(manifest, choice)
        for sequence in acts.sequences:
            parts = {site: acts.select(sequence=sequence, site=site) for site, _ in wanted}
            yield _aligned(numbers[manifest.capture_id], sequence, wanted, parts)


def _aligned(
    number: int, sequence: int, wanted: Sequence[tuple[str, int]], parts: Mapping[str, Activations]
) -> StreamedRows:
    """Return the rows of the tokens of one sequence that have a row at every wanted place."""
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
    """Return the number of chosen rows, or tokens if aligned, of one sequence."""
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
