"""The sink on a GPU: it encodes blocks and copies them to the ring, on CUDA streams of its own.

The engine's thread starts to copy rows that leave as the model computed them; see `direct_copies`. Other blocks go to a
thread of the sink, which encodes them. The engine's thread waits neither for a copy nor for room in the ring. A full
ring still slows the model down, through the pool (policy WAIT): blocks that cannot leave do not come back, and the step
that needs a new block waits for one.

Whenever the sink's thread has waited and runs Python again, the engine's thread must wait for it, and for being woken
up after that. This costs more than the work itself. So the thread waits seldom: it takes the blocks of several steps at
once.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.encodings.sae_encoder import SAEEncoder
from inference_svc.taps.gpu.copy_check import check_copies, pin
from inference_svc.taps.gpu.direct_copies import DirectCopies
from inference_svc.taps.gpu.driver import CurrentStream
from inference_svc.taps.gpu.encoder import OUTPUT_BYTES, STAGED_BYTES, FeatureRows, GpuEncoder
from inference_svc.taps.gpu.host_copies import HostCopies
from inference_svc.taps.gpu.waiting_features import Copy, WaitingFeatures
from inference_svc.taps.ring_writer import NO_MEMORY, Encoded
from inference_svc.taps.sink import BlockSink
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.encodings.bases import Basis
    from inference_svc.taps.encodings.sae_cache import SAECache
    from inference_svc.taps.plan import Capture
    from inference_svc.taps.reductions import Batch
    from inference_svc.taps.ring_writer import ModelRows
    from residuum.wire.rows.encodings import RowFormat as EncodedFormat

TOGETHER_BYTES = 64 << 20
"""After this many bytes, copies are waited for and published."""
PAUSE_SECONDS = 0.032
"""After its work the thread lets full blocks gather for this long, unless a step needs blocks back. A block that comes
when the thread has nothing to do leaves at once."""
SHORT_PAUSE_SECONDS = 0.008
"""The same for blocks for which someone may wait: those with rows of a prompt, those that are not full because their
reply has ended, and those of captures with a `flush_interval`."""


class _Work(NamedTuple):
    """Blocks that the engine's thread hands over."""

    blocks: Sequence[Block]
    ended: Capture | None
    """A capture that gets no rows after these blocks."""
    stream: torch.cuda.Stream
    """The stream that fills the blocks."""


