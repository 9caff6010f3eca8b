"""Reads a capture: builds the request, collects the rows and checks them. No I/O: both clients use it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from residuum import exceptions as exc
from residuum.protocol.arguments import check_flag
from residuum.protocol.caller import warn_caller
from residuum.protocol.captures.rows import Allocate, RowGrid, Wanted, partial_block, whole_block
from residuum.protocol.requests import RequestLike, check_capture_id
from residuum.v1 import capture_pb2, store_pb2
from residuum.values.captures.activations import Activations
from residuum.values.captures.blocks import AnyBlock
from residuum.values.captures.manifest import Manifest
from residuum.values.selections.layers_and_positions import (
    LayersLike,
    Positions,
    PositionsLike,
    index_list,
    layer_selection,
)
from residuum.values.selections.points import SITE_NAMES, site_numbers
from residuum.wire.limits import MAX_SEQUENCES
from residuum.wire.rows.encodings import RowFormat
from residuum.wire.rows.frames import ChunkView, FrameError, parse_read
from residuum.wire.rows.shared_memory import Payloads
from residuum.wire.selection import expected_rows

_Key = tuple[int, str]
"""A sequence and a site."""

_LARGE_BLOCK_BYTES = 31 << 20
"""A block of this size changes glibc's mmap threshold when it is freed. glibc ignores blocks above 32 MiB."""


class Piece(NamedTuple):
    """Rows of one layer, as they arrive while the model generates."""

    site: str
    """The site."""
    layer: int
    """The layer."""
    positions: npt.NDArray[np.int64]
    """Their positions; shape [positions]."""
    rows: npt.NDArray[np.float32]
    """The rows, decoded; float32 [positions, width]. See `Activations.width`."""


@dataclass(frozen=True)
class ReadPlan:
    """What to read of a capture."""

    request: store_pb2.ReadChunksRequest
    """The request message."""
    allow_partial: bool
    """Return partial captures too."""

    def of(self, capture_id: str) -> ReadPlan:
        """Return the same read of another capture."""
        request = store_pb2.ReadChunksRequest()
        request.CopyFrom(self.request)
        request.capture_id = capture_id
        return replace(self, request=request)


def plan_read(
    request_id: RequestLike,
    *,
    layers: LayersLike | None,
    sites: str | Sequence[str] | None,
    sequences: int | Iterable[int] | None,
    positions: PositionsLike,
    follow: bool,
    allow_partial: bool,
) -> ReadPlan:
    """Return the plan of a read.

    Raises:
        InvalidRequest: An argument is invalid; the message says what to change.
        TypeError: An argument has the wrong type.
    """
    waits = check_flag("wait", follow)
    if waits and not isinstance(follow, (bool, np.bool_)):
        raise TypeError(f"wait must be True or False, not {follow}. For at most so many seconds, use timeout=.")
    request = store_pb2.ReadChunksRequest(capture_id=check_capture_id(request_id), follow=waits)
    if layers is not None:
        request.layers.extend(layer_selection(layers).list.layers)  # empty for "all"
    if sites is not None and sites != "all":
        request.sites.extend(site_numbers(sites))
    if sequences is not None:
        numbers = index_list("sequence", sequences)
        if wrong := [number for number in numbers if not 0 <= number < MAX_SEQUENCES]:
            raise exc.InvalidRequest(
                f"The sequence {wrong[0]} does not exist: sequences are numbered from 0 to {MAX_SEQUENCES - 1}.",
                reason="INVALID_FIELD",
            )
        request.sequences.extend(numbers)
    chosen = Positions.of(positions)
    if chosen != Positions():
        request.positions.CopyFrom(chosen.to_proto())
    return ReadPlan(request, check_flag("allow_partial", allow_partial))


class SharedPayloads(Payloads, Protocol):
    """The shared memory of a read."""

    @property
    def key(self) -> bytes:
        """Names the memory in requests."""
        ...


