"""The way of rows from a worker's taps to its ring: for each shape of rows, a tap, a pool of blocks and a sink."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from inference_svc.shipping.worker.allotment import least_ring_bytes, reserve_bytes
from inference_svc.shipping.worker.producer import RingProducer
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu.score_copies import CpuScoreCopies
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.encodings.sae_cache import SAECache, WantedSAE
from inference_svc.taps.encodings.sae_encoder import WORKING_BYTES
from inference_svc.taps.encodings.signs import max_sign_bytes
from inference_svc.taps.joining_sink import JoiningSink, WholeRows
from inference_svc.taps.points import AllPoints, TapPoints
from inference_svc.taps.ring_writer import ModelRows
from inference_svc.taps.scores import Scores, open_board
from inference_svc.taps.sink import BlockSink
from inference_svc.taps.steps.runtime import TapRuntime
from residuum.wire.limits import BLOCK_TOKENS, MAX_KEPT_FEATURES, MAX_PROBE_OUTPUTS, MAX_PROJECTION_VECTORS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.taps.encodings.sae_encoder import SAEEncoder
    from inference_svc.taps.joining_sink import Join
    from inference_svc.taps.op import Tap
    from inference_svc.taps.points import RowShape, Site
    from inference_svc.taps.probes import Probe
    from inference_svc.taps.scores import ScoreCopies
    from inference_svc.taps.steps.capturing_ranks import CapturingRanks
    from inference_svc.taps.steps.runtime import RowSink

_STEPS_LEAVING = 1
"""On a GPU, how many of the largest steps may still have all their blocks in the pool while the next step runs. Blocks
of generated tokens may wait for several steps, but a request fills only one in 32 steps."""

_BLOCKS_IN_RING = 8
"""How many blocks of the largest size fit the ring: some are written while others are sent."""

_LARGEST_BLOCK_BYTES = 128 << 20
"""Limit for a block with more than 32 positions. A larger block saves no time, and its rows would arrive later."""

_LARGEST_PART_BYTES = 32 << 20
"""The same for whole rows that are joined of parts, which takes as much device memory once more."""

_PROBE_SECONDS = 30.0


def points_of(first_layer: int, num_layers: int, shapes: Mapping[Site.ValueType, RowShape]) -> AllPoints:
    """Return the points of a stage.

    Args:
        first_layer: The stage's first layer.
        num_layers: Its layers.
        shapes: The shape of a row at each site that has a width of its own and can be captured.
    """
    ordered = sorted(shapes, key=lambda site: (shapes[site], site))
    wide = [
        TapPoints(first_layer, num_layers, tuple(sites), shape.is_divided)
        for shape, sites in groupby(ordered, key=shapes.__getitem__)
    ]
    return AllPoints((TapPoints(first_layer, num_layers), *wide))


@dataclass
class _Rows:
    """The parts of the path for rows of one shape."""

    points: TapPoints
    shape: RowShape
    format: ModelRows
    """Whole rows."""
    units: int
    """Most rows of one captured position."""
    bank: VectorBank
    parts: BlockPool | None = None
    """The pool that the taps fill, if a rank has only a part of each row."""
    pool: BlockPool | None = None
    """The pool of whole rows; None if this rank captures nothing."""
    sink: BlockSink | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pools."""
        return sum(pool.nbytes for pool in (self.parts, self.pool) if pool)

    def runtime(self, tap: Any, join: Join, ranks: CapturingRanks | None, *, scores: bool) -> TapRuntime:
        """Return the runtime that drives a tap; see `TapRuntime`."""
        sink: RowSink | None = self.sink
        if self.parts:
            whole = WholeRows(self.pool, self.sink) if self.pool and self.sink else None
            sink = JoiningSink(self.parts, self.shape, join, whole)
        return TapRuntime(self.points, tap, self.parts or self.pool, sink, ranks, scores=scores)