class StreamedSink(BlockSink):
    """Encodes blocks and copies them from the device to the ring, while the model goes on."""

    def __init__(
        self,
        pool: BlockPool,
        model_rows: ModelRows,
        producer: RingProducer,
        bank: VectorBank | None = None,
        saes: SAECache | None = None,
    ) -> None:
        """Pin the ring, check that rows reach it, and start the thread.

        Raises:
            CannotCopyError: CUDA refuses to pin the ring's memory, or rows arrive there changed.
        """
        # The tensor cores take rows and signs of one dtype.
        super().__init__(pool, model_rows, producer, bank, sign_dtype=pool.memory.dtype, saes=saes)
        self._address = pin(producer)
        self._device = pool.memory.device
        self._stream = torch.cuda.Stream(self._device)
        self._current = CurrentStream(self._device)
        self._copies = HostCopies()
        sum_bytes = STAGED_BYTES if saes is None else OUTPUT_BYTES
        self._encoder = GpuEncoder(self._device, self._copies, sum_bytes=sum_bytes)
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._collected: list[Copy] = []
        self._collected_bytes = 0
        self._features = WaitingFeatures(self._encoder, self._lose)  # of the collected copies, for their start
        self._is_urgent = False  # whether something waits that must leave soon
        self._gathers = False  # whether the thread lets full blocks gather
        self._handed_over = 0  # calls of `_hand_over`
        self._done = 0  # how many of them are done
        self._changed = threading.Condition()  # guards `_done`
        check_copies(pool.memory, producer.memory, self._address, self._copies)
        self._room = threading.Lock()  # held by a thread that waits for room in the ring
        self._direct = DirectCopies(pool, self._writer, self._address, self._room)
        pool.before_waiting = self._wait_for_direct
        threading.Thread(target=self._run, name="residuum-sink", daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the sink allocates for its lifetime."""
        return self._encoder.nbytes

    def send(self, blocks: Sequence[Block]) -> None:
        """Start to copy blocks, or hand them over. They leave after the model's stream has passed this point."""
        whole = [block for block in blocks if self._leaves_whole(block)]
        others = blocks
        if whole:
            others = [block for block in blocks if not self._leaves_whole(block)]
            with self._pool.failing_on_error():
                self._direct.start(whole)
        if others:
            self._hand_over(others)
            if any(block.free or not block.may_gather for block in others):
                self._hurry()

    def publish(self, *, may_be_last: bool) -> None:
        """See `BlockSink.publish`."""
        if self._direct.is_empty or self._pool.has_failed:
            return
        with self._pool.failing_on_error():
            self._direct.step(may_be_last=may_be_last)

    def hurry(self) -> None:
        """See `BlockSink.hurry`."""
        self._direct.hurry()
        self._hurry()

    def end(self, capture: Capture) -> None:
        """Send the last rows of a followed capture, and forget it."""
        self._hand_over((), capture)
        self._hurry()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every sent block has left the pool, and return whether all have."""
        end = time.monotonic() + timeout_seconds
        wanted = self._handed_over
        with self._changed:
            self._pool.is_short.set()
            self._changed.wait_for(lambda: self._done >= wanted or self._pool.has_failed, timeout_seconds)
            is_done = self._done >= wanted
        return self._direct.flush(end - time.monotonic()) and is_done

    def _wait_for_direct(self) -> bool:
        """Wait for the oldest blocks that are copied as they are. Return False if there are none."""
        has_waited = False
        with self._pool.failing_on_error():
            has_waited = self._direct.wait()
        return has_waited  # noqa: RET504 - an error ends the block before

    def _hand_over(self, blocks: Sequence[Block], ended: Capture | None = None) -> None:
        self._pool.leaving(len(blocks))
        self._handed_over += 1
        self._work.put(_Work(blocks, ended, self._current.get()))

    def _hurry(self) -> None:
        self._is_urgent = True
        if self._gathers:
            self._pool.is_short.set()

    def _run(self) -> None:
        try:
            with self._pool.failing_on_error():
                self._work_forever()
        finally:
            with self._changed:
                self._changed.notify_all()

    def _work_forever(self) -> None:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.synchronize()  # gives the thread its CUDA context, without which the driver refuses copies
            while True:
                works = self._gathered()
                self._do(works)
                with self._changed:
                    self._done += len(works)
                    self._changed.notify_all()
                self._pause()

    def _do(self, works: Sequence[_Work]) -> None:
        """Send blocks and the last rows of captures. All captures that have ended are waited for together.

        Replies of equal length end in the same step.
        """
        for stream in {work.stream for work in works}:
            self._stream.wait_stream(stream)
        for work in works:
            for block in work.blocks:
                self._start(block)
            if work.ended is not None:
                self._start_last(work.ended)
        self._finish()
        for work in works:
            if work.ended is not None:
                self._followed.forget(work.ended)  # after its copies, which read the basis that this frees

    def _pause(self) -> None:
        """Let blocks gather."""
        hurry = self._pool.is_short
        if not hurry.wait(SHORT_PAUSE_SECONDS):
            self._gathers = True  # before the look at `_is_urgent`, which `_hurry` sets before it looks at this
            if not self._is_urgent:
                hurry.wait(PAUSE_SECONDS - SHORT_PAUSE_SECONDS)
            self._gathers = False
        hurry.clear()

    def _gathered(self) -> list[_Work]:
        """Wait for work, and return all that there is."""
        works = [self._work.get()]
        self._is_urgent = False
        with suppress(queue.Empty):
            while True:
                works.append(self._work.get_nowait())
        return works

    def _start(self, block: Block) -> None:
        capture = block.capture
        if capture.is_probe:
            self._probes.keep(block)
            self._stream.synchronize()
        elif block.positions:
            batch = self._followed.add(self._batch(block))
            if capture.is_reduced:
                self._stream.synchronize()  # from here on the reduction does not read the block
            held = None if capture.is_reduced else block
            if batch is not None and self._start_batch(batch, held) and held:
                return
        self._pool.give_back(block)

    def _start_last(self, capture: Capture) -> None:
        last = self._followed.finish(capture)
        if last is not None:
            self._start_batch(last)

    def _leaves_whole(self, block: Block) -> bool:
        """Return whether a block's rows leave as the model computed them."""
        capture = block.capture
        is_raw = capture.encoding.encoding == capture_pb2.ENCODING_RAW
        return bool(block.positions) and is_raw and not (capture.is_followed or capture.is_probe)

    def _start_batch(self, batch: Batch, block: Block | None = None) -> bool:
        """Start to encode and copy a batch. Return False if it was shed instead, or the device has no memory left."""
        encoded = self._acquire(batch.capture, batch.positions)
        if encoded is None:
            return False
        address = self._address + encoded.extent.offset
        try:
            rows, basis = self._rows_and_basis(batch, encoded.form)
            copy = Copy(encoded, block, (rows, basis))
            if isinstance(basis, SAEEncoder):
                self._features.add(copy, FeatureRows(rows, encoded.form, basis, address))
            else:
                self._encoder.encode(rows, encoded.form, basis, address)
        except NO_MEMORY as error:
            self._stream.synchronize()  # parts of the batch may be on their way to the extent
            self._writer.give_up(encoded, error)
            return False
        self._collect(copy)
        return True

    def _lose(self, copy: Copy, error: BaseException) -> None:
        """Lose a collected copy, for which the device has no memory."""
        self._stream.synchronize()  # parts of the block may be on their way to its extent
        self._collected = [other for other in self._collected if other is not copy]
        self._writer.give_up(copy.encoded, error)
        if copy.block is not None:
            self._pool.give_back(copy.block)

    def _acquire(self, capture: Capture, positions: Sequence[int]) -> Encoded | None:
        """Return the extent for rows; None if the ring is full and they are shed."""
        form = self._writer.format_of(capture)
        extent = self._writer.acquire(capture, positions, form, block=False)
        if extent is None:
            self._finish()  # the ring gets no room back from an extent that is not published
            with self._room:
                extent = self._writer.acquire(capture, positions, form, block=not capture.sheds)
        if extent is None:
            self._writer.shed(capture, positions)
            return None
        return Encoded(capture, positions, form, extent)

    def _collect(self, copy: Copy) -> None:
        self._collected.append(copy)
        self._collected_bytes += copy.encoded.extent.nbytes
        if self._collected_bytes >= TOGETHER_BYTES:
            self._finish()

    def _finish(self) -> None:
        """Wait for the collected copies, publish them, and give their blocks back."""
        self._features.encode()
        copies, self._collected, self._collected_bytes = self._collected, [], 0
        self._copies.wait()
        if copies:
            self._publish(copies)

    def _publish(self, copies: Sequence[Copy]) -> None:
        self._writer.publish(*(copy.encoded for copy in copies))
        self._pool.give_back(*(copy.block for copy in copies if copy.block is not None))

    def _encode_for_check(self, rows: Tensor, form: EncodedFormat, basis: Basis | None) -> npt.NDArray[np.uint8]:
        self._encoder.encode(rows, form, basis, self._address)
        torch.cuda.synchronize(self._device)
        arrived = self._producer.memory[: form.payload_bytes(*rows.shape[:2])]
        data = arrived.copy()
        arrived[:] = 0
        return data
