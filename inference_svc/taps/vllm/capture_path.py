"""The way of rows from a worker's taps to its ring: for each width of rows, a tap, a pool of blocks and a sink."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from inference_svc.shipping.worker.allotment import least_ring_bytes, reserve_bytes
from inference_svc.shipping.worker.producer import RingProducer
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.encodings.signs import max_sign_bytes
from inference_svc.taps.points import AllPoints, TapPoints
from inference_svc.taps.ring_writer import ModelRows
from inference_svc.taps.sink import BlockSink
from inference_svc.taps.steps.runtime import TapRuntime
from residuum.wire.limits import BLOCK_TOKENS, MAX_PROJECTION_VECTORS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.taps.op import Tap
    from inference_svc.taps.points import Site
    from inference_svc.taps.probes import Probe

_STEPS_LEAVING = 1
"""On a GPU, how many steps' blocks may still be leaving the device while the next step runs."""

_BLOCKS_IN_RING = 8
"""How many blocks of the largest size fit the ring: some are written while others are sent."""

_LARGEST_BLOCK_BYTES = 128 << 20
"""Limit for a block with more than 32 positions. A larger block saves no time, and its rows would arrive later."""

_PROBE_SECONDS = 30.0


def points_of(first_layer: int, num_layers: int, widths: Mapping[Site.ValueType, int]) -> AllPoints:
    """Return the points of a stage.

    Args:
        first_layer: The stage's first layer.
        num_layers: Its layers.
        widths: The elements of a row at each site that has a width of its own and can be captured.
    """
    ordered = sorted(widths, key=lambda site: (widths[site], site))
    wide = [tuple(sites) for _, sites in groupby(ordered, key=widths.__getitem__)]
    return AllPoints((TapPoints(first_layer, num_layers), *(TapPoints(first_layer, num_layers, of) for of in wide)))


