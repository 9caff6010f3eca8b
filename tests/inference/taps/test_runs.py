"""Runs of free rows, taken and given back in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.shipping.free_runs import FreeRuns


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30), st.randoms())
def test_free_runs_never_overlap_and_come_back_whole(asked: list[tuple[int, bool]], random: object) -> None:
    runs, taken = FreeRuns(40), []
    for size, from_end in asked:
        start = runs.take(size, from_end=from_end)
        if start is None:
            give = taken.pop(random.randrange(len(taken))) if taken else None  # type: ignore[attr-defined]
            if give:
                runs.give_back(*give)
        elif size:
            taken.append((start, size))
        cells = [cell for start, size in taken for cell in range(start, start + size)]
        assert len(cells) == len(set(cells)) <= 40
        assert runs.total == 40 - len(cells)
    for run in taken:
        runs.give_back(*run)
    assert runs.take(40) == 0


def test_runs_taken_from_the_end_leave_the_start_contiguous() -> None:
    runs = FreeRuns(10)
    assert [runs.take(2, from_end=True), runs.take(3), runs.take(5), runs.take(1)] == [8, 0, 3, None]
