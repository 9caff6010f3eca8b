"""The sink: the last step of a captured row in the worker. Full blocks are encoded into the ring, where shippers read.

Each part has one job: `FollowedCaptures` runs reductions and holds projection bases, `RingWriter` deals with extents
and losses, `Probes` keeps the blocks of the self-test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.cpu import encoder
from inference_svc.taps.element_types import own_type
from inference_svc.taps.encodings.bases import Bases
from inference_svc.taps.encodings.check import check_encodings
from inference_svc.taps.encodings.signs import SignCache
from inference_svc.taps.followed_captures import FollowedCaptures
from inference_svc.taps.probes import Probe, Probes
from inference_svc.taps.reductions import Batch
from inference_svc.taps.ring_writer import NO_MEMORY, Encoded, ModelRows, RingWriter
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.encodings.bases import Basis
    from inference_svc.taps.encodings.sae_cache import SAECache
    from inference_svc.taps.plan import Capture, RequestPlan
    from residuum.wire.rows.encodings import RowFormat as EncodedFormat

_CPU_SIGN_DTYPE = torch.float32
"""Products of 16-bit matrices are slow on a CPU."""


class BlockSink:
    """Encodes blocks in this process's own memory into the ring, within the call of `send`."""

    def __init__(
        self,
        pool: BlockPool,
        model_rows: ModelRows,
        producer: RingProducer,
        bank: VectorBank | None = None,
        sign_dtype: torch.dtype = _CPU_SIGN_DTYPE,
        saes: SAECache | None = None,
    ) -> None:
        """Make the sink of a pool.

        Args:
            pool: The blocks.
            model_rows: The rows as the model computes them.
            producer: The ring.
            bank: The active vectors. None: no capture projects its rows to vectors.
            sign_dtype: See `Bases`.
            saes: The encoders of sparse autoencoders. None: no capture keeps features.
        """
        self._pool = pool
        self._format = model_rows
        self._producer = producer
        self._signs = SignCache(model_rows.hidden, pool.memory.device)
        self._bases = Bases(self._signs, bank, sign_dtype, saes)
        self._writer = RingWriter(producer, model_rows)
        self._followed = FollowedCaptures(self._bases, self._writer)
        self._probes = Probes(pool)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the sink allocates for its lifetime."""
        return 0

    def check_encodings(self) -> None:
        """Encode known rows in every encoding that captures may have, and compare them with the reference.

        Comes before any capture.

        Raises:
            CannotEncodeError: The encoded rows differ.
        """
        memory = self._pool.memory
        width, dtype, device = memory.shape[1], memory.dtype, memory.device
        with_saes = self._bases.has_saes
        check_encodings(width, dtype, device, self._signs, self._encode_for_check, with_saes=with_saes)

    def begin(self, plan: RequestPlan) -> None:
        """Prepare for the blocks of a request whose capture is followed (`Capture.is_followed`), until `end`."""
        self._followed.begin(plan)

    def keep_signs(self, projections: Sequence[tuple[int, int, bool]], owner: int = 0) -> list[bool | str]:
        """Make the signs of random projections on a thread and keep them; see `Bases.keep_signs`."""
        return self._bases.keep_signs(projections, owner)

    def send(self, blocks: Sequence[Block]) -> None:
        """Encode the rows of blocks into the ring or keep them for the self-test, and give the blocks back to the pool.

        When the ring is full, the capture's policy decides: WAIT holds up the step, SHED drops the rows and reports
        them as lost.
        """
        for block in blocks:
            if block.capture.is_probe:
                self._probes.keep(block)
            elif block.positions:
                batch = self._followed.add(self._batch(block))
                if batch is not None:
                    self._ship(batch)
            self._pool.give_back(block)

    def end(self, capture: Capture) -> None:
        """Send the last rows of a followed capture, after its last block was sent, and forget it."""
        last = self._followed.finish(capture)
        if last is not None:
            self._ship(last)
        self._followed.forget(capture)

    def publish(self, *, may_be_last: bool) -> None:
        """Publish rows that have left the device by now. Call it in each step. Here `send` does that.

        Args:
            may_be_last: No request of the taps is left, so perhaps no step follows.
        """

    def hurry(self) -> None:
        """Send the rows of sent blocks soon, and do not let them wait for others. Here `send` does that.

        Call it when a reply has ended whose last block was full.
        """

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every sent block has left the pool, and return whether all have. Here `send` does that."""
        del timeout_seconds
        return True

    def lose(
        self,
        capture: Capture,
        positions: Sequence[int],
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
    ) -> None:
        """Report rows of a capture that will never arrive."""
        if capture.is_probe or not positions:
            return
        self._followed.miss(capture, positions)
        self._writer.report_loss(capture, positions, reason, detail)

    def take_probe(self, capture_id: str) -> list[Probe]:
        """Return the blocks of a self-test's capture and forget them."""
        return self._probes.take(capture_id)

    def _batch(self, block: Block) -> Batch:
        return Batch(block.capture, block.positions, self._pool.rows(block))

    def _ship(self, batch: Batch) -> None:
        form = self._writer.format_of(batch.capture)
        capture, positions = batch.capture, batch.positions
        extent = self._writer.acquire(capture, positions, form, block=not capture.sheds)
        if extent is None:
            self._writer.shed(capture, positions)
            return
        encoded = Encoded(capture, positions, form, extent)
        target = torch.from_numpy(self._producer.view(extent)).view(capture.units, -1)
        try:
            rows, basis = self._rows_and_basis(batch, form)
            encoder.encode(rows, form, basis, target)
        except NO_MEMORY as error:
            self._writer.give_up(encoded, error)
            return
        self._writer.publish(encoded)

    def _rows_and_basis(self, batch: Batch, form: EncodedFormat) -> tuple[Tensor, Basis | None]:
        """Return the rows in the dtype that they are encoded from, and their basis, if they have one."""
        if form.encoding in (capture_pb2.ENCODING_RAW, capture_pb2.ENCODING_TOPK):
            dtype = own_type(form)
            return batch.rows if batch.rows.dtype == dtype else batch.rows.to(dtype), None
        return batch.rows, self._followed.basis(batch.capture)

    def _encode_for_check(self, rows: Tensor, form: EncodedFormat, basis: Basis | None) -> npt.NDArray[np.uint8]:
        """Return the bytes of rows as `send` would write them into the ring."""
        data = np.empty(form.payload_bytes(*rows.shape[:2]), dtype=np.uint8)
        encoder.encode(rows, form, basis, torch.from_numpy(data).view(len(rows), -1))
        return data
