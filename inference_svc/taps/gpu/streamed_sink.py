"""The sink on a GPU: a thread of its own encodes blocks and copies them to the ring, on a CUDA stream of its own.

The engine's thread records an event on its stream and hands the blocks over. It waits neither for a copy nor for room
in the ring. A full ring still slows the model down, through the pool (policy WAIT): blocks that cannot leave do not
come back, and the step that needs a new block waits for one.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.gpu.copy_check import CannotCopyError, check_copies
from inference_svc.taps.gpu.encoder import GpuEncoder
from inference_svc.taps.sink import BlockSink
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.shipping.ring import Extent
    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture
    from inference_svc.taps.reductions import Batch
    from inference_svc.taps.ring_writer import ModelRows
    from residuum.wire.encodings import RowFormat as EncodedFormat

TOGETHER_BYTES = 32 << 20
"""Copies of up to this many bytes are waited for and published together. Each wait lets the thread wake up once more,
when the engine's thread may need the interpreter. Larger copies are published while the next one runs."""

_log = get_logger(__name__)


class _Work(NamedTuple):
    """Blocks that the engine's thread hands over."""

    blocks: Sequence[Block]
    ended: Capture | None
    """A capture that gets no rows after these blocks."""
    written: torch.cuda.Event
    """When the blocks are filled."""


class _Copy(NamedTuple):
    """A copy in progress."""

    block: Block | None
    """The block to give back when the copy is done."""
    batch: Batch
    form: EncodedFormat
    extent: Extent
    source: tuple[Tensor, Tensor | None]
    """The tensors that are encoded. Held here because they must live until the copy is done."""
    done: torch.cuda.Event


class StreamedSink(BlockSink):
    """Encodes blocks and copies them from the device to the ring, while the model goes on."""

    def __init__(
        self, pool: BlockPool, model_rows: ModelRows, producer: RingProducer, bank: VectorBank | None = None
    ) -> None:
        """Pin the ring, check that rows reach it, and start the thread.

        Raises:
            CannotCopyError: CUDA refuses to pin the ring's memory, or rows arrive there changed.
        """
        # The tensor cores take rows and signs of one dtype.
        super().__init__(pool, model_rows, producer, bank, sign_dtype=pool.memory.dtype)
        memory = producer.memory
        code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(code) != 0:
            raise CannotCopyError(
                f"The ring ({memory.nbytes} bytes of shared memory) cannot be pinned: cudaHostRegister failed with "
                f"code {int(code)}. Raise the limit of locked memory (ulimit -l), or shrink the ring (--ring-mib)."
            )
        self._address = memory.ctypes.data  # the device reaches registered memory by the host's address
        self._device = pool.memory.device
        self._stream = torch.cuda.Stream(self._device)
        self._encoder = GpuEncoder(self._device)
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._copies: list[_Copy] = []  # in progress, in the order of the stream
        self._changed = threading.Condition()
        self._unfinished = 0
        check_copies(pool.memory, memory, self._address)
        threading.Thread(target=self._run, name="residuum-sink", daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the sink allocates for its lifetime."""
        return self._encoder.nbytes

    def send(self, blocks: Sequence[Block]) -> None:
        """Hand blocks over. They leave once the model's stream has passed this point."""
        if blocks:
            self._hand_over(blocks)

    def end(self, capture: Capture) -> None:
        """Send the last rows of a followed capture, and forget it."""
        self._hand_over((), capture)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every sent block has left the pool, and return whether all have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout_seconds)

    def _hand_over(self, blocks: Sequence[Block], ended: Capture | None = None) -> None:
        written = torch.cuda.Event()
        written.record()
        self._pool.leaving(len(blocks))
        with self._changed:
            self._unfinished += 1
        self._work.put(_Work(blocks, ended, written))

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
                    # Without this thread no block comes back. The next step that needs one fails, instead of waiting.
                    _log.exception("captured rows cannot be copied from the device")
                    self._pool.fail()
                    raise
                finally:
                    with self._changed:
                        self._unfinished -= 1
                        self._changed.notify_all()

    def _start(self, block: Block) -> None:
        if block.capture.is_probe:
            self._probes.keep(block)
            self._stream.synchronize()
        elif block.positions:
            batch = self._followed.add(self._batch(block))
            if block.capture.is_reduced:
                self._stream.synchronize()  # from here on the reduction does not read the block
            held = None if block.capture.is_reduced else block
            if batch is not None and self._start_batch(batch, held) and held:
                return
        self._pool.give_back(block)

    def _start_last(self, capture: Capture) -> None:
        last = self._followed.finish(capture)
        if last is not None:
            self._start_batch(last)
        self._finish()  # the copy reads the capture's basis, which `forget` frees
        self._followed.forget(capture)

    def _start_batch(self, batch: Batch, block: Block | None = None) -> bool:
        """Start to encode and copy a batch. Return False if it was shed instead."""
        form = self._writer.format_of(batch.capture)
        extent = self._acquire(batch, form)
        if extent is None:
            self._writer.shed(batch)
            return False
        rows, basis = self._rows_and_basis(batch, form)
        self._encoder.encode(rows, form, basis, self._address + extent.offset)
        done = torch.cuda.Event()
        done.record(self._stream)
        if sum(copy.extent.nbytes for copy in self._copies) + extent.nbytes > TOGETHER_BYTES:
            self._finish()  # the copies before this one; the stream works on this one in the meantime
        self._copies.append(_Copy(block, batch, form, extent, (rows, basis), done))
        return True

    def _acquire(self, batch: Batch, form: EncodedFormat) -> Extent | None:
        extent = self._writer.acquire(batch, form, block=False)
        if extent is None:
            self._finish()  # the ring gets no room back from an extent that is not published
            extent = self._writer.acquire(batch, form, block=not batch.capture.sheds)
        return extent

    def _finish(self) -> None:
        """Wait for the copies in progress, publish them, and give their blocks back."""
        copies, self._copies = self._copies, []
        if copies:
            copies[-1].done.synchronize()  # those before it are done too
        for copy in copies:
            self._writer.publish(copy.batch, copy.form, copy.extent)
            if copy.block is not None:
                self._pool.give_back(copy.block)

    def _encode_for_check(self, rows: Tensor, form: EncodedFormat, basis: Tensor | None) -> npt.NDArray[np.uint8]:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            self._encoder.encode(rows, form, basis, self._address)
        self._stream.synchronize()
        arrived = self._producer.memory[: form.payload_bytes(*rows.shape[:2])]
        data = arrived.copy()
        arrived[:] = 0
        return data
