"""The program tables that a GPU's kernel reads."""

from __future__ import annotations

import pytest
import torch

from inference_svc.taps.plan import Kind
from inference_svc.taps.programs import Program, Step
from inference_svc.taps.tables import WANT_AFTER, WANT_BEFORE, ProgramTable, TablesFullError

CPU = torch.device("cpu")


def step(row: int, *layers: int) -> Step:
    return Step(Kind.ADD, row, layers, 1.0, 0.0, 0.0)


def program(*steps: Step, capture: tuple[int, ...] = (), before: bool = False) -> Program:
    return Program.make(capture, before_steering=before, steps=steps)


def vectors_on(table: ProgramTable, number: int, layer: int) -> list[int]:
    first, count = table.spans[number, layer].tolist()
    return table.vectors[first : first + count].tolist()


def test_equal_programs_are_one_object() -> None:
    assert program(step(1, 0, 2), capture=(1,)) is program(step(1, 0, 2), capture=(1,))
    assert program(step(1, 0, 2)) is not program(step(2, 0, 2))
    assert program(capture=(1,)) is not program(capture=(1,), before=True)


def test_each_layer_has_its_operations_in_order() -> None:
    table = ProgramTable(4, 16, layers=3, first_layer=10, device=CPU)
    number = table.number(program(step(5, 10, 12), step(6, 10), capture=(11, 12)))
    assert [vectors_on(table, number, layer) for layer in range(3)] == [[5, 6], [], [5]]
    assert table.wants[number].tolist() == [0, WANT_AFTER, WANT_AFTER]


def test_rows_before_steering() -> None:
    table = ProgramTable(4, 16, layers=2, first_layer=0, device=CPU)
    number = table.number(program(capture=(1,), before=True))
    assert table.wants[number].tolist() == [0, WANT_BEFORE]


def test_a_program_is_written_once_and_keeps_its_number() -> None:
    table = ProgramTable(4, 16, layers=2, first_layer=0, device=CPU)
    wanted = program(step(1, 0))
    number = table.number(wanted)
    table.wants[number] = 77  # a second write would undo this
    table.begin_step()
    assert table.number(wanted) == number
    assert table.wants[number].tolist() == [77, 77]


def test_the_one_that_was_not_used_for_longest_makes_room() -> None:
    table = ProgramTable(2, 16, layers=1, first_layer=0, device=CPU)
    old, kept, new = (program(step(row, 0)) for row in (1, 2, 3))
    numbers = [table.number(old), table.number(kept)]
    table.begin_step()
    table.number(kept)
    assert table.number(new) == numbers[0]
    assert vectors_on(table, numbers[1], 0) == [2]


def test_a_step_that_needs_more_than_fits() -> None:
    table = ProgramTable(2, 16, layers=1, first_layer=0, device=CPU)
    held = [program(step(row, 0)) for row in range(3)]
    table.number(held[0])
    table.number(held[1])
    with pytest.raises(TablesFullError, match="2 programs"):
        table.number(held[2])
