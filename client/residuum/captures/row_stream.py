"""Rows of many captures as one stream, some read at the same time. Knows nothing of what they are used for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, OpenCapture
from residuum.protocol.reading import Reading, ReadPlan, not_complete, plan_read
from residuum.values.capture import SITE_NAMES
from residuum.values.manifest import Manifest
from residuum.values.selections import LayersLike, PositionsLike

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


def _tokens(manifest: Manifest, sequence: int) -> npt.NDArray[np.int64]:
    outcomes = manifest.sequences
    generated = outcomes[sequence].generated_token_ids if sequence < len(outcomes) else ()
    return np.array(manifest.prompt_token_ids + generated, dtype=np.int64)
