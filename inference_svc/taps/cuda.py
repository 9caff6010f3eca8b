"""The tap on a GPU: what a step uploads, and the kernel that reads it inside the CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inference_svc.taps import kernel
from inference_svc.taps.layout import NOWHERE
from inference_svc.taps.tables import ProgramTable

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.layout import ProgramRows, StepLayout

_PROGRAMS = 4096
_ENTRIES = 65_536
_STAGES = 4
"""Staging buffers: the engine prepares a step while earlier ones still run, and must not write over what they read."""
_NO_PROGRAM = -1


class CudaTap:
    """Steers and captures rows in place, by tables at fixed addresses.

    Steps that touch nothing upload nothing: the rows stand at "nothing" until a step that does, and are put back once
    after it.
    """

    def __init__(self, bank: VectorBank, pool: BlockPool | None, layers: range, max_rows: int) -> None:
        """Make the tap.

        Args:
            bank: The vectors.
            pool: Where captured rows go; None on a rank that only steers.
            layers: The layers of this pipeline stage.
            max_rows: Rows of the largest batch, padding included.
        """
        device = bank.vectors.device
        self._bank = bank
        self._pool = pool
        self._first_layer = layers.start
        self._table = ProgramTable(_PROGRAMS, _ENTRIES, len(layers), layers.start, device)
        # Each row's program and place; the kernel reads them at this address.
        self._rows = torch.full((2, max_rows), _NO_PROGRAM, dtype=torch.int32, device=device)
        self._stages = [_Stage(max_rows) for _ in range(_STAGES)]
        self._turn = 0
        self._armed_rows = 0

    def arm(self, layout: StepLayout) -> None:
        """Take over what the next run of the model does."""
        if not layout.parts:
            self.disarm()
            return
        rows = 1 + max(int(part.rows.max()) for part in layout.parts)
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % _STAGES
        self._table.begin_step()
        numbers = [self._table.number(part.program) for part in layout.parts]
        stage.fill(layout.parts, numbers, max(rows, self._armed_rows))
        stage.upload(self._rows, max(rows, self._armed_rows))
        self._armed_rows = rows

    def disarm(self) -> None:
        """Let the next runs of the model pass through."""
        if self._armed_rows:
            self._rows[:, : self._armed_rows].fill_(_NO_PROGRAM)
            self._armed_rows = 0

    def tap(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        """Steer and capture after a layer; `hidden` and `residual` are [rows, hidden]."""
        kernel.launch(hidden, residual, layer - self._first_layer, self._rows, self._table, self._bank, self._pool)


class _Stage:
    """Pinned memory from which one step's rows are uploaded."""

    def __init__(self, max_rows: int) -> None:
        self._memory = torch.empty(2, max_rows, dtype=torch.int32, pin_memory=True)
        self._view = self._memory.numpy()
        self._uploaded = torch.cuda.Event()

    def fill(self, parts: list[ProgramRows], numbers: list[int], count: int) -> None:
        """Write the rows of a step; rows up to `count` that are in no part stand at "nothing"."""
        self._uploaded.synchronize()  # of four steps ago: it is long done
        programs, places = self._view
        programs[:count] = _NO_PROGRAM
        places[:count] = NOWHERE
        for part, number in zip(parts, numbers, strict=True):
            programs[part.rows] = number
            places[part.rows] = part.places

    def upload(self, target: Tensor, count: int) -> None:
        """Copy the first `count` rows to the device."""
        for line in range(2):
            target[line, :count].copy_(self._memory[line, :count], non_blocking=True)
        self._uploaded.record()
