"""The sink of a GPU: blocks are encoded and copied to the ring on a stream of their own, by a thread of their own.

The engine's thread only records where its stream stands and hands the blocks over: it never waits for a copy, nor for
room in the ring. What holds up the model when the ring is full is the pool: blocks that cannot leave do not come
back, and the step that needs the next one waits for it (the policy WAIT).
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inference_svc.shipping.ring import Extent
from inference_svc.taps.gpu import kernel
from inference_svc.taps.gpu.encoder import GpuEncoder
from inference_svc.taps.sink import BlockSink
from inference_svc.taps.vllm.limits import UnsupportedEngineError
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture
    from inference_svc.taps.reductions import Batch
    from inference_svc.taps.sink import RowFormat
    from residuum.wire.encodings import RowFormat as EncodedFormat

_log = get_logger(__name__)


_CHECKED_UNITS = (1, 3, 16)
"""Units of the blocks that are copied for a check at the start; as many positions are in them, and one is free."""


class CannotCopyError(UnsupportedEngineError):
    """Rows do not get from the device to the ring."""


class _Work(NamedTuple):
    """What the engine's thread hands over."""

    blocks: Sequence[Block]
    ended: Capture | None
    """A capture of which nothing comes after the blocks."""
    written: torch.cuda.Event
    """When the blocks are filled."""


class _Copy(NamedTuple):
    """A copy that is under way."""

    block: Block | None
    """The block that is free when it is done."""
    batch: Batch
    extent: Extent
    source: tuple[Tensor, Tensor | None]
    """What is encoded; it must live until the copy is done."""
    done: torch.cuda.Event


