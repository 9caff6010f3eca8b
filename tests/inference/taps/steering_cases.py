"""Random rows with random operations, and the expected results in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.operations import reach
from inference_svc.taps.plan import STEERING_KINDS, Gate, Kind, Measure, Operation
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import NOWHERE, PLACE, PROGRAM, ROW, StepLayout
from inference_svc.taps.steps.programs import Program, Step
from residuum.v1 import capture_pb2
from tests.inference.taps_support import CPU, feature_of, measured, open_gate, select, steer

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference_svc.taps.gpu.kernels.resident import KernelTables

POINTS = TapPoints(0, 1)
POINT = POINTS.after(0)
VECTORS = 8
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SMALLEST = {torch.float32: 0.0, torch.float16: 2.0**-24, torch.bfloat16: 0.0}


@dataclass
class Case:
    """The rows of a batch, and the operations of each row."""

    hidden: torch.Tensor
    residual: torch.Tensor | None
    operations: list[list[Operation]]
    vectors: np.ndarray

    def bank(self, device: torch.device = CPU) -> VectorBank:
        bank = VectorBank(len(self.vectors), self.vectors.shape[1], device)
        bank.load((row, vector.tobytes()) for row, vector in enumerate(self.vectors))
        return bank

    def layout(self, *, captured: bool = False, before_steering: bool = False) -> StepLayout:
        """Every row belongs to a separate request. As in the engine, rows with equal operations share a program.

        Args:
            captured: Capture each row at POINT, as the pool's row of the same number.
            before_steering: Capture rows as they are before steering.
        """
        numbers: dict[Program, int] = {}
        lines = []
        for row, operations in enumerate(self.operations):
            if operations or captured:
                places = ((capture_pb2.SITE_RESID_POST, (0,)),) if captured else ()
                steps = [Step.of(operation) for operation in operations]
                program = Program.make(places, before_steering=before_steering, steps=steps)
                lines.append((row, numbers.setdefault(program, len(numbers)), row if captured else NOWHERE, 1))
        return StepLayout(list(numbers), np.array(lines, dtype=np.int64).reshape(-1, 4))

    def check(self, steered: torch.Tensor, roundings: float = 1.0) -> None:
        """Compare a tap's result for `hidden` with float64.

        Rows without operations must keep their bits, and so must rows for which all gates are closed.

        Args:
            steered: The tap's result.
            roundings: The largest error, in half units of the dtype's last digit.
        """
        for row, operations in enumerate(self.operations):
            if not operations:
                assert same_bits(steered[row], self.hidden[row])
                continue
            before = self.hidden[row].double().numpy()
            delayed = 0.0 if self.residual is None else self.residual[row].double().numpy()
            moved, error = expected(before + delayed, operations, self.vectors)
            if not error:
                assert same_bits(steered[row], self.hidden[row]), (row, operations)
            bounds = np.maximum(np.abs(before + delayed), reach(self.hidden.dtype))
            moved = np.clip(moved, -bounds, bounds)
            wanted = moved - delayed
            rounding = ROUNDING[self.hidden.dtype] * np.abs(wanted) + _SMALLEST[self.hidden.dtype]
            difference = np.abs(steered[row].double().numpy() - wanted)
            assert (difference <= 1.01 * roundings * rounding + error).all(), (row, operations, difference.max(), error)


def expected(x: np.ndarray, operations: list[Operation], vectors: np.ndarray) -> tuple[np.ndarray, float]:
    """Return a row after its operations in float64, and the largest error that float32 may have.

    The error is 0 if the gates of all operations are closed, beyond any doubt.
    """
    start, error = np.linalg.norm(x), 0.0
    for operation in operations:
        doubt = 0.0
        if operation.kind == Kind.CLAMP:
            doubt, is_idle = clamp_error(x, error, operation, vectors)
            if is_idle:
                continue
        elif operation.gate is not None:
            doubt = gate_error(x, error, operation.gate, vectors)
            if not doubt and not open_gate(x, operation.gate, vectors):
                continue
        vector = vectors[operation.row].astype(np.float64)
        plain = steer(x, replace(operation, keep_norm=False), vectors)
        bounds = [abs(bound) for bound in (operation.low, operation.high) if math.isfinite(bound)]
        size = np.linalg.norm(x) + np.linalg.norm(plain) + abs(operation.scale) * np.linalg.norm(vector) + sum(bounds)
        grows = np.abs(vector).max() if operation.kind == Kind.MULTIPLY else 2 + abs(operation.scale)
        later = grows * error + 1e-6 * size + doubt * (np.linalg.norm(vector) if operation.kind == Kind.CLAMP else size)
        if operation.keep_norm and np.linalg.norm(plain):
            # If little is left of the row, rescaling also scales up its error.
            factor = np.linalg.norm(x) / np.linalg.norm(plain)
            later = 2 * factor * later + error + 1e-6 * np.linalg.norm(x)
        x, error = steer(x, operation, vectors), later
    return x, error + 1e-6 * start if error else 0.0


def clamp_error(x: np.ndarray, error: float, operation: Operation, vectors: np.ndarray) -> tuple[float, bool]:
    """Return the largest error of a CLAMP's factor, and whether the factor is certainly 0."""
    gate = operation.gate
    assert gate is not None
    length = np.linalg.norm(vectors[gate.row].astype(np.float64))
    slack = length * (1e-6 * np.linalg.norm(x) + error * math.sqrt(len(x))) + 1e-6 * (
        abs(gate.sharpness) + abs(gate.threshold)
    )
    output = x @ vectors[gate.row].astype(np.float64) + gate.sharpness
    values = [0.0] if output <= gate.threshold + slack else []
    if output > gate.threshold - slack:
        values += [output - slack, output + slack]
    moves = [min(max(value, operation.low), operation.high) - value for value in values]
    exact = min(max(feature_of(x, gate, vectors), operation.low), operation.high) - feature_of(x, gate, vectors)
    return max(abs(move - exact) for move in moves) + 1e-6 * abs(exact), not any(moves)


def scoring(row: int, column: int) -> Operation:
    """Return the operation that writes the inner product with a vector of the bank into a column of the scores."""
    return Operation(Kind.SCORE, row, (0,), select(), column=column)


def gate_error(x: np.ndarray, error: float, gate: Gate, vectors: np.ndarray) -> float:
    """Return the largest error of how far a gate is open, if the elements of x have an error.

    If it may be open or closed, that is 1. If it is certainly open or closed, and not in between, that is 0.
    """
    units = np.linalg.norm(vectors[gate.row].astype(np.float64)) if gate.measure == Measure.INNER_PRODUCT else 1.0
    if gate.measure == Measure.COSINE:
        units = 1 / np.linalg.norm(x) if x.any() else 0.0
    score = units * (1e-6 * np.linalg.norm(x) + error * math.sqrt(len(x))) + 1e-6 * abs(gate.threshold)
    if math.isinf(gate.sharpness):
        return float(abs(measured(x, gate, vectors) - gate.threshold) <= score)
    return min(1.0, abs(gate.sharpness) * score + 1e-6)


def make_case(seed: int, dtype: torch.dtype, rows: int, hidden: int, most: int, *, has_residual: bool) -> Case:
    """Return a case of rows with 0 to `most` operations each."""
    rng = np.random.default_rng(seed)
    vectors = (rng.standard_normal((VECTORS, hidden)) * 10.0 ** rng.integers(-3, 3, (VECTORS, 1))).astype("<f4")
    values = torch.from_numpy(rng.standard_normal((2, rows, hidden)) * 10.0 ** rng.integers(-2, 2, (2, rows, 1)))
    residual = values[1].to(dtype) if has_residual else None
    operations = [
        [make_operation(rng) for _ in range(int(rng.integers(1, most + 1)) if rng.random() < 0.8 else 0)]
        for _ in range(rows)
    ]
    return Case(values[0].to(dtype), residual, operations, vectors)


def make_operation(rng: np.random.Generator) -> Operation:
    low, high = sorted(float(np.float32(bound)) for bound in rng.standard_normal(2) * 3)
    low, high = [(low, high), (-math.inf, high), (low, math.inf), (low, low)][rng.integers(4)]
    kinds = (*STEERING_KINDS, Kind.CLAMP)
    kind = kinds[int(rng.integers(len(kinds)))]
    row, keeps_norm = int(rng.integers(VECTORS)), bool(rng.random() < 0.3)
    scale = float(np.float32(rng.standard_normal())) if kind in (Kind.ADD, Kind.ABLATE) else 1.0
    gate = make_gate(rng) if rng.random() < 0.4 else None
    if kind == Kind.CLAMP:
        bias, threshold = (float(np.float32(number)) for number in rng.standard_normal(2))
        gate = Gate(int(rng.integers(VECTORS)), max(threshold, 0.0), bias, Measure.FEATURE)
    return Operation(kind, row, (0,), select(), scale, low, high, keeps_norm, gate=gate)


def make_gate(rng: np.random.Generator) -> Gate:
    """Return a gate that is open for some rows and closed for others."""
    measure, row = Measure(int(rng.integers(len(Measure) - 1))), int(rng.integers(VECTORS))
    threshold = float(np.float32(rng.standard_normal() * (0.1 if measure == Measure.COSINE else 1.0)))
    sharpness = float(np.float32(10.0 ** rng.integers(-2, 2))) if rng.random() < 0.5 else math.inf
    return Gate(row, threshold, sharpness if rng.random() < 0.7 else -sharpness, measure)


