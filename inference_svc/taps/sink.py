"""Where full blocks go: into the shared ring, from where shippers take them; or, for the self-test, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inference_svc.taps.cpu import encoder
from inference_svc.taps.element_types import own_type
from inference_svc.taps.encodings.check import check_encodings
from inference_svc.taps.encodings.signs import SignCache, Signs
from inference_svc.taps.reductions import Batch, Reduction
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.encodings import RANDOM_PROJECTIONS
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.shipping.ring import Extent
    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture, RequestPlan
    from residuum.v1 import tensor_pb2
    from residuum.wire.encodings import RowFormat as EncodedFormat

_log = get_logger(__name__)


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


class _Followed(NamedTuple):
    """What is kept of a capture from its request's begin to its end."""

    capture: Capture
    basis: Tensor | None
    """What its rows are multiplied with: vectors, float32 [vectors, hidden], or signs, [hidden, dimensions]."""
    reduction: Reduction | None
    problem: str = ""
    """Why nothing can be sent of it, if nothing can."""


class BlockSink:
    """Encodes blocks into the ring, as soon as they are sent: for blocks that lie in this process's own memory."""

    def __init__(
        self, pool: BlockPool, row_format: RowFormat, producer: RingProducer, bank: VectorBank | None = None
    ) -> None:
        """Make the sink of a pool; without a bank, nothing can be projected to vectors."""
        self._pool = pool
        self._format = row_format
        self._producer = producer
        self._bank = bank
        self._probes: dict[str, list[Probe]] = {}
        self._signs = SignCache(row_format.hidden, pool.memory.device)
        # By the very object: another request may come by the same name before the last blocks of this one have left.
        self._followed: dict[int, _Followed] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what it has allotted on the device for good."""
        return 0

    def check_encodings(self) -> None:
        """Encode rows in every way and compare with the reference; before anything is sent.

        Raises:
            CannotEncodeError: They are not what they should be.
        """
        memory = self._pool.memory
        check_encodings(memory.shape[1], memory.dtype, memory.device, self._signs, self._encoded)

    def begin(self, plan: RequestPlan) -> None:
        """Prepare for the blocks of a request whose capture is followed; they come until `end`."""
        capture = plan.capture
        assert capture is not None  # noqa: S101 - it is followed
        try:
            reduction = Reduction(plan) if capture.is_reduced else None
            followed = _Followed(capture, self._basis(capture), reduction)
        except (MemoryError, RuntimeError) as error:  # torch's, of a device without memory for example
            _log.exception("a capture cannot be made", request_id=capture.capture_id)
            problem = f"The worker could not prepare for this capture ({type(error).__name__}); its log says why."
            followed = _Followed(capture, None, None, problem)
        self._followed[id(capture)] = followed

    def keep_signs(self, projections: Sequence[tuple[int, int, bool]]) -> list[bool | str]:
        """Have the signs of projections at hand, made beside the steps; see `SignCache.keep`.

        Args:
            projections: Of each its seed, its dimensions, and whether the rows that it projects are computed.
        """
        return self._signs.keep(
            [Signs(seed, size, self._signs_type(computed=computed)) for seed, size, computed in projections]
        )

    def send(self, blocks: Sequence[Block]) -> None:
        """Move blocks' rows on and give the blocks back to the pool.

        A full ring is handled as the capture asks: WAIT holds up the step, SHED drops the rows and says so.
        """
        for block in blocks:
            if block.capture.is_probe:
                self._keep_probe(block)
            elif block.positions:
                batch = self._batch_of(block)
                if batch is not None:
                    self._ship(batch)
            self._pool.give_back(block)

    def end(self, capture: Capture) -> None:
        """Send what is still to come of a capture that is followed, and whose last block was sent; forget it."""
        last = self._last_batch(capture)
        if last is not None:
            self._ship(last)
        self._forget(capture)

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
        reduction = self._reduction(capture)
        if reduction is not None:
            reduction.miss(positions)
        self._report_loss(capture, positions, reason, detail)

    def take_probe(self, capture_id: str) -> list[Probe]:
        """Return, once, the blocks of a self-test's capture."""
        return self._probes.pop(capture_id, [])

    def _report_loss(
        self,
        capture: Capture,
        positions: Sequence[int],
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
    ) -> None:
        loss = store_pb2.RowLoss(
            sequence=capture.sequence,
            sites=capture.sites,
            layers=capture.layers,
            positions=positions,
            reason=reason,
            detail=detail,
        )
        self._producer.report_loss(capture.capture_id, loss)

    def _keep_probe(self, block: Block) -> None:
        capture = block.capture
        rows = self._pool.rows(block).clone().unflatten(0, (len(capture.sites), len(capture.layers)))
        self._probes.setdefault(capture.capture_id, []).append(Probe(capture, list(block.positions), rows))

    def _batch_of(self, block: Block) -> Batch | None:
        """Return what is to be sent now that a block has come."""
        followed = self._followed.get(id(block.capture))
        if followed is not None and followed.problem:
            self.lose(block.capture, block.positions, capture_pb2.INCOMPLETE_REASON_WRITE_FAILED, followed.problem)
            return None
        batch = Batch(block.capture, block.positions, self._pool.rows(block))
        reduction = self._reduction(block.capture)
        return batch if reduction is None else self._told(reduction.add(batch), reduction)

    def _last_batch(self, capture: Capture) -> Batch | None:
        reduction = self._reduction(capture)
        return None if reduction is None else self._told(reduction.finish(), reduction)

    def _told(self, batch: Batch | None, reduction: Reduction) -> Batch | None:
        """Return reduced rows; if some that they stand for never came, say that they are lost instead."""
        if batch is None or reduction.is_whole(batch):
            return batch
        detail = "Rows that this one stands for were lost."
        self._report_loss(batch.capture, batch.positions, capture_pb2.INCOMPLETE_REASON_WRITE_FAILED, detail)
        return None

    def _reduction(self, capture: Capture) -> Reduction | None:
        return self._followed[id(capture)].reduction if capture.is_reduced else None

    def _forget(self, capture: Capture) -> None:
        del self._followed[id(capture)]

    def _ship(self, batch: Batch) -> None:
        extent = self._producer.acquire(self._nbytes(batch), not batch.capture.sheds, batch.capture.capture_id)
        if extent is None:
            self._shed(batch)
        else:
            self._encode(batch, extent)
            self._publish(batch, extent)

    def _shed(self, batch: Batch) -> None:
        self._report_loss(
            batch.capture,
            batch.positions,
            capture_pb2.INCOMPLETE_REASON_OVERFLOW,
            "The ring had no more room for what goes to its store, and the capture's policy is SHED.",
        )

    def _form(self, capture: Capture) -> EncodedFormat:
        return capture.encoding.format_of(self._format.hidden, self._format.dtype)

    def _nbytes(self, batch: Batch) -> int:
        return self._form(batch.capture).payload_bytes(batch.capture.units, len(batch.positions))

    def _rows_and_basis(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return rows in the type that they are encoded from, and what they are multiplied with, if they are."""
        encoding, form, rows = batch.capture.encoding, self._form(batch.capture), batch.rows
        if encoding.encoding in (capture_pb2.ENCODING_RAW, capture_pb2.ENCODING_TOPK):
            return rows.to(own_type(form)), None
        return rows, self._followed[id(batch.capture)].basis if encoding.has_basis else None

    def _basis(self, capture: Capture) -> Tensor | None:
        """Return what a capture's rows are multiplied with, to be held until its last block has left.

        The request has ended by then, and the bank's rows may be others', and its signs dropped.
        """
        encoding = capture.encoding
        if encoding.rows:
            assert self._bank is not None  # noqa: S101 - a worker has one
            return torch.stack([self._bank.vectors[row] for row in encoding.rows])
        if encoding.encoding in RANDOM_PROJECTIONS:
            dtype = self._signs_type(computed=capture.is_computed)
            return self._signs.get(encoding.seed, encoding.dimensions, dtype)
        return None

    def _encoded(self, rows: Tensor, form: EncodedFormat, basis: Tensor | None) -> npt.NDArray[np.uint8]:
        """Return rows as they would come to the ring."""
        data = np.empty(form.payload_bytes(*rows.shape[:2]), dtype=np.uint8)
        encoder.encode(rows, form, basis, torch.from_numpy(data).view(len(rows), -1))
        return data

    def _signs_type(self, *, computed: bool) -> torch.dtype:
        del computed
        return torch.float32  # 16-bit matrices are slow on a CPU

    def _encode(self, batch: Batch, extent: Extent) -> None:
        """Encode a batch into the ring."""
        rows, basis = self._rows_and_basis(batch)
        target = torch.from_numpy(self._producer.view(extent)).view(batch.capture.units, -1)
        encoder.encode(rows, self._form(batch.capture), basis, target)

    def _publish(self, batch: Batch, extent: Extent) -> None:
        capture, form = batch.capture, self._form(batch.capture)
        headers = [
            capture_pb2.ChunkHeader(
                sequence=capture.sequence,
                site=site,
                layers=capture.layers,
                positions=batch.positions,
                dtype=form.dtype,
                width=form.width,
                encoding=form.encoding,
                dimensions=form.dimensions,
                axis=form.axis,
            )
            for site in capture.sites
        ]
        self._producer.publish(extent, capture.capture_id, headers)
