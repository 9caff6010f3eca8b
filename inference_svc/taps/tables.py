"""Programs as tables at fixed addresses on the device, where the kernel reads them.

A step of a running batch uploads four numbers a row, whatever is captured and however it is steered; the tables change
only when something new is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.runs import FreeRuns

if TYPE_CHECKING:
    import numpy.typing as npt

    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.programs import Program, Step

NOT_KEPT = -1
"""The destination of a row that is not captured at a point."""


def destination(program: Program, site: int, layer: int) -> int:
    """Return where a program keeps a row at a site of a layer: 2 * unit, plus 1 for the row before steering."""
    unit = program.unit(site, layer)
    return NOT_KEPT if unit is None else 2 * unit + program.before_steering


class TablesFullError(RuntimeError):
    """One step runs more different programs than the tables hold."""


class ProgramTable:
    """The tables that the kernel reads.

    Shapes: `lines` int32 [programs, points, 4]: the first entry, the number of entries, and the two destinations of
    the row at that point (see `destination`); entries: `kinds` int32, `vectors` int32 (rows of the bank), `numbers`
    float32 [entries, 3] (scale, low, high).
    """

    def __init__(self, programs: int, entries: int, points: TapPoints, device: torch.device) -> None:
        """Allot tables for the points of a stage."""
        self._points = points
        self.lines = torch.zeros(programs, points.count, 4, dtype=torch.int32, device=device)
        self.kinds = torch.zeros(entries, dtype=torch.int32, device=device)
        self.vectors = torch.zeros(entries, dtype=torch.int32, device=device)
        self.numbers = torch.zeros(entries, 3, dtype=torch.float32, device=device)
        self._free_programs = list(range(programs - 1, -1, -1))
        self._free_entries = FreeRuns(entries)
        self._known: OrderedDict[Program, _Place] = OrderedDict()  # least recently used first
        self._in_step: set[Program] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(int(table.nbytes) for table in (self.lines, self.kinds, self.vectors, self.numbers))

    def begin_step(self) -> None:
        """Forget which programs the last step used: from now on they may be replaced."""
        self._in_step.clear()

    def clear(self) -> None:
        """Forget everything: what a step needs after that stands one behind the other, and no room is lost between."""
        for place in self._known.values():
            self._free_programs.append(place.number)
            self._free_entries.give_back(place.first, place.count)
        self._known.clear()
        self._in_step.clear()

    def number(self, program: Program) -> int:
        """Return a program's number, writing it into the tables if it is not there.

        Raises:
            TablesFullError: The step needs more programs than fit.
        """
        self._in_step.add(program)
        known = self._known.get(program)
        if known is None:
            known = self._known[program] = self._write(program)
        self._known.move_to_end(program)
        return known.number

    def _write(self, program: Program) -> _Place:
        lines, entries = self._compile(program)
        place = self._make_room(len(entries))
        lines[:, 0] += place.first
        # From pageable memory: each of these copies waits until it is done, and so for the steps before it.
        self.lines[place.number].copy_(torch.from_numpy(lines))
        if entries:
            run = slice(place.first, place.first + place.count)
            self.kinds[run].copy_(torch.tensor([int(step.kind) for step in entries], dtype=torch.int32))
            self.vectors[run].copy_(torch.tensor([step.row for step in entries], dtype=torch.int32))
            numbers = [(step.scale, step.low, step.high) for step in entries]
            self.numbers[run].copy_(torch.tensor(numbers, dtype=torch.float32))
        return place

    def _compile(self, program: Program) -> tuple[npt.NDArray[np.int32], list[Step]]:
        """Return the program's lines, whose first entries count from its own first one, and its entries."""
        lines = np.zeros((self._points.count, 4), dtype=np.int32)
        lines[:, 2:] = NOT_KEPT
        entries: list[Step] = []
        written: dict[tuple[int, ...], int] = {}  # layers with the same operations share their entries
        for layer in self._points.layers:
            chosen = tuple(index for index, step in enumerate(program.steps) if layer in step.layers)
            if chosen and chosen not in written:
                written[chosen] = len(entries)
                entries += [program.steps[index] for index in chosen]
            if chosen:
                lines[self._points.after(layer), :2] = written[chosen], len(chosen)
        for point in range(self._points.count):
            for column, (site, layer) in enumerate(self._points.sites(point), start=2):
                lines[point, column] = destination(program, site, layer)
        return lines, entries

    def _make_room(self, entries: int) -> _Place:
        """Return a free number and room for entries, replacing programs that were not used for longest."""
        while True:
            first = self._free_entries.take(entries) if self._free_programs else None
            if first is not None:
                return _Place(self._free_programs.pop(), first, entries)
            idle = next((program for program in self._known if program not in self._in_step), None)
            if idle is None:
                raise TablesFullError(
                    f"one step captures and steers in more ways than the tables hold ({len(self.lines)} programs, "
                    f"{len(self.kinds)} operations)"
                )
            place = self._known.pop(idle)
            self._free_programs.append(place.number)
            self._free_entries.give_back(place.first, place.count)


class _Place:
    """Where a program stands in the tables."""

    def __init__(self, number: int, first: int, count: int) -> None:
        self.number = number
        self.first = first
        self.count = count