class Reading:
    """The state of one read. After a broken connection, the request may be sent again: rows that arrived are kept."""

    def __init__(
        self,
        plan: ReadPlan,
        *,
        keep_values: bool = True,
        as_float32: bool = True,
        allocate: Allocate = np.empty,
        of: capture_pb2.CaptureManifest | None = None,
    ) -> None:
        """Start with nothing read.

        Args:
            plan: What to read.
            keep_values: Keep the rows for `activations`. Otherwise `add` returns them as pieces and keeps none.
            as_float32: Convert the rows of pieces to float32. Otherwise they have the captured or decoded dtype, and
                rows of plain encodings are views of the message. Rows in shared memory are copied.
            allocate: Makes the arrays for rows; by default in memory.
            of: A manifest that the caller has of the capture. Rows of another capture with the same ID are refused.
        """
        _keep_freed_buffers()
        self._plan = plan
        self._keep_values = keep_values
        self._as_float32 = as_float32
        self._allocate = allocate
        self._grids: dict[_Key, RowGrid] = {}
        self._layers: dict[str, tuple[int, ...]] = {}
        self._manifest: capture_pb2.CaptureManifest | None = None
        self._identity = None if of is None else _identity(of)
        self._first: Manifest | None = None
        self._manifests_seen = 0
        self._memory: SharedPayloads | None = None
        self._new_bytes = 0

    @property
    def request(self) -> store_pb2.ReadChunksRequest:
        """The request message."""
        return self._plan.request

    @property
    def is_at_start(self) -> bool:
        """Whether no message has arrived."""
        return self._manifest is None

    @property
    def is_empty(self) -> bool:
        """Whether no wanted row has arrived."""
        return not any(grid.have.any() for grid in self._grids.values())

    def begin(self, memory: SharedPayloads | None = None) -> None:
        """Note that a new call starts, for the first time or after a broken connection.

        Args:
            memory: The shared memory for large payloads.
        """
        self._manifests_seen = 0
        self._memory = memory
        self._plan.request.shared_memory_key = b"" if memory is None else memory.key

    def take_bytes(self) -> int:
        """Return the bytes that came since the last call, in messages and in shared memory."""
        count, self._new_bytes = self._new_bytes, 0
        return count

    def add(self, data: bytes) -> list[Piece]:
        """Add one message of the stream.

        Returns:
            The rows that are new, one piece for each layer; nothing with `keep_values`.

        Raises:
            DamagedCapture: The message or its rows are damaged.
            ServerFault: The message is out of order, or its rows do not match the capture.
            UnknownCapture: The capture was replaced by another one since the first message.
        """
        try:
            message = parse_read(data, self._memory)
        except FrameError as error:
            raise exc.DamagedCapture(f"The store sent a damaged message: {error}.", metadata=self._facts()) from None
        self._new_bytes += len(data)
        if isinstance(message, ChunkView):
            return self.add_chunk(message)
        if isinstance(message, list):
            self._new_bytes += sum(len(chunk.payload) for chunk in message)
            return [piece for chunk in message for piece in self.add_chunk(chunk)]
        self.add_manifest(message)
        return []

    def manifest(self) -> Manifest:
        """Return the last manifest after a stream ended without an error. Check that all rows arrived.

        Raises:
            OpenCapture: The capture is still being written, and partial captures are not allowed.
            IncompleteCapture: Rows are missing, and partial captures are not allowed.
            AbortedCapture: The request was aborted, and partial captures are not allowed.
            DamagedCapture: Rows that the manifest lists did not arrive.
            ServerFault: The stream ended without its last manifest.
        """
        if self._manifest is None or self._manifests_seen < 2:  # noqa: PLR2004 - the first and the last message
            raise exc.ServerFault("The store ended the read without its closing manifest.", metadata=self._facts())
        manifest = self._first if self._first and self._first.proto is self._manifest else None
        manifest = manifest or Manifest.from_proto(self._manifest)
        if not manifest.is_complete and not self._plan.allow_partial:
            raise not_complete(manifest)
        self._check_arrived(manifest)
        return manifest

    def activations(self) -> Activations:
        """Return the rows as activations. The errors are those of `manifest`."""
        manifest = self.manifest()
        blocks = {key: self._block(key, grid, manifest) for key, grid in self._grids.items()}
        return Activations(manifest, self._layers, blocks)

    def explain(self, failure: exc.ResiduumError) -> exc.ResiduumError:
        """Return the exception for a read that failed. For a timeout, it says whether the capture is still open."""
        is_open = self._manifest is not None and self._manifest.state == capture_pb2.CAPTURE_STATE_OPEN
        if not isinstance(failure, exc.DeadlineExceeded) or not is_open:
            return failure
        return exc.DeadlineExceeded(
            f"The capture {self.request.capture_id} is still open: its request is running, or its last rows are on "
            "their way. Give a longer timeout, or none with timeout=None. To read the rows that have arrived, use "
            "wait=False, allow_partial=True.",
            reason=failure.reason,
            metadata=failure.metadata,
        )

    def _facts(self) -> dict[str, str]:
        return {"capture_id": self.request.capture_id}

    def end(self) -> None:
        """Note the end of the capture, for streams that mark it without a second manifest."""
        self._manifests_seen = 2 if self._manifests_seen else 0

    def add_manifest(self, manifest: capture_pb2.CaptureManifest) -> None:
        """Add a manifest: the one before the first row, or the one after the last row.

        Raises:
            UnknownCapture: It is of another capture than the one before: that one was replaced.
        """
        identity = _identity(manifest)
        if self._identity not in (None, identity):
            raise exc.UnknownCapture(
                f"The capture {self.request.capture_id} was replaced while it was read: another one has its ID now. "
                "Read it again.",
                reason="UNKNOWN_CAPTURE",
                metadata=self._facts(),
            )
        self._identity = identity
        self._manifests_seen += 1
        if manifest != self._manifest:  # that of an ended capture comes twice
            self._manifest = manifest
        if not self._grids:
            self._grids = self._make_grids(manifest)

    def _make_grids(self, manifest: capture_pb2.CaptureManifest) -> dict[_Key, RowGrid]:
        view = self._first = Manifest.from_proto(manifest)
        self._layers = chosen_layers(view, self.request)
        wanted = {
            site: Wanted(
                layers=layers,
                spec=manifest.description.spec,
                positions=self.request.positions,
                prompt_tokens=len(view.prompt_token_ids),
                form=_row_format(view, site),
                max_generated=manifest.description.max_generated_tokens,
            )
            for site, layers in self._layers.items()
        }
        sequences = list(self.request.sequences) or range(max(manifest.description.num_sequences, 1))
        return {
            (sequence, site): RowGrid(
                wanted[site], _length(view, sequence), keep_values=self._keep_values, allocate=self._allocate
            )
            for sequence in sequences
            for site in wanted
        }

    def add_chunk(self, chunk: ChunkView) -> list[Piece]:
        """Add a chunk; see `add`."""
        if not self._manifests_seen:
            raise exc.ServerFault("The store sent rows before the manifest.", metadata=self._facts())
        if not chunk.verify():
            raise exc.DamagedCapture(
                "Rows do not match their checksum: they were damaged in the store or on the network. Read the capture "
                "again. If the error remains, the stored rows are lost.",
                reason="CHECKSUM_MISMATCH",
                metadata=self._facts(),
            )
        site = SITE_NAMES.get(chunk.header.site, "")
        grid = self._grids.get((chunk.header.sequence, site))
        added = grid.add(chunk) if grid is not None else None
        if added is None or self._keep_values:
            return []
        return [
            self._piece(
                site, self._layers[site][layer], added.positions, rows.copy() if chunk.is_placed else rows, fresh
            )
            for layer, rows, fresh in zip(added.layers, added.rows, added.fresh, strict=True)
            if fresh.any()
        ]

    def _piece(
        self,
        site: str,
        layer: int,
        positions: npt.NDArray[np.int64],
        rows: npt.NDArray[Any],
        fresh: npt.NDArray[np.bool_],
    ) -> Piece:
        if not fresh.all():  # only after a broken connection
            positions, rows = positions[fresh], rows[fresh]
        return Piece(site, layer, positions, rows.astype(np.float32) if self._as_float32 else rows)

    def _check_arrived(self, manifest: Manifest) -> None:
        """Check that every row arrived that the manifest lists."""
        for key, grid in self._grids.items():
            if manifest.is_complete:
                _, columns = grid.columns(_length(manifest, key[0]) or 0)
                arrived = bool(grid.have[:, columns].all())
            elif manifest.is_final:
                present = _present(key, grid, manifest)
                arrived = not (present & ~grid.have).any()
            else:
                arrived = True  # the manifest of an open capture may list rows that were written after the read
            if not arrived:
                raise exc.DamagedCapture(
                    f"The store says that the capture {manifest.capture_id} is {manifest.state}, but did not send all "
                    f"of its rows of sequence {key[0]}, {key[1]}. Read it again.",
                    metadata=self._facts(),
                )

    def _block(self, key: _Key, grid: RowGrid, manifest: Manifest) -> AnyBlock:
        block = whole_block(grid, _length(manifest, key[0]) or 0) if manifest.is_complete else None
        if block is not None:
            return block
        present = _present(key, grid, manifest) if manifest.is_final else grid.have
        return partial_block(grid, present & grid.have)


