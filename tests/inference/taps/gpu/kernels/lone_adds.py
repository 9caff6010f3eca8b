"""Checks that an operation which only adds its vector gives the same bits next to operations that move nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.gpu.kernels import resident
from inference_svc.taps.plan import Gate, Kind, Measure, Operation
from residuum.wire.limits import MAX_PROBE_OUTPUTS
from tests.inference.taps.steering_cases import POINT, make_case, make_tables, same_bits, scoring
from tests.inference.taps_support import CPU, select

if TYPE_CHECKING:
    from collections.abc import Callable


def norm(hidden: torch.Tensor, residual: torch.Tensor | None, point: int, tables: resident.KernelTables) -> None:
    """Steer rows in place, by the kernel that also norms them."""
    residual = torch.zeros_like(hidden) if residual is None else residual
    weight = torch.ones_like(hidden[0])
    hidden.copy_(resident.tap_norm(hidden, residual, weight, 1e-5, point, tables, plus_one=False)[1])


def check_lone_adds(
    tap: Callable[..., None], dtype: torch.dtype, hidden: int, seed: int, device: torch.device = CPU
) -> None:
    """Steer equal rows by such lists of operations, and check that they and their copies in blocks are equal."""
    add = Operation(Kind.ADD, 2, (0,), select(), 1.5, 0.0, 0.0)
    closed = [
        Operation(kind, 3, (0,), select(), 2.0, 1.0, 1.0, gate=Gate(4, 1e30, math.inf, Measure.PROJECTION))
        for kind in (Kind.ADD, Kind.SET, Kind.MULTIPLY)
    ]
    idle = [*closed, scoring(1, 3)]
    lists = [
        [add],
        *([other, add] for other in idle),
        *([add, other] for other in idle),
        [idle[1], idle[3], add, idle[2]],
    ]
    for has_residual in (False, True):
        case = make_case(seed, dtype, len(lists), hidden, 1, has_residual=has_residual)
        case.operations = lists
        case.vectors[2] /= np.linalg.norm(case.vectors[2])  # a long one would move rows far, which is another path
        rows = case.hidden[:1].expand(len(lists), -1).to(device, copy=True)
        residual = None if case.residual is None else case.residual[:1].expand(len(lists), -1).to(device, copy=True)
        pool = BlockPool(len(lists), hidden, dtype, device, 0)
        tables = make_tables(case.layout(captured=True), len(lists), case.bank(device), pool)
        scores = torch.zeros(len(lists), MAX_PROBE_OUTPUTS, device=device)
        tap(rows, residual, POINT, replace(tables, scores=scores))
        assert not torch.equal(rows[0].cpu(), case.hidden[0])
        for row, operations in enumerate(lists):
            assert same_bits(rows[row], rows[0]), operations
            assert same_bits(pool.memory[row], pool.memory[0]), operations