def idle_operations() -> list[Operation]:
    """Operations that move nothing: because of their numbers, or because their gates are closed."""
    kinds = [(Kind.ADD, 0.0, 0.0, 0.0), (Kind.ABLATE, 0.0, 0.0, 0.0), (Kind.CAP, 1.0, -math.inf, math.inf)]
    idle = [
        Operation(kind, row, (0,), select(), scale, low, high, keeps_norm)
        for row, (kind, scale, low, high) in enumerate(kinds)
        for keeps_norm in (False, True)
    ]
    closed = [
        Gate(1, 1e30, math.inf, Measure.PROJECTION),
        Gate(2, -1e30, -math.inf, Measure.INNER_PRODUCT),
        Gate(3, 1.5, math.inf, Measure.COSINE),
        Gate(4, 1.5, 1e30, Measure.COSINE),
        Gate(5, -1.5, -math.inf, Measure.COSINE),
    ]
    off = Gate(6, 1e30, 0.5, Measure.FEATURE)
    idle += [
        Operation(Kind.CLAMP, 7, (0,), select(), 1.0, low, high, keep_norm=keeps_norm, gate=off)
        for low, high, keeps_norm in ((0.0, 0.0, True), (-math.inf, 4.0, False))
    ]
    return idle + [
        Operation(kind, 0, (0,), select(), 2.0, 3.0, 3.0, keep_norm=kind % 2 == 1, gate=gate)
        for kind, gate in zip(STEERING_KINDS, closed, strict=True)
    ]


def check_overflow(case: Case, steer_rows: Callable[[Case], torch.Tensor]) -> None:
    """Check that rows are finite after any operations, and as large as the limit allows."""
    dtype, huge = case.hidden.dtype, 3e38
    case.vectors[0] *= 1e30 / np.abs(case.vectors[0]).max()
    case.vectors[1] = np.eye(1, case.vectors.shape[1])  # zeros next to elements that overflow
    ways = [(Kind.ADD, huge, 0.0, 0.0), (Kind.ABLATE, -huge, 0.0, 0.0), (Kind.CAP, 1.0, huge, huge)]
    operations = [
        Operation(kind, vector, (0,), select(), scale, low, high, keeps_norm)
        for kind, scale, low, high in ways
        for vector in (0, 1, 2)
        for keeps_norm in (False, True)
    ]
    case.operations = [[operations[(row + at) % len(operations)] for at in range(1 + row % 4)] for row in range(24)]
    steered = steer_rows(case)
    assert steered.isfinite().all()
    delayed = torch.zeros_like(steered) if case.residual is None else case.residual
    rows = steered.double() + delayed.double()
    most = min(1e16, torch.finfo(dtype).max / 2) * (1 + 2.0**-7)
    assert (rows.abs() <= most).all()
    far = [[Operation(Kind.ADD, 2, (0,), select(), huge, 0.0, 0.0)]] * 24
    signs = torch.from_numpy(np.sign(case.vectors[2]))
    rows = steer_rows(Case(case.hidden, case.residual, far, case.vectors)).double() + delayed.double()
    assert (rows * signs >= most * (1 - 2.0**-6)).all()


def awkward_rows(dtype: torch.dtype, rows: int, hidden: int, seed: int) -> torch.Tensor:
    """Rows of very different sizes, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, hidden)) * 10.0 ** rng.integers(-9, 4, (rows, hidden))
    values[rng.random((rows, hidden)) < 0.2] = 0.0
    return torch.from_numpy(np.copysign(values, rng.standard_normal((rows, hidden)))).to(dtype)


def neighbours(case: Case, mine: int, seed: int) -> Case:
    """Return the same case with other rows and operations around one row, in a batch of the same shape."""
    other = make_case(
        seed, case.hidden.dtype, len(case.hidden), case.hidden.shape[1], 8, has_residual=case.residual is not None
    )
    other.vectors = case.vectors
    other.hidden[mine] = case.hidden[mine]
    if case.residual is not None and other.residual is not None:
        other.residual[mine] = case.residual[mine]
    other.operations[mine] = case.operations[mine]
    return other


def make_tables(
    layout: StepLayout, count: int, bank: VectorBank, pool: BlockPool | None = None, points: TapPoints = POINTS
) -> KernelTables:
    """Return the kernels' tables for a step of `count` rows, on the bank's device."""
    from inference_svc.taps.gpu.kernels.resident import KernelTables  # tests of the CPU's tap run without Triton
    from inference_svc.taps.gpu.tables import ROW_FIELDS, ProgramTable

    device = bank.vectors.device
    table = ProgramTable(128, 1024, points, device)
    rows = torch.full((count, ROW_FIELDS), -1, dtype=torch.int32)
    numbers = table.place(layout.programs)
    rows[layout.lines[:, ROW], 0] = torch.from_numpy(numbers[layout.lines[:, PROGRAM]].astype(np.int32))
    rows[layout.lines[:, ROW], 1:3] = torch.from_numpy(layout.lines[:, PLACE:].astype(np.int32))
    rows[layout.lines[:, ROW], 3] = torch.from_numpy(table.is_busy[numbers][layout.lines[:, PROGRAM]])
    # Less scratch memory than rows: the chunked kernel takes several rows one after the other.
    scratch = torch.empty(-(-count // 3), bank.vectors.shape[1], device=device)
    return KernelTables(rows.to(device), table, bank, pool, scratch)


def check_large_residual(dtype: torch.dtype, hidden: int, steer_rows: Callable[[Case], torch.Tensor]) -> None:
    """Check that rows stay finite where the residual is far from the steered row, and that NaN stays."""
    residual = torch.full((2, hidden), 6e4).to(dtype)
    rows = torch.zeros_like(residual)
    rows[1, 0] = torch.nan
    far = Operation(Kind.ADD, 0, (0,), select(), -1e5)
    steered = steer_rows(Case(rows, residual, [[far], [far]], np.ones((1, hidden), np.float32)))
    assert steered[1, 0].isnan()
    assert steered.isfinite().sum() == (steered + residual < 0).sum() == 2 * hidden - 1


def check_gathered_norm(dtype: torch.dtype, hidden: int, steer_rows: Callable[[Case], torch.Tensor]) -> None:
    """Check that rows stay finite if an operation gathers their norm in one element."""
    rows = torch.zeros(1, hidden).to(dtype)
    rows[0, :2] = 5e4
    kept = Operation(Kind.SET, 0, (0,), select(), keep_norm=True)
    case = Case(rows, torch.zeros_like(rows), [[kept]], np.eye(1, hidden, 1, dtype=np.float32))
    bound = max(5e4, reach(dtype))
    assert float(steer_rows(case)[0, 1]) == pytest.approx(min(5e4 * math.sqrt(2), bound), rel=0.01)


def check_long_vectors(dtype: torch.dtype, hidden: int, steer_rows: Callable[[Case], torch.Tensor]) -> None:
    """Check that a row keeps its norm beside a vector whose squares are beyond float32."""
    rows = torch.ones(3, hidden).to(dtype)
    scales = (1e18, -1e25, 3e38)
    operations = [[Operation(Kind.ADD, 0, (0,), select(), scale, keep_norm=True)] for scale in scales]
    got = steer_rows(Case(rows, None, operations, np.eye(1, hidden, 1, dtype=np.float32))).double().numpy()
    wanted = np.zeros((3, hidden))
    wanted[:, 1] = math.sqrt(hidden) * np.sign(scales)
    np.testing.assert_allclose(got, wanted, rtol=2 * ROUNDING[dtype], atol=1e-6)


def check_set(dtype: torch.dtype, hidden: int, steer_rows: Callable[[Case], torch.Tensor]) -> None:
    """Check that rows without a residual are set exactly, also where they replace far larger numbers or infinities."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.choice([3e4, -3e4, 1.0], (4, hidden))).to(dtype)
    rows[1, 0] = torch.inf
    vectors = torch.from_numpy(rng.standard_normal((1, hidden)) * 1e-4).to(dtype).float().numpy()
    case = Case(rows, None, [[Operation(Kind.SET, 0, (0,), select())]] * 4, vectors)
    assert (steer_rows(case).float().numpy() == vectors).all()


def check_captured(case: Case, tap: Callable[..., None], device: torch.device = CPU, *, before_steering: bool) -> None:
    """Check that captured rows are those that the model computes from what a tap returns, or gets, bit by bit.

    The first row becomes another one, so that there is one that is certainly steered.
    """
    case = replace(case, operations=[[Operation(Kind.SET, 0, (0,), select(), 1.0, 0.0, 0.0)], *case.operations[1:]])
    (rows, width), dtype = case.hidden.shape, case.hidden.dtype
    residual = None if case.residual is None else case.residual.to(device)
    pool = BlockPool(rows, width, dtype, device, 0)
    layout = case.layout(captured=True, before_steering=before_steering)
    hidden = case.hidden.to(device, copy=True)
    tap(hidden, residual, POINT, make_tables(layout, rows, case.bank(device), pool))
    assert not torch.equal(hidden[0].cpu(), case.hidden[0])
    seen = case.hidden.to(device) if before_steering else hidden
    wanted = seen if residual is None else (seen.float() + residual.float()).to(dtype)
    assert same_bits(pool.memory[:rows], wanted)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
