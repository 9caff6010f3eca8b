"""Runs the GPU's kernels on the CPU, in Triton's interpreter, and prints the largest differences from the CPU's tap.

It also compares steered rows with float64, and fails if they differ too much.

It is a separate program, because Triton decides on import whether it interprets kernels. Its argument is the dtype of
the rows.
"""

from __future__ import annotations

import tests.triton_interpreter  # noqa: F401

# isort: split

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
import triton
import triton.language as tl

from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu.score_copies import CpuScoreCopies
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.gpu.kernels import chunked, resident
from inference_svc.taps.gpu.kernels.resident_rows import row_of
from inference_svc.taps.gpu.score_copies import ScoreLaunch
from inference_svc.taps.plan import Kind
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import NOWHERE, StepLayout
from inference_svc.taps.steps.programs import Program, Step
from residuum.v1 import capture_pb2
from residuum.wire.limits import MAX_PROBE_OUTPUTS
from tests.inference.taps import steering_cases as steering
from tests.inference.taps.gpu.kernels.lone_adds import check_lone_adds, norm

LAYERS, ROWS, CPU = 3, 12, torch.device("cpu")
POINTS = TapPoints(0, LAYERS)
SITES = (
    capture_pb2.SITE_RESID_POST,
    capture_pb2.SITE_RESID_PRE,
    capture_pb2.SITE_ATTN_OUT,
    capture_pb2.SITE_MLP_OUT,
)
CAPACITY = 7
"""Positions of a block: an odd number, and fewer than a real block has."""

Tap = Callable[[torch.Tensor, torch.Tensor | None, int, resident.KernelTables], None]


DTYPES = ("float32", "bfloat16", "float16")


def main(name: str) -> None:
    """Print {what was compared: [largest relative difference of the model's values, the same for captured rows]}."""
    chunked._CHUNK = 32  # so that short rows have several chunks
    dtype, number = getattr(torch, name), DTYPES.index(name)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    runs = {
        "tap": tap_differences,
        "chunked tap": chunked_tap_differences,
        "tap of float32": float32_tap_differences,
        "norm": norm_differences,
        "tap copy": tap_copy_differences,
        "tap experts": tap_experts_differences,
        "sums in threads": thread_sum_differences,
    }
    differences = {what: run(rng, dtype) for what, run in runs.items()}
    for seed, (has_residual, hidden) in enumerate(product((False, True), (2, 70, 96)), start=6 * number):
        tap = chunked.tap if (seed + seed // 6) % 2 else resident.tap
        rows = (1, 5, 24)[(seed + seed // 3) % 3]
        check_steering(steering.make_case(seed, dtype, rows, hidden, 8, has_residual=has_residual), seed, tap)
    for has_residual, tap in ((False, chunked.tap), (True, resident.tap)):
        case = steering.make_case(3, dtype, 24, 70, 1, has_residual=has_residual)
        steering.check_overflow(case, lambda case, tap=tap: steered(case, tap))
    for tap in (chunked.tap, resident.tap, norm):
        steering.check_gathered_norm(dtype, 70, lambda case, tap=tap: steered(case, tap))
        if dtype != torch.bfloat16:  # the interpreter truncates to it
            steering.check_long_vectors(dtype, 70, lambda case, tap=tap: steered(case, tap))
    for tap in (chunked.tap, resident.tap):
        steering.check_set(dtype, 70, lambda case, tap=tap: steered(case, tap))
        steering.check_large_residual(dtype, 70, lambda case, tap=tap: steered(case, tap))
    for seed, tap in enumerate((resident.tap, norm), start=2 * number):
        check_lone_adds(tap, dtype, 70, seed)
    if dtype == torch.float16:
        case = steering.make_case(3, dtype, 24, 70, 1, has_residual=False)
        steering.check_overflow(case, lambda case: normed(case, torch.zeros_like(case.hidden))[1])
    check_scores(dtype)
    check_rows_of_programs()
    json.dump(differences, sys.stdout)


@triton.jit
def _rows_kernel(rows, MULTIPROCESSORS: tl.constexpr):  # noqa: N803 - as in the kernels
    tl.store(rows + tl.program_id(0), row_of(tl.program_id(0), tl.num_programs(0), MULTIPROCESSORS))


def check_rows_of_programs() -> None:
    """Assert that each row belongs to one program, and that a multiprocessor has rows next to each other."""
    for programs, multiprocessors in product((1, 3, 4, 5, 11), (1, 3, 4, 132)):
        rows = torch.full((programs,), -1, dtype=torch.int32)
        _rows_kernel[(programs,)](rows, multiprocessors)
        assert sorted(rows.tolist()) == [*range(programs)]
        for first in range(min(programs, multiprocessors)):
            own = rows[first::multiprocessors].tolist()
            assert own == [*range(own[0], own[0] + len(own))]


def chunked_tap_differences(rng: np.random.Generator, dtype: torch.dtype) -> list[float]:
    return tap_differences(rng, dtype, chunked.tap, ((48, True), (70, False)))


def float32_tap_differences(rng: np.random.Generator, dtype: torch.dtype) -> list[float]:
    """Tap rows in float32, as those of a router can be, with a pool in the model's dtype."""
    del rng
    with torch.random.fork_rng():
        return tap_differences(np.random.default_rng(1), dtype, widths=((70, False),), rows=torch.float32)


def tap_differences(
    rng: np.random.Generator,
    dtype: torch.dtype,
    tap: Tap = resident.tap,
    widths: Sequence[tuple[int, bool]] = ((48, True), (72, True), (64, False), (112, True)),
    rows: torch.dtype | None = None,
) -> list[float]:
    worst = [0.0, 0.0]
    for hidden, has_residual in widths:
        cpu, gpu, pools = prepare(rng, hidden, dtype)
        for point in range(POINTS.count):
            states = torch.randn(ROWS, hidden).to(rows or dtype)
            residual = torch.randn(ROWS, hidden).to(dtype) if has_residual else None
            expected, got = states.clone(), states.clone()
            cpu.tap(expected, residual, point)
            tap(got, residual, point, gpu)
            worst[0] = max(worst[0], distance(got, expected))
        worst[1] = max(worst[1], distance(pools[1].memory, pools[0].memory))
    return worst


def thread_sum_differences(rng: np.random.Generator, dtype: torch.dtype) -> list[float]:
    """Tap rows whose inner products each thread sums over its own elements first, as those of models."""
    del rng
    with torch.random.fork_rng():
        torch.manual_seed(1)
        rng = np.random.default_rng(1)
        return [
            *tap_differences(rng, dtype, widths=((96, True), (160, False))),
            *norm_differences(rng, dtype, ((96, True), (160, False))),
        ]


def norm_differences(
    rng: np.random.Generator,
    dtype: torch.dtype,
    widths: Sequence[tuple[int, bool]] = ((48, True), (72, False), (64, False)),
) -> list[float]:
    worst = [0.0, 0.0]
    for hidden, plus_one in widths:
        cpu, gpu, pools = prepare(rng, hidden, dtype)
        weight = torch.randn(hidden).to(dtype)
        for layer in range(LAYERS):
            point = POINTS.after(layer)
            states, residual = torch.randn(ROWS, hidden).to(dtype), torch.randn(ROWS, hidden).to(dtype)
            expected = cpu.tap_norm(states, residual, weight, 1e-5, point, plus_one=plus_one)
            got = resident.tap_norm(states, residual, weight, 1e-5, point, gpu, plus_one=plus_one)
            worst[0] = max(worst[0], *(distance(*pair) for pair in zip(got, expected, strict=True)))
        worst[1] = max(worst[1], distance(pools[1].memory, pools[0].memory))
    return worst


def tap_copy_differences(rng: np.random.Generator, dtype: torch.dtype) -> list[float]:
    """Tap three slices of one tensor, as q, k and v often are."""
    worst = [0.0, 0.0]
    for width in (48, 70, 64):
        cpu, gpu, pools = prepare(rng, width, dtype)
        for pool in pools:
            pool.memory.zero_()
        whole = torch.randn(ROWS, 3 * width).to(dtype)
        for point, rows in enumerate(whole.split(width, dim=1)):
            expected = rows.clone()
            cpu._steering = {}  # it is only for points that cannot be steered
            for got in (cpu.tap_copy(rows, point), chunked.tap_copy(rows, point, gpu)):
                assert got.is_contiguous()
                worst[0] = max(worst[0], distance(got, expected))
        worst[1] = max(worst[1], distance(pools[1].memory, pools[0].memory))
        assert pools[0].memory.any()
    return worst


def tap_experts_differences(rng: np.random.Generator, dtype: torch.dtype) -> list[float]:
    """Tap the experts of a router that chooses few or all, or for padding none."""
    worst = 0.0
    for width, chosen, numbers in ((70, 3, torch.int32), (48, 48, torch.int64)):
        cpu, gpu, pools = prepare(rng, width, dtype, site=capture_pb2.SITE_ATTN_OUT)
        for pool in pools:
            pool.memory.zero_()
        cpu._steering = {}  # it is only for points that cannot be steered
        for layer in range(LAYERS):
            point = POINTS.of(capture_pb2.SITE_ATTN_OUT, layer)  # a point with one site, as that of the experts
            weights = torch.randn(ROWS, chosen)
            experts = torch.rand(ROWS, width).topk(chosen).indices.to(numbers)
            experts[-1] = -1
            cpu.tap_experts(weights, experts, width, 1.5, point)
            chunked.tap_experts(weights, experts, width, 1.5, point, gpu)
        worst = max(worst, distance(pools[1].memory, pools[0].memory))
        assert pools[0].memory.any()
    return [0.0, worst]


def check_steering(case: steering.Case, seed: int, tap: Tap) -> None:
    """Check rows of 1 to 8 operations: against float64, next to other rows, and with operations that move nothing."""
    (rows, hidden), dtype = case.hidden.shape, case.hidden.dtype
    got = steered(case, tap)
    case.check(got, roundings=2.0 if dtype == torch.bfloat16 else 1.0)  # the interpreter truncates to bfloat16
    mine = seed % rows
    beside = steering.neighbours(case, mine, seed + 1000)
    assert steering.same_bits(got[mine], steered(beside, tap)[mine]), "a row depends on other rows of the batch"
    if dtype != torch.bfloat16:  # captured rows must have the bits that PyTorch's rounding gives; see above
        for before_steering in (False, True):
            steering.check_captured(case, tap, before_steering=before_steering)
    case.hidden = steering.awkward_rows(dtype, rows, hidden, seed)
    case.operations = [steering.idle_operations()[row % 6 :] if row % 4 else [] for row in range(rows)]
    assert steering.same_bits(steered(case, tap), case.hidden), "an operation that moves nothing changed a row"
    if case.residual is not None:
        check_idle_norm(case)


def check_scores(dtype: torch.dtype) -> None:
    """Check that scores are the inner products with the rows after their steering, and that nothing else changes."""
    rng = np.random.default_rng(5)
    case = steering.make_case(9, dtype, 12, 48 if dtype == torch.float32 else 70, 3, has_residual=True)
    plain = {tap: steered(case, tap) for tap in (resident.tap, chunked.tap)}
    unscored = case.operations
    columns = [[int(column) for column in rng.permutation(MAX_PROBE_OUTPUTS)[: row % 4]] for row in range(12)]
    case.operations = [
        [*operations, *(steering.scoring(index + 1, column) for index, column in enumerate(chosen))]
        for operations, chosen in zip(unscored, columns, strict=True)
    ]
    wanted = np.zeros((12, MAX_PROBE_OUTPUTS))
    for row, chosen in enumerate(columns):
        x = (case.hidden[row].double() + case.residual[row].double()).numpy()
        x, _ = steering.expected(x, unscored[row], case.vectors)
        for index, column in enumerate(chosen):
            wanted[row, column] = x @ case.vectors[index + 1].astype(np.float64)
    assert wanted.any()
    for tap in (resident.tap, chunked.tap, norm):
        tables = replace(tables_of(case), scores=torch.zeros(12, MAX_PROBE_OUTPUTS))
        got = case.hidden.clone()
        tap(got, case.residual, steering.POINT, tables)
        assert tap is norm or steering.same_bits(got, plain[tap]), "a score changed a row"
        assert np.abs(tables.scores.numpy() - wanted).max() < 1e-4 * np.abs(wanted).max()
    check_score_copies(rng)


def check_score_copies(rng: np.random.Generator) -> None:
    buffer = torch.from_numpy(rng.standard_normal((200, MAX_PROBE_OUTPUTS)).astype(np.float32))
    runs = np.array([(3, 1, 0, 5, 17, 5), (7, 100, 2, 3, 50, 6), (190, 10, 0, 64, 1000, 64)], dtype=np.int64)
    boards = [torch.zeros(2000), torch.zeros(2000)]
    CpuScoreCopies(buffer, boards[0].numpy()).copy(runs)
    ScoreLaunch(buffer, boards[1])(torch.from_numpy(runs), len(runs))
    assert boards[0].any()
    assert torch.equal(*boards)


def check_idle_norm(case: steering.Case) -> None:
    """Check that the folded norm returns the same sum, bit by bit, with operations that move nothing and with none."""
    residual = case.hidden.flip(0)  # negative and positive zeros add up
    steered_rows = normed(case, residual)
    case.operations = [[]] * len(case.hidden)
    for one, other in zip(steered_rows, normed(case, residual), strict=True):
        assert steering.same_bits(one, other), "an operation that moves nothing changed a norm"


def normed(case: steering.Case, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the folded norm of the steered sums, and these."""
    weight = torch.ones(case.hidden.shape[1], dtype=case.hidden.dtype)
    return resident.tap_norm(case.hidden, residual, weight, 1e-5, steering.POINT, tables_of(case), plus_one=False)


def steered(case: steering.Case, tap: Tap) -> torch.Tensor:
    hidden = case.hidden.clone()
    tap(hidden, case.residual, steering.POINT, tables_of(case))
    return hidden


def tables_of(case: steering.Case) -> resident.KernelTables:
    return steering.make_tables(case.layout(), len(case.hidden), case.bank())


def prepare(
    rng: np.random.Generator, hidden: int, dtype: torch.dtype, site: int | None = None
) -> tuple[CpuTap, resident.KernelTables, list[BlockPool]]:
    """Return the CPU's tap and the kernel's tables, armed with the same programs, and their pools.

    With `site`, some rows are captured there.
    """
    bank = VectorBank(8, hidden, CPU)
    bank.load([(row, rng.standard_normal(hidden).astype("<f4").tobytes()) for row in range(8)])
    pools = [BlockPool(1000, hidden, dtype, CPU, 0) for _ in range(2)]
    layout = random_layout(rng)
    while site is not None and not any(site in dict(program.places) for program in layout.programs):
        layout = random_layout(rng)
    cpu = CpuTap(bank, pools[0], POINTS)
    cpu.arm(layout)
    return cpu, steering.make_tables(layout, ROWS, bank, pools[1], POINTS), pools


def random_layout(rng: np.random.Generator) -> StepLayout:
    """Return a layout of all rows but the last two, which must not change."""
    order, programs, lines, place = rng.permutation(ROWS - 2), [], [], 0
    for index, chosen in enumerate(np.split(order, [3, 4, 8])):
        operations = [steering.make_operation(rng) for _ in range(int(rng.integers(9)))]
        steps = [
            Step.of(operation)._replace(layers=tuple(range(int(rng.integers(LAYERS)) + 1))) for operation in operations
        ]
        layers = tuple(sorted({int(layer) for layer in rng.integers(LAYERS, size=2)}))
        sites = tuple(sorted({SITES[int(site)] for site in rng.integers(len(SITES), size=3)}))
        places = tuple((site, layers[index % len(layers) :]) for index, site in enumerate(sites))
        programs.append(Program.make(places, before_steering=bool(rng.integers(2)), steps=steps))
        lines += [(int(row), index, place + at, CAPACITY) for at, row in enumerate(chosen)]
        place += sum(len(of_site) for _, of_site in places) * CAPACITY
    programs[0] = Program.make(steps=[Step(Kind.ADD, 0, (0, 2), 2.0, 0.0, 0.0)])
    lines[:3] = [(row, 0, NOWHERE, 0) for row, _, _, _ in lines[:3]]
    return StepLayout(programs, np.array(lines))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


if __name__ == "__main__":
    main(sys.argv[1])