def chosen_layers(manifest: Manifest, request: store_pb2.ReadChunksRequest) -> dict[str, tuple[int, ...]]:
    """Return the layers that a request chooses at each site. A site without any of them is left out.

    Raises:
        InvalidRequest: The request names a site, and the capture has none of the chosen layers there.
    """
    asked = set(request.layers)
    named = [SITE_NAMES[site] for site in request.sites]
    chosen: dict[str, tuple[int, ...]] = {}
    for site in named or manifest.sites:
        layers = manifest.layers_at(site)
        kept = tuple(layer for layer in layers if layer in asked) if asked else layers
        if kept:
            chosen[site] = kept
        elif named:
            raise exc.InvalidRequest(
                f"The capture {manifest.capture_id} has none of the layers {sorted(asked)} at {site}; there it has "
                f"{list(layers)}. Choose among these, or leave out the site.",
                reason="INVALID_FIELD",
                metadata={"capture_id": manifest.capture_id},
            )
    return chosen


@functools.cache
def _keep_freed_buffers() -> None:
    """Free one large block, once per process, so that glibc reuses the memory of message buffers.

    Freeing the block raises glibc's mmap threshold to its size, and glibc keeps the memory of smaller blocks. Otherwise
    the kernel maps and zeroes new pages for almost every message, which takes a third of the time of a read.
    """
    np.empty(_LARGE_BLOCK_BYTES, dtype=np.uint8)