class CapturePath:
    """The taps, pools and sinks of one rank, and the ring that they share."""

    def __init__(
        self,
        config: Any,
        device: torch.device,
        points: AllPoints,
        widths: Sequence[int],
        sites: Sequence[Site.ValueType],
        bank_rows: int,
    ) -> None:
        """Prepare the path; `make_ring` lets it capture.

        Args:
            config: vLLM's `VllmConfig`.
            device: The model's device.
            points: The points of this stage.
            widths: The elements of a row at each of their groups.
            sites: The sites that requests can capture.
            bank_rows: How many steering vectors can be active.
        """
        self._config = config
        self._device = device
        self._points = points
        self._dtype: torch.dtype = config.model_config.dtype
        self._rows = [ModelRows(width, WIRE_TYPES[self._dtype]) for width in widths]
        self._units = [sum(group.sees(site) for site in sites) * group.num_layers for group in points.groups]
        # A vector has the same row in all banks. Only those of its width hold it.
        self._banks = [
            VectorBank(bank_rows if group.can_steer else 1, width, device)
            for group, width in zip(points.groups, widths, strict=True)
        ]
        self._pools: list[BlockPool | None] = [None] * len(widths)
        self._sinks: list[BlockSink | None] = [None] * len(widths)
        self.producer: RingProducer | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools."""
        return sum(pool.nbytes for pool in self._pools if pool)

    @property
    def bank_bytes(self) -> int:
        """Bytes of the banks of vectors."""
        return sum(bank.nbytes for bank in self._banks)

    @property
    def sink_bytes(self) -> int:
        """Bytes of device memory that the sinks allocate for their lifetime."""
        return sum(sink.nbytes for sink in self._sinks if sink)

    def load_vectors(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Write vectors into rows of the banks of their width; see `VectorBank.load`.

        Raises:
            ValueError: No bank has the width of a vector.
        """
        lengths = {
            bank.row_bytes for group, bank in zip(self._points.groups, self._banks, strict=True) if group.can_steer
        }
        wrong = [len(values) for _, values in rows if len(values) not in lengths]
        if wrong:
            raise ValueError(f"there is no bank for a vector of {wrong[0]} bytes; there are for {sorted(lengths)}")
        for group, bank in zip(self._points.groups, self._banks, strict=True):
            if group.can_steer:
                bank.load(rows)

    def make_ring(self, control_path: str, ring_bytes: int, stores: Sequence[str]) -> None:
        """Allocate the pools and the ring, and make the sinks that move rows from one to the other.

        Args:
            control_path: The socket at which shippers get the ring.
            ring_bytes: The least size of the ring.
            stores: The names of the stores.
        """
        reserves = [
            _growth(rows, self._dtype) * BLOCK_TOKENS * units * self._row_bytes(rows)
            for rows, units in zip(self._rows, self._units, strict=True)
        ]
        ring_bytes = max(ring_bytes, least_ring_bytes(max(reserves), len(stores)))
        self.producer = RingProducer(control_path, ring_bytes=ring_bytes, stores=stores)
        self.producer.start()
        for index, (rows, units) in enumerate(zip(self._rows, self._units, strict=True)):
            if units:
                pool = self._pools[index] = self._make_pool(rows, units, ring_bytes, len(stores))
                self._sinks[index] = self._make_sink(pool, rows, self.producer, self._banks[index])

    def make_taps(self) -> tuple[list[Tap], int]:
        """Return the tap of each width, and the bytes of their tables."""
        made: list[Any] = []
        for group, bank, pool in zip(self._points.groups, self._banks, self._pools, strict=True):
            if self._device.type == "cuda":
                from inference_svc.taps.gpu.tap import CudaTap  # only GPU installations have Triton

                sizes = self._config.compilation_config.cudagraph_capture_sizes or [0]
                scheduler = self._config.scheduler_config
                max_rows = max(scheduler.max_num_batched_tokens, *sizes, 1)
                made.append(CudaTap(bank, pool, group, max_rows, scheduler.max_num_seqs))
            else:
                made.append(CpuTap(bank, pool, group))
        return made, sum(tap.nbytes for tap in made)

    def runtimes(self, taps: Sequence[Any]) -> list[TapRuntime]:
        """Return the runtime of each width."""
        parts = zip(self._points.groups, taps, self._pools, self._sinks, strict=True)
        return [TapRuntime(group, tap, pool, sink) for group, tap, pool, sink in parts]

    def room_for_signs(self) -> torch.Tensor | None:
        """Allocate as much device memory as the signs of random projections may take; None if this rank needs none."""
        if self._sinks[0] is None:
            return None
        return torch.empty(max_sign_bytes(self._rows[0].hidden), dtype=torch.uint8, device=self._device)

    def keep_signs(self, projections: Sequence[tuple[int, int, bool]]) -> list[bool | str]:
        """See `BlockSink.keep_signs`. Only rows as wide as the stream are projected."""
        stream = self._sinks[0]
        return stream.keep_signs(projections) if stream else [True] * len(projections)

    def take_probe(self, capture_id: str) -> list[Probe]:
        """Return the blocks of the self-test's capture."""
        found = []
        for sink in self._sinks:
            if sink is not None:
                sink.flush(_PROBE_SECONDS)
                found += sink.take_probe(capture_id)
        return found

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until every sent row is acknowledged, and return whether it is."""
        if self.producer is None:
            return True
        deadline = time.monotonic() + timeout_seconds
        for sink in self._sinks:
            if sink is not None and not sink.flush(max(deadline - time.monotonic(), 0.0)):
                return False
        return self.producer.drain(max(deadline - time.monotonic(), 0.0))

    def _row_bytes(self, rows: ModelRows) -> int:
        return rows.hidden * int(self._dtype.itemsize)

    def _make_pool(self, rows: ModelRows, units: int, ring_bytes: int, num_stores: int) -> BlockPool:
        scheduler = self._config.scheduler_config
        reserve = reserve_bytes(ring_bytes, num_stores) // _growth(rows, self._dtype)
        largest = min(ring_bytes // _BLOCKS_IN_RING, reserve, _LARGEST_BLOCK_BYTES)
        leaving = _STEPS_LEAVING if self._device.type == "cuda" else 0
        needed = BlockPool.rows_needed(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, units, leaving)
        return BlockPool(needed, rows.hidden, self._dtype, self._device, largest // self._row_bytes(rows))

    def _make_sink(self, pool: BlockPool, rows: ModelRows, producer: RingProducer, bank: VectorBank) -> BlockSink:
        if self._device.type == "cuda":
            from inference_svc.taps.gpu.streamed_sink import StreamedSink

            sink: BlockSink = StreamedSink(pool, rows, producer, bank)
        else:
            sink = BlockSink(pool, rows, producer, bank)
        sink.check_encodings()
        return sink


def _growth(rows: ModelRows, dtype: torch.dtype) -> int:
    """Return how many times longer an encoding can make rows.

    Each store's reserve must hold an encoded block of the smallest size. Elements can become twice as long. Rows of a
    narrow model that are projected to many vectors, and very narrow ones in eight bits, grow more.
    """
    longest = max(4 * MAX_PROJECTION_VECTORS, 8 + 3 * rows.hidden)
    return max(2, -(-longest // (rows.hidden * int(dtype.itemsize))))
