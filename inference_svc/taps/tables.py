"""Programs as tables at fixed addresses on the device, where the kernel reads them.

A step of a running batch uploads two numbers a row, whatever is captured and however it is steered; the tables change
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

    from inference_svc.taps.programs import Program, Step

WANT_NOTHING, WANT_AFTER, WANT_BEFORE = 0, 1, 2
"""Whether a row is captured on a layer: not, as it is after steering, or as it was before."""


class TablesFullError(RuntimeError):
    """One step runs more different programs than the tables hold."""


class ProgramTable:
    """The tables that the kernel reads.

    Shapes: `wants` uint8 [programs, layers]; `spans` int32 [programs, layers, 2], the first entry and the number of
    entries; entries: `kinds` int32, `vectors` int32 (rows of the bank), `numbers` float32 [entries, 3] (scale, low,
    high).
    """

    def __init__(self, programs: int, entries: int, layers: int, first_layer: int, device: torch.device) -> None:
        """Allot tables for `layers` layers from `first_layer` on."""
        self._layers = layers
        self._first_layer = first_layer
        self.wants = torch.zeros(programs, layers, dtype=torch.uint8, device=device)
        self.spans = torch.zeros(programs, layers, 2, dtype=torch.int32, device=device)
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
        return sum(int(table.nbytes) for table in (self.wants, self.spans, self.kinds, self.vectors, self.numbers))

    def begin_step(self) -> None:
        """Forget which programs the last step used: from now on they may be replaced."""
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
        wants, spans, entries = self._compile(program)
        place = self._make_room(len(entries))
        spans[:, 0] += place.first
        # From pageable memory: the driver copies it aside before these calls return.
        self.wants[place.number].copy_(torch.from_numpy(wants))
        self.spans[place.number].copy_(torch.from_numpy(spans))
        if entries:
            run = slice(place.first, place.first + place.count)
            self.kinds[run].copy_(torch.tensor([int(step.kind) for step in entries], dtype=torch.int32))
            self.vectors[run].copy_(torch.tensor([step.row for step in entries], dtype=torch.int32))
            numbers = [(step.scale, step.low, step.high) for step in entries]
            self.numbers[run].copy_(torch.tensor(numbers, dtype=torch.float32))
        return place

    def _compile(self, program: Program) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], list[Step]]:
        """Return the program's rows of the tables; spans count from its first entry."""
        wants = np.zeros(self._layers, dtype=np.uint8)
        spans = np.zeros((self._layers, 2), dtype=np.int32)
        entries: list[Step] = []
        written: dict[tuple[int, ...], int] = {}  # layers with the same operations share their entries
        for row in range(self._layers):
            layer = row + self._first_layer
            if layer in program.capture_layers:
                wants[row] = WANT_BEFORE if program.before_steering else WANT_AFTER
            chosen = tuple(index for index, step in enumerate(program.steps) if layer in step.layers)
            if chosen and chosen not in written:
                written[chosen] = len(entries)
                entries += [program.steps[index] for index in chosen]
            if chosen:
                spans[row] = written[chosen], len(chosen)
        return wants, spans, entries

    def _make_room(self, entries: int) -> _Place:
        """Return a free number and room for entries, replacing programs that were not used for longest."""
        while True:
            first = self._free_entries.take(entries) if self._free_programs else None
            if first is not None:
                return _Place(self._free_programs.pop(), first, entries)
            idle = next((program for program in self._known if program not in self._in_step), None)
            if idle is None:
                raise TablesFullError(
                    f"one step captures and steers in more ways than the tables hold ({len(self.wants)} programs, "
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
