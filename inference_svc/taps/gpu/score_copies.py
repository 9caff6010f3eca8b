# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""Copies of scores to the board, on a GPU: one kernel for each step, which writes into the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from inference_svc.taps.gpu.driver import CurrentStream
from inference_svc.taps.gpu.kernels.launching import Launcher
from inference_svc.taps.gpu.kernels.parts import SCORE_COLUMNS
from inference_svc.taps.scores import RUN_FIELDS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.gpu.kernels.prepared import PreparedLaunch

_TABLES = 16
"""Tables of runs, even. The engine prepares a step while kernels of earlier steps still read theirs."""
_RUN_PROGRAMS = tl.constexpr(32)
_LINE_PROGRAMS = tl.constexpr(4)
"""Programs that share the runs, and programs that share the lines of a run: reads of the host's memory take long."""
_PROGRAMS = _RUN_PROGRAMS.value * _LINE_PROGRAMS.value
_ROWS = 32
"""Lines that a program copies at once."""
_FIELDS = tl.constexpr(RUN_FIELDS)
_WARPS = 4
_CONSTANTS = {"ROWS": _ROWS}


class HostPointer:
    """Host memory that the device can reach, as a kernel argument. It has only what Triton needs of a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        """Point to elements of `dtype` at `address`."""
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class CudaScoreCopies:
    """See `ScoreCopies`."""

    def __init__(self, buffer: Tensor, board: npt.NDArray[np.float32], max_requests: int) -> None:
        """Copy from the taps' buffer to the board, and pin the board's memory.

        Args:
            buffer: The scores of a step's rows on the device, float32 [rows, MAX_PROBE_OUTPUTS].
            board: The board, float32 [elements].
            max_requests: Most requests of a step.

        Raises:
            RuntimeError: The memory cannot be pinned.
        """
        self._pinned = board
        code = torch.cuda.cudart().cudaHostRegister(board.ctypes.data, board.nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(
                f"The score board ({board.nbytes} bytes of shared memory) cannot be pinned: cudaHostRegister failed "
                f"with {int(code)}. Raise the limit of locked memory (ulimit -l), or lower --score-mib."
            )
        self._tables = torch.zeros(_TABLES, max_requests, RUN_FIELDS, dtype=torch.int64, pin_memory=True)
        self._views: list[npt.NDArray[np.int64]] = list(self._tables.numpy())
        self._parts = list(self._tables)
        self._read = (torch.cuda.Event(), torch.cuda.Event())  # one for each half of the tables, as in `tap.Stages`
        self._stream = CurrentStream(buffer.device)
        self._turn = -1
        self._launch = ScoreLaunch(buffer, HostPointer(board.ctypes.data, torch.float32))

    def copy(self, runs: npt.NDArray[np.int64]) -> None:
        """See `ScoreCopies.copy`."""
        self._turn = (self._turn + 1) % _TABLES
        half, at = divmod(self._turn, _TABLES // 2)
        if at == 0:
            self._read[half].synchronize()  # returns at once: those kernels ran many steps ago
        self._views[self._turn][: len(runs)] = runs
        self._launch(self._parts[self._turn], len(runs))
        if at == _TABLES // 2 - 1:
            self._read[half].record(self._stream.get())


class ScoreLaunch:
    """Launches the kernel on the current stream."""

    def __init__(self, buffer: Tensor, board: HostPointer | Tensor) -> None:
        """Copy from a buffer, float32 [rows, MAX_PROBE_OUTPUTS], to a board, float32 [elements]."""
        self._pointers = buffer, board
        self._prepared: PreparedLaunch | None = None
        self._may_prepare = True

    def __call__(self, table: Tensor, count: int) -> None:
        """Copy the first `count` runs of a table, int64 [runs, RUN_FIELDS], at an address that is a multiple of 16."""
        if self._prepared is not None:
            self._prepared(_PROGRAMS, table.data_ptr(), count)
            return
        arguments = table, count, *self._pointers
        _launch_copy((_PROGRAMS, 1, 1), arguments, _CONSTANTS, num_warps=_WARPS)
        if self._may_prepare and _launch_copy.may_prepare([table.data_ptr()]):
            self._prepared = _launch_copy.prepare(arguments, _CONSTANTS, changing=2, num_warps=_WARPS)
            self._may_prepare = False


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator, unused-ignore]
def _copy_kernel(table, count, buffer, board, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    for index in range(program // _LINE_PROGRAMS, count, _RUN_PROGRAMS):
        run = table + index * _FIELDS
        row, rows = tl.load(run), tl.load(run + 1).to(tl.int32)
        column, columns = tl.load(run + 2), tl.load(run + 3)
        line, stride = tl.load(run + 4), tl.load(run + 5)
        for block in range(program % _LINE_PROGRAMS, tl.cdiv(rows, ROWS), _LINE_PROGRAMS):
            lines = block * ROWS + tl.arange(0, ROWS)[:, None]
            numbers = column + tl.arange(0, SCORE_COLUMNS)[None, :]
            mask = (lines < rows) & (numbers < column + columns)
            values = tl.load(buffer + (row + lines) * SCORE_COLUMNS + numbers, mask=mask)
            tl.store(board + line + lines * stride + numbers, values, mask=mask)


_launch_copy = Launcher(_copy_kernel)
