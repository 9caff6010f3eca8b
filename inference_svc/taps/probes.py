"""The blocks of the self-test: the worker keeps their rows, and no shipper sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture


class Probe(NamedTuple):
    """The rows of one block of the self-test."""

    capture: Capture
    positions: list[int]
    rows: Tensor
    """[units, positions, width], in the model's dtype, with one unit for each site and layer."""


class Probes:
    """Copies of the self-test's blocks, by capture ID."""

    def __init__(self, pool: BlockPool) -> None:
        """Keep nothing yet; `pool` holds the rows of the blocks."""
        self._pool = pool
        self._kept: dict[str, list[Probe]] = {}

    def keep(self, block: Block) -> None:
        """Copy the rows of a block, which may then be given back to the pool."""
        probe = Probe(block.capture, list(block.positions), self._pool.rows(block).clone())
        self._kept.setdefault(block.capture.capture_id, []).append(probe)

    def take(self, capture_id: str) -> list[Probe]:
        """Return the kept blocks of a capture and forget them."""
        return self._kept.pop(capture_id, [])
