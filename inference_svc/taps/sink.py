"""Where full blocks go: into the shared ring, from where shippers take them; or, for the self-test, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from residuum.v1 import capture_pb2, store_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from inference_svc.shipping.producer import RingProducer
    from inference_svc.shipping.ring import Extent
    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture
    from residuum.v1 import tensor_pb2


@dataclass(frozen=True)
class RowFormat:
    """What a captured row is."""

    hidden: int
    """Elements."""
    dtype: tensor_pb2.DataType.ValueType


class Probe(NamedTuple):
    """A block that was kept for the self-test."""

    capture: Capture
    positions: list[int]
    rows: Tensor
    """[sites, layers, positions, hidden]."""


class BlockSink:
    """Copies blocks out of the pool, as soon as they are sent: for blocks that lie in this process's own memory."""

    def __init__(self, pool: BlockPool, row_format: RowFormat, producer: RingProducer) -> None:
        self._pool = pool
        self._format = row_format
        self._producer = producer
        self._probes: dict[str, list[Probe]] = {}

    def send(self, blocks: Sequence[Block]) -> None:
        """Move blocks' rows on and give the blocks back to the pool.

        A full ring is handled as the capture asks: WAIT holds up the step, SHED drops the rows and says so.
        """
        for block in blocks:
            if block.capture.is_probe:
                self._keep_probe(block)
            elif block.positions:
                rows = self._pool.rows(block)
                extent = self._producer.acquire(rows.nbytes, not block.capture.sheds, block.capture.capture_id)
                if extent is None:
                    self._shed(block)
                else:
                    self._copy(rows, extent)
                    self._publish(block, extent)
            self._pool.give_back(block)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every block that was sent has left the pool; tell whether it has. Here they leave at once."""
        del timeout_seconds
        return True

    def lose(
        self,
        capture: Capture,
        positions: Sequence[int],
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
    ) -> None:
        """Report rows of a capture that will never come."""
        if capture.is_probe or not positions:
            return
        loss = store_pb2.RowLoss(
            sequence=capture.sequence,
            sites=capture.sites,
            layers=capture.layers,
            positions=positions,
            reason=reason,
            detail=detail,
        )
        self._producer.report_loss(capture.capture_id, loss)

    def take_probe(self, capture_id: str) -> list[Probe]:
        """Return, once, the blocks of a self-test's capture."""
        return self._probes.pop(capture_id, [])

    def _keep_probe(self, block: Block) -> None:
        capture = block.capture
        rows = self._pool.rows(block).clone().unflatten(0, (len(capture.sites), len(capture.layers)))
        self._probes.setdefault(capture.capture_id, []).append(Probe(capture, list(block.positions), rows))

    def _shed(self, block: Block) -> None:
        self.lose(
            block.capture,
            block.positions,
            capture_pb2.INCOMPLETE_REASON_OVERFLOW,
            "The ring had no more room for what goes to its store, and the capture's policy is SHED.",
        )

    def _copy(self, rows: Tensor, extent: Extent) -> None:
        """Copy a block's rows, [units, positions, hidden], into the ring."""
        target = torch.from_numpy(self._producer.view(extent))
        target.view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)

    def _publish(self, block: Block, extent: Extent) -> None:
        capture = block.capture
        headers = [
            capture_pb2.ChunkHeader(
                sequence=capture.sequence,
                site=site,
                layers=capture.layers,
                positions=block.positions,
                dtype=self._format.dtype,
                width=self._format.hidden,
                encoding=capture_pb2.ENCODING_RAW,
            )
            for site in capture.sites
        ]
        self._producer.publish(extent, capture.capture_id, headers)