class StreamedSink(BlockSink):
    """Encodes blocks and copies them from the device to the ring, beside the model's own work."""

    def __init__(
        self, pool: BlockPool, row_format: RowFormat, producer: RingProducer, bank: VectorBank | None = None
    ) -> None:
        """Pin the ring, and start the thread.

        Raises:
            CannotCopyError: CUDA refuses to pin the ring's memory, or rows do not arrive there as they were.
        """
        super().__init__(pool, row_format, producer, bank)
        memory = producer.memory
        code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(code) != 0:
            raise CannotCopyError(
                f"the ring ({memory.nbytes} bytes of shared memory) cannot be pinned: cudaHostRegister failed with "
                f"code {int(code)}. Raise the limit of locked memory (ulimit -l), or shrink the ring (--ring-mib)."
            )
        self._address = memory.ctypes.data  # the device reaches registered memory by the host's address
        self._device = pool.memory.device
        self._stream = torch.cuda.Stream(self._device)
        self._encoder = GpuEncoder(self._device)
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._under_way: _Copy | None = None
        self._changed = threading.Condition()
        self._unfinished = 0
        self._check_copies(memory)
        threading.Thread(target=self._run, name="residuum-sink", daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Bytes of what it has allotted on the device for good."""
        return self._encoder.nbytes

    def send(self, blocks: Sequence[Block]) -> None:
        """Hand blocks over; they leave once the model's stream has come to here."""
        if blocks:
            self._hand_over(blocks)

    def end(self, capture: Capture) -> None:
        """Have what is still to come of a capture sent, and forget it."""
        self._hand_over((), capture)

    def _hand_over(self, blocks: Sequence[Block], ended: Capture | None = None) -> None:
        written = torch.cuda.Event()
        written.record()
        self._pool.leaving(len(blocks))
        with self._changed:
            self._unfinished += 1
        self._work.put(_Work(blocks, ended, written))

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every block that was sent has left the pool; tell whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout_seconds)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            while True:
                work = self._work.get()
                try:
                    self._stream.wait_event(work.written)
                    for block in work.blocks:
                        self._start(block)
                    if work.ended is not None:
                        self._start_last(work.ended)
                    self._finish()
                except Exception:
                    # Without this thread no block ever comes back: fail loudly where the step will see it.
                    _log.exception("captured rows cannot be copied from the device")
                    self._pool.fail()
                    raise
                finally:
                    with self._changed:
                        self._unfinished -= 1
                        self._changed.notify_all()

    def _start(self, block: Block) -> None:
        if block.capture.is_probe:
            self._keep_probe(block)
            self._stream.synchronize()
        elif block.positions:
            batch = self._batch_of(block)
            if block.capture.is_reduced:
                self._stream.synchronize()  # the block's rows are in the reduction now
            held = None if block.capture.is_reduced else block
            if batch is not None and self._start_batch(batch, held) and held:
                return
        self._pool.give_back(block)

    def _start_last(self, capture: Capture) -> None:
        last = self._last_batch(capture)
        if last is not None:
            self._start_batch(last)
        self._finish()  # before what it is encoded with is let go
        self._forget(capture)

    def _start_batch(self, batch: Batch, block: Block | None = None) -> bool:
        """Begin to encode a batch, and to copy it; tell whether it is under way rather than shed."""
        extent = self._acquire(self._nbytes(batch), batch.capture)
        if extent is None:
            self._shed(batch)
            return False
        rows, basis = self._rows_and_basis(batch)
        self._encoder.encode(rows, self._form(batch.capture), basis, self._address + extent.offset)
        done = torch.cuda.Event()
        done.record(self._stream)
        self._finish()  # the one before, so that it leaves as soon as it has come; the stream has work meanwhile
        self._under_way = _Copy(block, batch, extent, (rows, basis), done)
        return True

    def _encoded(self, rows: Tensor, form: EncodedFormat, basis: Tensor | None) -> npt.NDArray[np.uint8]:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            self._encoder.encode(rows, form, basis, self._address)
        self._stream.synchronize()
        arrived = self._producer.memory[: form.payload_bytes(*rows.shape[:2])]
        data = arrived.copy()
        arrived[:] = 0
        return data

    def _signs_type(self, *, computed: bool) -> torch.dtype:
        # The tensor cores want both alike.
        return torch.float32 if computed else self._pool.memory.dtype

    def _check_copies(self, memory: npt.NDArray[np.uint8]) -> None:
        """Copy blocks of known bytes, as rows are copied later, and compare what arrives. Nothing is in the pool yet.

        Raises:
            CannotCopyError: Something else arrives.
        """
        for units in _CHECKED_UNITS:
            positions = min(units, len(self._pool.memory) // units - 1)
            if positions < 1:
                continue
            block = self._pool.memory[: units * (positions + 1)].view(units, positions + 1, -1)
            bytes_ = block.view(torch.uint8)
            bytes_.copy_((torch.arange(bytes_.numel()) % 251).view(bytes_.shape))  # a prime: no row is like the next
            rows = block[:, :positions]
            extent = Extent(0, rows.nbytes)
            kernel.copy_out(rows, kernel.HostPointer(self._address + extent.offset, rows.dtype))
            torch.cuda.synchronize(self._device)
            arrived = memory[extent.offset : extent.offset + extent.nbytes]
            same = np.array_equal(arrived, rows.contiguous().view(torch.uint8).flatten().cpu().numpy())
            bytes_.zero_()
            arrived[:] = 0
            if not same:
                raise CannotCopyError(
                    f"rows copied from the device to the ring arrive changed ({units} units of {positions} positions); "
                    "this host's driver or IOMMU does not map shared memory as CUDA promises."
                )

    def _acquire(self, nbytes: int, capture: Capture) -> Extent | None:
        extent = self._producer.acquire(nbytes, False, capture.capture_id)
        if extent is None:
            self._finish()  # what is under way must be published before its room in the ring can come back
            extent = self._producer.acquire(nbytes, not capture.sheds, capture.capture_id)
        return extent

    def _finish(self) -> None:
        copy, self._under_way = self._under_way, None
        if copy is not None:
            copy.done.synchronize()
            self._publish(copy.batch, copy.extent)
            if copy.block is not None:
                self._pool.give_back(copy.block)