class CapturePath:
    """The taps, pools and sinks of one rank, and the ring that they share."""

    def __init__(
        self,
        config: Any,
        device: torch.device,
        points: AllPoints,
        shapes: Sequence[RowShape],
        sites: Mapping[Site.ValueType, Sequence[int]],
        bank_rows: int,
        sae_bytes: int = 0,
    ) -> None:
        """Prepare the path; `make_ring` lets it capture.

        Args:
            config: vLLM's `VllmConfig`.
            device: The model's device.
            points: The points of this stage.
            shapes: The shape of a row at each of their groups.
            sites: The sites that requests can capture, and the layers of this stage that have them.
            bank_rows: How many steering vectors can be active.
            sae_bytes: How many bytes the encoders of sparse autoencoders may take; 0: there are none.
        """
        self._sae_bytes = sae_bytes
        self._saes: SAECache | None = None
        self._config = config
        self._device = device
        self._dtype: torch.dtype = config.model_config.dtype
        # A vector has the same row in all banks. Only those of its width hold it.
        self._all = [
            _Rows(
                group,
                shape,
                ModelRows(shape.whole, WIRE_TYPES[self._dtype]),
                sum(len(layers) for site, layers in sites.items() if group.sees(site)),
                VectorBank(bank_rows if group.can_steer else 1, shape.width, device),
            )
            for group, shape in zip(points.groups, shapes, strict=True)
        ]
        for rows in self._all:
            if rows.shape.is_divided:
                rows.parts = self._make_parts(rows)
        self.producer: RingProducer | None = None
        self._scores: torch.Tensor | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools."""
        return sum(rows.nbytes for rows in self._all)

    @property
    def bank_bytes(self) -> int:
        """Bytes of the banks of vectors."""
        return sum(rows.bank.nbytes for rows in self._all)

    @property
    def sink_bytes(self) -> int:
        """Bytes of device memory that the sinks allocate for their lifetime."""
        return sum(sink.nbytes for sink in self._sinks())

    @property
    def sae_bytes(self) -> int:
        """Bytes of the memory for encoders of sparse autoencoders."""
        return self._saes.nbytes if self._saes else 0

    def load_vectors(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Write vectors into rows of the banks of their width; see `VectorBank.load`.

        Raises:
            ValueError: No bank has the width of a vector.
        """
        banks = [group.bank for group in self._all if group.points.can_steer]
        lengths = {bank.row_bytes for bank in banks}
        wrong = [len(values) for _, values in rows if len(values) not in lengths]
        if wrong:
            raise ValueError(f"there is no bank for a vector of {wrong[0]} bytes; there are for {sorted(lengths)}")
        for bank in banks:
            bank.load(rows)

    def make_ring(self, control_path: str, ring_bytes: int, stores: Sequence[str]) -> None:
        """Allocate the pools and the ring, and make the sinks that move rows from one to the other.

        Args:
            control_path: The socket at which shippers get the ring.
            ring_bytes: The least size of the ring.
            stores: The names of the stores.
        """
        reserves = [
            _growth(rows.format, self._dtype) * BLOCK_TOKENS * rows.units * self._row_bytes(rows) for rows in self._all
        ]
        ring_bytes = max(ring_bytes, least_ring_bytes(max(reserves), len(stores)))
        self.producer = RingProducer(control_path, ring_bytes=ring_bytes, stores=stores)
        self.producer.start()
        self._saes = SAECache(self._sae_bytes, self._device) if self._sae_bytes else None
        for rows in self._all:
            if rows.units:
                rows.pool = self._make_pool(rows, ring_bytes, len(stores))
                rows.sink = self._make_sink(rows.pool, rows, self.producer)

    def make_scores(self, board_path: str) -> Scores:
        """Allocate the buffer of scores, which the taps fill from then on, and return what copies it to the board."""
        board = open_board(board_path)
        self._scores = torch.zeros(self._max_rows, MAX_PROBE_OUTPUTS, dtype=torch.float32, device=self._device)
        if self._device.type == "cuda":
            from inference_svc.taps.gpu.score_copies import CudaScoreCopies  # only GPU installations have Triton

            requests = self._config.scheduler_config.max_num_seqs
            copies: ScoreCopies = CudaScoreCopies(self._scores, board, requests)
        else:
            copies = CpuScoreCopies(self._scores, board)
        return Scores(copies, self._all[0].points)

    @property
    def score_bytes(self) -> int:
        """Bytes of the buffer of scores."""
        return 0 if self._scores is None else int(self._scores.nbytes)

    @property
    def _max_rows(self) -> int:
        """Most rows of a step, including padding."""
        sizes = self._config.compilation_config.cudagraph_capture_sizes or [0]
        return int(max(self._config.scheduler_config.max_num_batched_tokens, *sizes, 1))

    def make_taps(self) -> tuple[list[Tap], int]:
        """Return the tap of each shape, and the bytes of their tables."""
        made: list[Any] = []
        for rows in self._all:
            pool = rows.parts or rows.pool
            scores = self._scores if rows is self._all[0] else None
            if self._device.type == "cuda":
                from inference_svc.taps.gpu.tap import CudaTap  # only GPU installations have Triton

                requests = self._config.scheduler_config.max_num_seqs
                made.append(CudaTap(rows.bank, pool, rows.points, self._max_rows, requests, scores))
            else:
                made.append(CpuTap(rows.bank, pool, rows.points, scores))
        return made, sum(tap.nbytes for tap in made)

    def runtimes(self, taps: Sequence[Any], join: Join, ranks: CapturingRanks | None = None) -> list[TapRuntime]:
        """Return the runtime of each shape.

        Args:
            taps: The tap of each shape.
            join: Makes whole rows of the ranks' parts; see `tensor_parallel.join`.
            ranks: Which rank captures a request; None: there is only this one.
        """
        scores = self._scores is not None
        return [rows.runtime(tap, join, ranks, scores=scores) for rows, tap in zip(self._all, taps, strict=True)]

    def room_for_encoding(self) -> torch.Tensor | None:
        """Allocate as much device memory as encoding rows may take later; None if this rank needs none.

        This is for the signs of random projections, and for what each sink needs to compute features.
        """
        stream = self._all[0]
        if stream.sink is None:
            return None
        owners = self._config.parallel_config._api_process_count  # noqa: SLF001 - the API servers of `vllm serve`
        size = max_sign_bytes(stream.format.hidden, owners)
        if self._saes:
            size += len(self._sinks()) * WORKING_BYTES
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def keep_signs(self, projections: Sequence[tuple[int, int, bool]], owner: int) -> list[bool | str]:
        """See `BlockSink.keep_signs`. Only rows as wide as the stream are projected."""
        stream = self._all[0].sink
        return stream.keep_signs(projections, owner) if stream else [True] * len(projections)

    def keep_saes(self, wanted: Sequence[WantedSAE]) -> list[bool | str]:
        """See `SAECache.keep`. A rank that captures nothing needs none."""
        return self._saes.keep(wanted) if self._saes else [True] * len(wanted)

    def sae(self, name: str) -> SAEEncoder | None:
        """Return an encoder of those that the service had this rank keep; None on a rank that captures nothing.

        Raises:
            KeyError: It is not here.
        """
        return self._saes.get(name) if self._saes else None

    def take_probe(self, capture_id: str) -> list[Probe]:
        """Return the blocks of the self-test's capture."""
        found = []
        for sink in self._sinks():
            sink.flush(_PROBE_SECONDS)
            found += sink.take_probe(capture_id)
        return found

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until every sent row is acknowledged, and return whether it is."""
        if self.producer is None:
            return True
        deadline = time.monotonic() + timeout_seconds
        for sink in self._sinks():
            if not sink.flush(max(deadline - time.monotonic(), 0.0)):
                return False
        return self.producer.drain(max(deadline - time.monotonic(), 0.0))

    def _sinks(self) -> list[BlockSink]:
        return [rows.sink for rows in self._all if rows.sink]

    def _row_bytes(self, rows: _Rows) -> int:
        return rows.format.hidden * int(self._dtype.itemsize)

    def _make_parts(self, rows: _Rows) -> BlockPool:
        """Return the pool of a rank's parts. It must have the same size on every rank."""
        scheduler = self._config.scheduler_config
        needed = BlockPool.rows_needed(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, rows.units)
        largest = _LARGEST_PART_BYTES // self._row_bytes(rows)
        return BlockPool(needed, rows.shape.width, self._dtype, self._device, largest, rows.shape.whole)

    def _make_pool(self, rows: _Rows, ring_bytes: int, num_stores: int) -> BlockPool:
        scheduler = self._config.scheduler_config
        reserve = reserve_bytes(ring_bytes, num_stores) // _growth(rows.format, self._dtype)
        largest = min(ring_bytes // _BLOCKS_IN_RING, reserve, _LARGEST_BLOCK_BYTES)
        leaving = _STEPS_LEAVING if self._device.type == "cuda" and not rows.parts else 0
        needed = BlockPool.rows_needed(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, rows.units, leaving)
        return BlockPool(needed, rows.shape.whole, self._dtype, self._device, largest // self._row_bytes(rows))

    def _make_sink(self, pool: BlockPool, rows: _Rows, producer: RingProducer) -> BlockSink:
        if self._device.type == "cuda":
            from inference_svc.taps.gpu.streamed_sink import StreamedSink

            sink: BlockSink = StreamedSink(pool, rows.format, producer, rows.bank, self._saes)
        else:
            sink = BlockSink(pool, rows.format, producer, rows.bank, saes=self._saes)
        sink.check_encodings()
        return sink


def _growth(rows: ModelRows, dtype: torch.dtype) -> int:
    """Return how many times longer an encoding can make rows.

    Each store's reserve must hold an encoded block of the smallest size. Elements can become twice as long. Rows of a
    narrow model that are projected to many vectors or features, and very narrow ones in eight bits, grow more.
    """
    longest = max(4 * MAX_PROJECTION_VECTORS, 8 * MAX_KEPT_FEATURES, 8 + 3 * rows.hidden)
    return max(2, -(-longest // (rows.hidden * int(dtype.itemsize))))
