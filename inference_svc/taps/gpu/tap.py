"""The tap on a GPU: it uploads the tables of a step, and calls the kernels that read them inside CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.gpu import kernel
from inference_svc.taps.gpu.tables import ProgramTable
from inference_svc.taps.steps.demand import MAX_ENTRIES
from inference_svc.taps.steps.layout import PLACE, PROGRAM, ROW

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.steps.layout import StepLayout
    from inference_svc.taps.steps.programs import Program

_SPARE_PROGRAMS = 1024
"""Room for programs that the current step does not use, so that later steps need not write them again."""
_STAGES = 4
"""Number of staging buffers. The engine prepares a step while uploads of earlier steps still read theirs."""
_NO_PROGRAM = -1


class CudaTap:
    """Steers and captures rows in place, as tables at fixed addresses say.

    Steps without work for the taps upload nothing. The first of them after steps with work resets the rows' programs
    (`disarm`).
    """

    def __init__(
        self, bank: VectorBank, pool: BlockPool | None, points: TapPoints, max_rows: int, max_requests: int
    ) -> None:
        """Make the tap of one pipeline stage.

        Args:
            bank: The active vectors.
            pool: The pool for captured rows; None on a rank that only steers.
            points: The stage's tap points.
            max_rows: Most rows of a step, including padding.
            max_requests: Most requests that run at once.
        """
        device = bank.vectors.device
        # One program for each row, not MAX_PROGRAMS for each request: a preempted request whose steering has changed
        # several times may need more.
        programs = max_rows + _SPARE_PROGRAMS
        self._programs = ProgramTable(programs, MAX_ENTRIES * max_requests, points, device)
        rows = torch.full((max_rows, kernel.ROW_FIELDS), _NO_PROGRAM, dtype=torch.int32, device=device)
        self._tables = kernel.KernelTables(rows, self._programs, bank, pool)
        self._stages = [_Stage(rows) for _ in range(_STAGES)]
        self._turn = 0
        self._armed_rows = 0
        self._placed: list[Program] | None = None
        self._numbers = np.zeros(0, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables on the device."""
        return self._programs.nbytes + int(self._tables.rows.nbytes)

    def arm(self, layout: StepLayout) -> None:
        """See `DeviceTap.arm`."""
        rows = 1 + int(layout.lines[:, ROW].max())
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % _STAGES
        if layout.programs is not self._placed:  # a steady batch keeps the same list object
            self._numbers, self._placed = self._programs.place(layout.programs), layout.programs
        numbers = self._numbers
        stage.fill(layout.lines, numbers, self._programs.is_busy[numbers], max(rows, self._armed_rows))
        stage.upload(max(rows, self._armed_rows))
        self._armed_rows = rows

    def disarm(self) -> None:
        """See `DeviceTap.disarm`."""
        if self._armed_rows:
            self._tables.rows[: self._armed_rows].fill_(_NO_PROGRAM)
            self._armed_rows = 0

    def tap(self, hidden: Tensor, residual: Tensor | None, point: int) -> None:
        """See `op.Tap.tap`."""
        kernel.tap(hidden, residual, point, self._tables)

    def tap_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float, point: int, *, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """See `op.Tap.tap_norm`."""
        return kernel.tap_norm(hidden, residual, weight, epsilon, point, self._tables, plus_one=plus_one)


class _Stage:
    """A staging buffer: pinned memory from which one step's rows are uploaded."""

    def __init__(self, target: Tensor) -> None:
        """Make a buffer for the row table `target`, int32 [rows, ROW_FIELDS]."""
        self._target = target
        self._memory = torch.empty(len(target), kernel.ROW_FIELDS, dtype=torch.int32, pin_memory=True)
        self._view = self._memory.numpy()
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}  # views of the first rows of both, by their number
        self._uploaded = torch.cuda.Event()

    def fill(
        self,
        lines: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int32],
        is_busy: npt.NDArray[np.int32],
        count: int,
    ) -> None:
        """Write the rows of a step. Rows below `count` without a line get no program.

        Args:
            lines: See `StepLayout.lines`.
            numbers: The number of each program in the tables.
            is_busy: Whether each program does something at more than half of the points.
            count: How many rows to write.
        """
        self._uploaded.synchronize()  # returns at once: that upload was _STAGES steps ago
        self._view[:count, 0] = _NO_PROGRAM
        rows = lines[:, ROW]
        self._view[rows, 0] = numbers[lines[:, PROGRAM]]
        self._view[rows, 1:3] = lines[:, PLACE:]
        self._view[rows, 3] = is_busy[lines[:, PROGRAM]]

    def upload(self, count: int) -> None:
        """Start to copy the first `count` rows to the device."""
        parts = self._parts.get(count)
        if parts is None:
            parts = self._parts[count] = (self._target[:count], self._memory[:count])
        target, source = parts
        target.copy_(source, non_blocking=True)
        self._uploaded.record()
