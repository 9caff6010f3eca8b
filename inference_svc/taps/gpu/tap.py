"""The tap on a GPU: it uploads the tables of a step, and calls the kernels that read them inside CUDA graphs."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.gpu import driver
from inference_svc.taps.gpu.kernels import chunked, resident
from inference_svc.taps.gpu.tables import ROW_FIELDS, ProgramTable
from inference_svc.taps.steps.demand import MAX_ENTRIES
from inference_svc.taps.steps.layout import PLACE, PROGRAM, ROW, as_slice
from inference_svc.taps.steps.steady import MOST_BATCHES

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.steps.layout import StepLayout

_SPARE_PROGRAMS = 1024
"""Room for programs that the current step does not use, so that later steps need not write them again."""
_STAGES = 16
"""Number of staging buffers, even. The engine prepares a step while uploads of earlier steps still read theirs."""
_NO_PROGRAM = -1
_ROW_BYTES = 4 * ROW_FIELDS


class CudaTap:
    """Steers and captures rows in place, as tables at fixed addresses say.

    Steps without work for the taps upload nothing. The first of them after steps with work resets the rows' programs
    (`disarm`).
    """

    def __init__(
        self,
        bank: VectorBank,
        pool: BlockPool | None,
        points: TapPoints,
        max_rows: int,
        max_requests: int,
        scores: Tensor | None = None,
    ) -> None:
        """Make the tap of one pipeline stage.

        Args:
            bank: The active vectors.
            pool: The pool for captured rows; None on a rank that only steers.
            points: The stage's tap points.
            max_rows: Most rows of a step, including padding.
            max_requests: Most requests that run at once.
            scores: Receives the scores of rows, float32 [rows, MAX_PROBE_OUTPUTS]; None if no row is scored.
        """
        device = bank.vectors.device
        # One program for each row, not MAX_PROGRAMS for each request: a preempted request whose steering has changed
        # several times may need more.
        programs = max_rows + _SPARE_PROGRAMS
        self._programs = ProgramTable(programs, MAX_ENTRIES * max_requests, points, device)
        rows = torch.full((max_rows, ROW_FIELDS), _NO_PROGRAM, dtype=torch.int32, device=device)
        scratch = chunked.scratch_for(bank.vectors.shape[1], device)
        self._tables = resident.KernelTables(rows, self._programs, bank, pool, scratch, scores)
        self._tap = resident.tap if scratch is None else chunked.tap
        self._stages = Stages(rows)
        self._armed_rows = 0
        self._armed: OrderedDict[int, _Armed] = OrderedDict()  # by `id` of their lines, least recently used first

    @property
    def nbytes(self) -> int:
        """Bytes of the tables on the device."""
        scratch = self._tables.scratch
        return self._programs.nbytes + int(self._tables.rows.nbytes) + (0 if scratch is None else scratch.nbytes)

    def arm(self, layout: StepLayout) -> None:
        """See `DeviceTap.arm`."""
        armed = self._armed_of(layout)
        rows = len(armed.fields)
        table = self._stages.take()
        if rows < self._armed_rows:
            table[rows : self._armed_rows, 0] = _NO_PROGRAM
        table[:rows] = armed.fields
        table[armed.rows, 1:3] = layout.lines[:, PLACE:]
        self._stages.upload(max(rows, self._armed_rows))
        self._armed_rows = rows

    def _armed_of(self, layout: StepLayout) -> _Armed:
        """Return the fields that stay the same while a steady batch goes on: it keeps the array of its lines."""
        armed = self._armed.pop(id(layout.lines), None)
        if armed is None or armed.version != self._programs.version:
            numbers = self._programs.place(layout.programs)
            armed = _Armed(layout.lines, numbers, self._programs.is_busy[numbers], self._programs.version)
        self._armed[id(layout.lines)] = armed
        if len(self._armed) > MOST_BATCHES:
            self._armed.popitem(last=False)
        return armed

    def disarm(self) -> None:
        """See `DeviceTap.disarm`."""
        if self._armed_rows:
            self._tables.rows[: self._armed_rows].fill_(_NO_PROGRAM)
            self._armed_rows = 0

    def tap(self, hidden: Tensor, residual: Tensor | None, point: int) -> None:
        """See `op.Tap.tap`."""
        self._tap(hidden, residual, point, self._tables)

    def tap_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float, point: int, *, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """See `op.Tap.tap_norm`."""
        return resident.tap_norm(hidden, residual, weight, epsilon, point, self._tables, plus_one=plus_one)

    def tap_copy(self, hidden: Tensor, point: int) -> Tensor:
        """See `op.Tap.tap_copy`."""
        return chunked.tap_copy(hidden, point, self._tables)

    def tap_experts(self, weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int) -> None:
        """See `op.Tap.tap_experts`."""
        chunked.tap_experts(weights, experts, num_experts, scale, point, self._tables)


class _Armed:
    """The fields of a layout's rows that stay the same while a steady batch goes on."""

    def __init__(
        self,
        lines: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int32],
        is_busy: npt.NDArray[np.int32],
        version: int,
    ) -> None:
        """Take a layout.

        Args:
            lines: Its lines. They are held, so that their `id` stays unique.
            numbers: The number of each of its programs in the tables.
            is_busy: Whether each program does something at more than half of the points.
            version: The version of the tables that have these numbers.
        """
        self._lines = lines
        self.version = version
        rows, programs = lines[:, ROW], lines[:, PROGRAM]
        self.rows = as_slice(rows)
        """The rows of the lines, as an index of numpy."""
        self.fields = np.zeros((1 + int(rows.max()), ROW_FIELDS), dtype=np.int32)
        """The fields, int32 [rows, ROW_FIELDS]. Place and stride are missing. Rows without a line have no program."""
        self.fields[:, 0] = _NO_PROGRAM
        self.fields[self.rows, 0] = numbers[programs]
        self.fields[self.rows, 3] = is_busy[programs]


class Stages:
    """The staging buffers: pinned memory from which the rows of steps are uploaded, one buffer after the other."""

    def __init__(self, target: Tensor) -> None:
        """Make buffers for the row table `target`, int32 [rows, ROW_FIELDS]."""
        self._target = target  # keeps the memory at its address
        self._is_on_host = not target.is_cuda  # for tests and `bench.host`, without a GPU
        self._memory = torch.empty(_STAGES, *target.shape, dtype=torch.int32, pin_memory=True)
        self._views: list[npt.NDArray[np.int32]] = list(self._memory.numpy())
        self._addresses = [buffer.data_ptr() for buffer in self._memory]
        self._target_address = target.data_ptr()
        self._stream = driver.CurrentStream(target.device)
        # One event for each half. An event for each buffer would cost each step two more calls of CUDA.
        self._uploaded = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = -1

    def take(self) -> npt.NDArray[np.int32]:
        """Return the next buffer, int32 [rows, ROW_FIELDS]."""
        self._turn = (self._turn + 1) % _STAGES
        half, at = divmod(self._turn, _STAGES // 2)
        if at == 0:
            self._uploaded[half].synchronize()  # returns at once: those uploads were many steps ago
        return self._views[self._turn]

    def upload(self, count: int) -> None:
        """Start to copy the first `count` rows of the buffer that was taken last to the device."""
        target, source, nbytes = self._target_address, self._addresses[self._turn], count * _ROW_BYTES
        if self._is_on_host:
            ctypes.memmove(target, source, nbytes)
        else:
            driver.queue_upload(target, source, nbytes, self._stream.get().cuda_stream)
        half, at = divmod(self._turn, _STAGES // 2)
        if at == _STAGES // 2 - 1:
            self._uploaded[half].record()
