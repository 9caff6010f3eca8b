"""Copies of rows from the device to the host's memory, by the GPU's copy engine.

A kernel could copy them as well. But on some hosts with an H100, after kernels of a second stream had written to the
host's memory, every later kernel of the process began later, whatever its stream. It ended only when another process
used the device. Copies by the copy engine had no such effect, and take nothing from the model's kernels that run
meanwhile. `bench.host.copies` measures both on a host.

But the device may do all copies to the host in the order in which they were started, whatever their stream. Then the
model's own small copies, such as its sampled tokens, wait. So large copies are divided, and at most PIECE_BYTES are
queued: before more, the thread waits until all of them are done.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.gpu.driver import CopyFailedError, library

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from inference_svc.taps.blocks import Block, BlockPool

PIECE_BYTES = 64 << 20
"""The most bytes that are queued at a time: 1.3 ms at 50 GB/s. With asynchronous scheduling, the default, vLLM needs a
step's tokens only a step later, so such a delay does not leave the device idle. Smaller pieces take more calls."""

MOST_COPIES = 256
"""The most copies that are queued at a time. A call that finds the driver's queue full waits, and keeps the GIL."""

_HOST, _DEVICE = 1, 2  # CUmemorytype


class Lines(NamedTuple):
    """Bytes that are copied: lines at equal distances in the device's memory. In the host's they have no gaps."""

    source: int
    """The address of the first line on the device."""
    pitch: int
    """The distance between the starts of two lines, in bytes."""
    target: int
    """The address in the host's memory."""
    width: int
    """The bytes of a line."""
    height: int
    """How many lines there are."""

    @property
    def nbytes(self) -> int:
        """The number of copied bytes."""
        return self.width * self.height


class HostCopies:
    """Queues copies on the current stream."""

    def __init__(self) -> None:
        """Begin without copies."""
        self._stream: torch.cuda.Stream | None = None  # the stream of the queued copies
        self._count = self._bytes = 0  # of the queued copies
        self._end: torch.cuda.Event | None = None
        """Their end. A blocking event: otherwise the thread keeps a core busy while it waits."""

    def copy(self, rows: Tensor, address: int) -> None:
        """Copy rows. The call may wait for earlier copies, without the GIL.

        Args:
            rows: [units, ...], contiguous except for gaps between units, on the device.
            address: Memory of the host without gaps, pinned. The rows must live until they have been copied.

        Raises:
            CopyFailedError: CUDA does not accept the copy.
        """
        if rows.numel():
            width = rows.numel() // len(rows) * rows.itemsize
            self.copy_lines(Lines(rows.data_ptr(), rows.stride(0) * rows.itemsize, address, width, len(rows)))

    def copy_lines(self, lines: Lines) -> None:
        """Copy lines of at least one byte; see `copy`."""
        stream = torch.cuda.current_stream()
        for piece in divided(lines):
            is_too_much = self._bytes + piece.nbytes > PIECE_BYTES or self._count == MOST_COPIES
            if is_too_much or self._stream not in (None, stream):
                self.wait()
            queue_lines(piece, stream.cuda_stream)
            self._stream = stream
            self._bytes += piece.nbytes
            self._count += 1

    def wait(self) -> None:
        """Wait until all copies are done, and everything else that was queued on their stream before this call."""
        if self._stream is not None:
            self._end = self._end or torch.cuda.Event(blocking=True)
            self._end.record(self._stream)
            self._end.synchronize()
        self._stream = None
        self._count = self._bytes = 0


def lines_of(pool: BlockPool, block: Block, address: int) -> Lines:
    """Return the lines that copy a block's rows to an address of the host, as the model computed them."""
    # Addresses instead of `pool.rows(block)`: a view of torch takes longer than the copy's call.
    return Lines(
        source=pool.memory.data_ptr() + block.first_row * pool.row_bytes,
        pitch=block.capacity * pool.row_bytes,
        target=address,
        width=len(block.positions) * pool.row_bytes,
        height=block.capture.units,
    )


def divided(lines: Lines) -> Iterator[Lines]:
    """Divide a copy into pieces of at most PIECE_BYTES."""
    source, pitch, target, width, height = lines
    if pitch == width or height == 1:
        pitch, width, height = width * height, width * height, 1
    together = max(PIECE_BYTES // width, 1)
    for first in range(0, height, together):
        count = min(together, height - first)
        for start in range(0, width, PIECE_BYTES):  # once, unless a line is longer than a piece
            part = min(PIECE_BYTES, width - start)
            distance = pitch if count > 1 else part  # the driver refuses a long distance, even if there is one line
            yield Lines(source + first * pitch + start, distance, target + first * width + start, part, count)


def queue_lines(lines: Lines, stream: int) -> None:
    """Queue one copy on a CUDA stream."""
    request = _Memcpy2D(
        srcMemoryType=_DEVICE,
        srcDevice=lines.source,
        srcPitch=lines.pitch,
        dstMemoryType=_HOST,
        dstHost=lines.target,
        dstPitch=lines.width,
        WidthInBytes=lines.width,
        Height=lines.height,
    )
    code = library().cuMemcpy2DAsync_v2(ctypes.byref(request), ctypes.c_void_p(stream))
    if code:
        raise CopyFailedError(f"{lines.nbytes} bytes were not copied to the host: cuMemcpy2DAsync failed with {code}.")


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's API. PyTorch has no copy of lines with gaps."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )
