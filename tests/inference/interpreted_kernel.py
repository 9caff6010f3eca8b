"""Runs the GPU's kernel on the CPU, in Triton's interpreter, beside the CPU's tap; prints the largest differences.

A program of its own: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys

import numpy as np
import torch

from inference_svc.taps import kernel
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu import CpuTap
from inference_svc.taps.layout import NOWHERE, ProgramRows, StepLayout
from inference_svc.taps.plan import Kind
from inference_svc.taps.programs import Program, Step
from inference_svc.taps.tables import ProgramTable

LAYERS, ROWS, CPU = 3, 12, torch.device("cpu")


def main() -> None:
    """Print {dtype: [largest difference in hidden, in captured rows]}, relative to the largest value."""
    rng = np.random.default_rng(0)
    json.dump({name: differences(rng, getattr(torch, name)) for name in ("float32", "bfloat16")}, sys.stdout)


def differences(rng: np.random.Generator, dtype: torch.dtype) -> list[float]:
    worst = [0.0, 0.0]
    for hidden, has_residual in ((48, True), (64, False)):
        bank = VectorBank(8, hidden, CPU)
        bank.load([(row, rng.standard_normal(hidden).astype("<f4").tobytes()) for row in range(8)])
        pools = [BlockPool(2, LAYERS, hidden, dtype, CPU) for _ in range(2)]
        parts = random_parts(rng)
        cpu = CpuTap(bank, pools[0], 0)
        cpu.arm(StepLayout(parts=parts))
        table = ProgramTable(32, 256, LAYERS, 0, CPU)
        rows = torch.full((2, ROWS), -1, dtype=torch.int32)
        for part in parts:
            rows[0, part.rows] = table.number(part.program)
            rows[1, part.rows] = torch.from_numpy(part.places.astype(np.int32))
        for layer in range(LAYERS):
            states = torch.randn(ROWS, hidden).to(dtype)
            residual = torch.randn(ROWS, hidden).to(dtype) if has_residual else None
            expected, got = states.clone(), states.clone()
            cpu.tap(expected, residual, layer)
            kernel.launch(got, residual, layer, rows, table, bank, pools[1])
            worst[0] = max(worst[0], distance(got, expected))
        worst[1] = max(worst[1], distance(pools[1].memory, pools[0].memory))
    return worst


def random_parts(rng: np.random.Generator) -> list[ProgramRows]:
    """Return parts that cover all but the last two rows: those must stay as they are."""
    order, parts, place = rng.permutation(ROWS - 2), [], 0
    for chosen in np.split(order, [3, 4, 8]):
        rows = np.sort(chosen).astype(np.int64)
        steps = [
            Step(Kind(kind), int(rng.integers(8)), tuple(range(int(rng.integers(LAYERS)) + 1)), 0.7, -0.5, 0.5)
            for kind in rng.permutation(3)[: int(rng.integers(4))]
        ]
        layers = tuple(sorted({int(layer) for layer in rng.integers(LAYERS, size=2)}))
        program = Program.make(layers, before_steering=bool(rng.integers(2)), steps=steps)
        parts.append(ProgramRows(program, rows, np.arange(place, place + len(rows))))
        place += len(rows)
    steered = Program.make((), before_steering=False, steps=[Step(Kind.ADD, 0, (0, 2), 2.0, 0.0, 0.0)])
    parts[0] = ProgramRows(steered, parts[0].rows, np.full(len(parts[0].rows), NOWHERE))
    return parts


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


if __name__ == "__main__":
    main()