def warn_if_empty(acts: Activations) -> None:
    """Warn if a capture has none of the selected positions.

    Call this where the user's call returns, not in a thread or task of the read: a warning names the caller's line.
    """
    manifest = acts.manifest
    empty = [
        sequence
        for sequence in sorted(acts.sequences)
        if not all(len(acts.select(sequence=sequence, site=site).positions) for site in acts.sites)
    ]
    if not empty:
        return
    which = f" of sequence {', '.join(map(str, empty))}" if len(manifest.sequences) > 1 else ""
    rows = [_length(manifest, sequence) for sequence in empty]
    until = f" Its positions are 0 to {rows[0] - 1}." if len(rows) == 1 and rows[0] else ""
    warn_caller(
        f"The capture {manifest.capture_id} has none of the selected positions{which}, so the result has 0 positions."
        f"{until} The prompt has {len(manifest.prompt_token_ids)} tokens, and the last generated token has no row.",
        exc.EmptyCaptureWarning,
    )


def not_complete(manifest: Manifest) -> exc.CaptureNotComplete:
    """Return the exception for a capture that is not complete."""
    name = f"The capture {manifest.capture_id}"
    rest = "To read the rows that it has, use allow_partial=True."
    if manifest.state == "open":
        return exc.OpenCapture(f"{name} is still being written. Wait for it, or follow() it. {rest}", manifest)
    missing = manifest.describe_missing()
    if manifest.state == "aborted":
        lost = f" Missing: {missing}." if manifest.missing else ""
        return exc.AbortedCapture(f"{name} was aborted: its request was stopped before its end.{lost} {rest}", manifest)
    why = ": ".join(part for part in (manifest.reason, manifest.detail) if part) or "no reason given"
    kind = exc.StoreFullCapture if manifest.reason == "STORE_FULL" else exc.IncompleteCapture
    return kind(f"{name} is incomplete ({why}). Missing: {missing}. {rest}", manifest, reason=manifest.reason)


def _identity(manifest: capture_pb2.CaptureManifest) -> tuple[int, int]:
    """Return what differs between two captures that have had the same ID."""
    return manifest.open_time.ToNanoseconds(), manifest.description.attempt


def _row_format(manifest: Manifest, site: str) -> RowFormat:
    try:
        return manifest.format_at(site)
    except ValueError as error:
        raise exc.ServerFault(
            f"The rows of the capture {manifest.capture_id} cannot be decoded: {error}. A newer version of residuum "
            "may be able to decode them. Upgrade the client.",
            metadata={"capture_id": manifest.capture_id},
        ) from None


def _length(manifest: Manifest, sequence: int) -> int | None:
    """Return the number of positions of a sequence that have rows; None while it is unknown."""
    if not manifest.is_complete or sequence >= len(manifest.sequences):
        return None
    generated = len(manifest.sequences[sequence].generated_token_ids)
    return expected_rows(len(manifest.prompt_token_ids), generated)


def _present(key: _Key, grid: RowGrid, manifest: Manifest) -> npt.NDArray[np.bool_]:
    """Return which of the grid's rows are in the store, according to the manifest."""
    sets = [rows for rows in manifest.present if (rows.sequence, rows.site) == key]
    return grid.mark([(rows.layers, rows.ranges) for rows in sets])
