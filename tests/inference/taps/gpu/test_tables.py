"""The program tables that the GPU's kernels read."""

from __future__ import annotations

import math

import pytest
import torch

from inference_svc.taps.gpu.tables import (
    GATED,
    KEEP_NORM,
    KIND_SHIFT,
    MAX_BANK_ROWS,
    NOT_KEPT,
    ProgramTable,
    TablesFullError,
)
from inference_svc.taps.plan import Gate, Kind, Measure
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.programs import Program, Step
from residuum.v1 import capture_pb2

CPU = torch.device("cpu")
POST, PRE, ATTN = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE, capture_pb2.SITE_ATTN_OUT


def step(row: int, *layers: int) -> Step:
    return Step(Kind.ADD, row, layers, 1.0, 0.0, 0.0)


def program(
    *steps: Step, capture: tuple[int, ...] = (), sites: tuple[int, ...] = (POST,), before: bool = False
) -> Program:
    places = tuple((site, tuple(capture)) for site in sites) if capture else ()
    return Program.make(places, before_steering=before, steps=steps)


def make_table(programs: int = 4, layers: int = 2, first_layer: int = 0) -> ProgramTable:
    return ProgramTable(programs, 16, TapPoints(first_layer, layers), CPU)


def number_of(table: ProgramTable, wanted: Program) -> int:
    (number,) = table.place([wanted]).tolist()
    return number


def vectors_on(table: ProgramTable, number: int, layer: int) -> list[int]:
    first, count = table.lines[number, 1 + layer, :2].tolist()
    entries = table.entries[first : first + count, 0]
    if count:
        assert table.lines[number, 1 + layer, 4:].tolist() == table.entries[first].tolist(), (
            "the line repeats the first entry"
        )
    return (entries & (MAX_BANK_ROWS - 1)).tolist()


def test_equal_programs_are_one_object() -> None:
    assert program(step(1, 0, 2), capture=(1,)) is program(step(1, 0, 2), capture=(1,))
    assert program(step(1, 0, 2)) is not program(step(2, 0, 2))
    assert program(capture=(1,)) is not program(capture=(1,), before=True)


def test_each_layer_has_its_operations_in_order() -> None:
    table = make_table(layers=3, first_layer=10)
    number = number_of(table, program(step(5, 10, 12), step(6, 10), capture=(11, 12)))
    assert [vectors_on(table, number, layer) for layer in range(3)] == [[5, 6], [], [5]]
    assert table.lines[number, 1:4, 2].tolist() == [NOT_KEPT, 0, 2]
    assert (table.lines[number, :, 3] == NOT_KEPT).all()


def test_an_entry_has_the_numbers_of_its_operation_and_gate() -> None:
    table = make_table()
    gate = Gate(6, 0.5, -math.inf, Measure.COSINE)
    cap = Step(Kind.CAP, 5, (0,), 1.0, -2.0, 3.0, keep_norm=True, gate=gate)
    number = number_of(table, program(cap, Step(Kind.ADD, 7, (0,), 4.0, -math.inf, math.inf)))
    first, count = table.lines[number, 1, :2].tolist()
    assert count == 2
    entries = table.entries[first : first + 2 * count]
    (capped, added, of_gate, nothing), numbers = entries.tolist(), entries.view(torch.float32).tolist()
    assert capped[::3] == [Kind.CAP << KIND_SHIFT | KEEP_NORM | GATED | 5, Measure.COSINE << KIND_SHIFT | 6]
    assert numbers[0][1:3] == [-2.0, 3.0]
    assert added[::3] == [Kind.ADD << KIND_SHIFT | 7, 0]
    assert numbers[1][1:3] == [4.0, 0.0]
    assert (numbers[2][:2], of_gate[2:], nothing) == ([0.5, -math.inf], [0, 0], [0, 0, 0, 0])


def test_rows_before_steering() -> None:
    table = make_table()
    number = number_of(table, program(capture=(1,), before=True))
    assert table.lines[number, 1:3, 2].tolist() == [NOT_KEPT, 1]


def test_one_point_keeps_a_row_after_a_layer_and_before_the_next() -> None:
    table = make_table(layers=3)
    number = number_of(table, program(capture=(0, 2), sites=(POST, PRE, ATTN)))
    units = {POST: (0, 1), PRE: (2, 3), ATTN: (4, 5)}  # ordered by site, then by layer
    assert table.lines[number, :4, 2:4].tolist() == [
        [NOT_KEPT, 2 * units[PRE][0]],
        [2 * units[POST][0], NOT_KEPT],
        [NOT_KEPT, 2 * units[PRE][1]],
        [2 * units[POST][1], NOT_KEPT],
    ]
    assert table.lines[number, 4:7, 2].tolist() == [2 * units[ATTN][0], NOT_KEPT, 2 * units[ATTN][1]]
    assert (table.lines[number, 7:, 2:4] == NOT_KEPT).all()


def test_a_program_is_written_once_and_keeps_its_number() -> None:
    table = make_table()
    wanted = program(step(1, 0))
    number = number_of(table, wanted)
    table.lines[number] = 77  # a second write would undo this
    assert number_of(table, wanted) == number
    assert (table.lines[number] == 77).all()


def test_the_least_recently_used_program_is_replaced() -> None:
    table = make_table(programs=2, layers=1)
    old, kept, new = (program(step(row, 0)) for row in (1, 2, 3))
    numbers = [number_of(table, old), number_of(table, kept)]
    assert table.place([kept, new]).tolist() == [numbers[1], numbers[0]]
    assert vectors_on(table, numbers[1], 0) == [2]


def test_a_step_that_needs_more_than_fits() -> None:
    table = make_table(programs=2, layers=1)
    held = [program(step(row, 0)) for row in range(3)]
    table.place(held[:2])
    with pytest.raises(TablesFullError, match="2 programs"):
        table.place(held)
    assert vectors_on(table, number_of(table, held[2]), 0) == [2]  # the next step works


def test_separate_changes_of_the_tables_are_uploaded() -> None:
    table = make_table(programs=8, layers=1)
    first, kept, last = (program(*(step(row + at, 0) for at in range(2))) for row in (1, 3, 5))
    table.place([first, kept, last])
    numbers = table.place([kept, *(program(step(row, 0)) for row in range(10, 17))]).tolist()  # they replace the others
    assert [vectors_on(table, number, 0) for number in numbers] == [[3, 4], *([row] for row in range(10, 17))]
