"""Where full blocks go: into the shared ring, from where shippers take them; or, for the self-test, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inference_svc.taps.plan import SITE
from residuum.v1 import capture_pb2, store_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from inference_svc.shipping.producer import RingProducer
    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture
    from residuum.v1 import tensor_pb2


@dataclass(frozen=True)
class RowFormat:
    """What the rows of this rank are."""

    first_layer: int
    num_layers: int
    """Layers of this pipeline stage."""
    hidden: int
    dtype: tensor_pb2.DataType.ValueType


class BlockSink:
    """Copies blocks out of the pool, as soon as they are sent: for blocks that lie in this process's own memory."""

    def __init__(self, pool: BlockPool, row_format: RowFormat, producer: RingProducer) -> None:
        self._pool = pool
        self._format = row_format
        self._producer = producer
        self._probes: dict[str, list[tuple[list[int], Tensor]]] = {}

    def send(self, blocks: Sequence[Block]) -> None:
        """Move blocks' rows on and give the blocks back to the pool.

        A full ring is handled as the capture asks: WAIT holds up the step, SHED drops the rows and says so.
        """
        for block in blocks:
            layers = self._own_layers(block.capture)
            if block.capture.is_probe:
                self._keep_probe(block, layers)
            elif layers and block.positions:
                slot = self._producer.acquire(block=not block.capture.sheds)
                if slot is None:
                    self._shed(block)
                else:
                    self._copy(block, layers, slot)
                    self._publish(block, layers, slot)
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
        layers = self._own_layers(capture)
        if capture.is_probe or not layers or not positions:
            return
        loss = store_pb2.RowLoss(
            sequence=capture.sequence,
            sites=[SITE],
            layers=layers,
            positions=positions,
            reason=reason,
            detail=detail,
        )
        self._producer.report_loss(capture.capture_id, loss)

    def take_probe(self, capture_id: str) -> list[tuple[list[int], Tensor]]:
        """Return, once, the rows of a self-test's capture: positions and [layers, positions, hidden] for each block."""
        return self._probes.pop(capture_id, [])

    def _keep_probe(self, block: Block, layers: list[int]) -> None:
        rows = self._rows(block, layers).clone()
        self._probes.setdefault(block.capture.capture_id, []).append((list(block.positions), rows))

    def _shed(self, block: Block) -> None:
        self.lose(
            block.capture,
            block.positions,
            capture_pb2.INCOMPLETE_REASON_OVERFLOW,
            "The ring between the engine and the store was full, and the capture's policy is SHED.",
        )

    def _copy(self, block: Block, layers: list[int], slot: int) -> Tensor:
        """Copy a block's rows into a slot; returns the rows, which must live until the copy is done."""
        rows = self._rows(block, layers)
        target = torch.from_numpy(self._producer.slot(slot)[: rows.nbytes])
        target.view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)
        return rows

    def _publish(self, block: Block, layers: list[int], slot: int) -> None:
        self._producer.publish(slot, block.capture.capture_id, self._header(block, layers))

    def _header(self, block: Block, layers: list[int]) -> capture_pb2.ChunkHeader:
        return capture_pb2.ChunkHeader(
            sequence=block.capture.sequence,
            site=SITE,
            layers=layers,
            positions=block.positions,
            dtype=self._format.dtype,
            width=self._format.hidden,
            encoding=capture_pb2.ENCODING_RAW,
        )

    def _rows(self, block: Block, layers: list[int]) -> Tensor:
        memory = self._pool.memory[block.index, :, : len(block.positions)]
        if len(layers) == self._format.num_layers:
            return memory
        return memory[[layer - self._format.first_layer for layer in layers]]

    def _own_layers(self, capture: Capture) -> list[int]:
        first, count = self._format.first_layer, self._format.num_layers
        return [layer for layer in capture.layers if first <= layer < first + count]
