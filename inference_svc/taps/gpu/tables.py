"""The program tables: programs as arrays at fixed addresses on the device, which the kernels read.

A step uploads only four numbers per row, however complex its programs are. The program tables change only when a
request brings a new program.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inference_svc.shipping.free_runs import FreeRuns
from inference_svc.taps.gpu.staged import StagedTable
from inference_svc.taps.plan import Kind
from inference_svc.taps.steps.demand import entries_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.plan import Gate
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.steps.programs import Program, Step

NOT_KEPT = -1
"""The destination of a row that is not captured at a point."""

MAX_RESIDENT = 8192
"""The largest width of rows that a kernel steers in registers. Wider ones are steered in chunks."""

ROW_FIELDS = 4
"""Numbers in a line of the row table: program, place, stride, and whether the program is busy (see `ProgramTable`)."""

LINE_FIELDS = 8
"""Numbers in a line of the program table."""

ENTRY_FIELDS = 4
"""Numbers in an entry, which is one operation: its code (see below); its factor, or the lower bound of a CAP or CLAMP;
the upper bound of a CAP or CLAMP; the code of its gate, or the column of a SCORE. Those that are not codes or columns
are bits of float32."""

KIND_SHIFT = 28
KEEP_NORM = 1 << 27
GATED = 1 << 26
MAX_BANK_ROWS = 1 << 26
"""The code of an operation: bits 0 to 25 are the vector's row in the bank, bit 26 says whether there is a gate, bit 27
whether the row is rescaled to its old norm, and the bits from KIND_SHIFT on are the `Kind`. The code of a gate: bits 0
to 25 are its vector's row in the bank, and the bits from KIND_SHIFT on are its `Measure`."""


def destination(program: Program, site: int, layer: int) -> int:
    """Return the destination of a row at a site of a layer: 2 * unit (+ 1 if captured before steering), or NOT_KEPT."""
    unit = program.unit(site, layer)
    return NOT_KEPT if unit is None else 2 * unit + program.before_steering


class TablesFullError(RuntimeError):
    """The programs of one step do not fit the tables."""


class ProgramTable:
    """The two tables of programs that the kernels read.

    `lines` is int32 [programs, points, LINE_FIELDS]. A line is what a program does at a point: the index of its first
    entry, the number of operations, two destinations (see `destination`; a point sees up to two sites), and a copy of
    the first entry, so that one operation needs no second look-up.

    `entries` is int32 [entries, ENTRY_FIELDS]. If one of n operations at a point has a gate, n more entries follow
    theirs: each begins with the threshold and the sharpness of the gate of an operation.
    """

    def __init__(self, programs: int, entries: int, points: TapPoints, device: torch.device) -> None:
        """Allocate tables for a number of programs and entries, and the points of a stage."""
        self._points = points
        self._lines = StagedTable(programs, points.count, LINE_FIELDS, dtype=torch.int32, device=device)
        self._entries = StagedTable(entries, ENTRY_FIELDS, dtype=torch.int32, device=device)
        self.is_busy: npt.NDArray[np.int32] = np.zeros(programs, dtype=np.int32)
        """Whether a program does something at more than half of the points, 1 or 0, by the program's number."""
        self.version = 0
        """Changes when programs are dropped. Until then, each program keeps its number."""
        self._free_programs = list(range(programs - 1, -1, -1))
        self._free_entries = FreeRuns(entries)
        self._known: OrderedDict[Program, _Place] = OrderedDict()  # least recently used first
        self._in_step: set[Program] = set()
        self._written: list[_Place] = []
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def lines(self) -> Tensor:
        """The table of lines; see the class."""
        return self._lines.table

    @property
    def entries(self) -> Tensor:
        """The table of entries; see the class."""
        return self._entries.table

    @property
    def nbytes(self) -> int:
        """Bytes of both tables on the device."""
        return self._lines.nbytes + self._entries.nbytes

    def place(self, programs: Iterable[Program]) -> npt.NDArray[np.int32]:
        """Return the numbers of a step's programs. Write and upload those that the tables lack.

        Raises:
            TablesFullError: The programs of the step do not fit.
        """
        wanted = list(programs)
        try:
            numbers = self._place(wanted)
        except TablesFullError:
            self._clear()  # the free room may be fragmented
            numbers = self._place(wanted)
        self._upload()
        return np.array(numbers, dtype=np.int32)

    def _place(self, programs: list[Program]) -> list[int]:
        self._in_step = set(programs)
        return [self._number(program) for program in programs]

    def _clear(self) -> None:
        """Forget all programs, so that the free room is contiguous again."""
        self._wait_until_uploaded()
        self.version += 1
        for place in self._known.values():
            self._free_programs.append(place.number)
            self._free_entries.give_back(place.first, place.entries)
        self._known.clear()
        self._written.clear()

    def _number(self, program: Program) -> int:
        known = self._known.get(program)
        if known is None:
            known = self._known[program] = self._write(program)
        self._known.move_to_end(program)
        return known.number

    def _write(self, program: Program) -> _Place:
        lines, entries = self._compile(program)
        place = self._make_room(len(entries))
        lines[:, 0] += place.first
        self._lines.view[place.number] = lines
        self.is_busy[place.number] = 2 * np.count_nonzero(
            (lines[:, 1] > 0) | (lines[:, 2:4] != NOT_KEPT).any(axis=1)
        ) > len(lines)
        self._entries.view[place.first : place.first + place.entries] = entries
        self._written.append(place)
        return place

    def _upload(self) -> None:
        if not self._written:
            return
        for number, count in _joined((place.number, 1) for place in self._written):
            self._lines.upload(number, count)
        for first, count in _joined((place.first, place.entries) for place in self._written):
            self._entries.upload(first, count)
        self._written.clear()
        if self._uploaded is not None:
            self._uploaded.record()

    def _wait_until_uploaded(self) -> None:
        # Before the host reuses a place: a pending upload may still read its old contents.
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def _compile(self, program: Program) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return a program's lines and entries. First entries in the lines count from the program's own first entry."""
        lines = np.zeros((self._points.count, LINE_FIELDS), dtype=np.int32)
        lines[:, 2:4] = NOT_KEPT
        runs: list[list[Step]] = []
        end = 0
        written: dict[tuple[int, ...], int] = {}  # points with the same operations share their entries
        by_point: dict[int, list[int]] = {}
        for index, step in enumerate(program.steps):
            for layer in self._points.own(step.layers):
                by_point.setdefault(self._points.of(step.site, layer), []).append(index)
        for point, indices in by_point.items():
            chosen = tuple(indices)
            if chosen not in written:
                written[chosen] = end
                runs.append([program.steps[index] for index in chosen])
                end += _length(runs[-1])
            lines[point, :2] = written[chosen], len(chosen)
        for point in range(self._points.count if program.places else 0):
            for column, (site, layer) in enumerate(self._points.sites(point), start=2):
                lines[point, column] = destination(program, site, layer)
        entries = _entries(runs)
        steered = lines[:, 1] > 0
        lines[steered, 4:] = entries[lines[steered, 0]]
        return lines, entries

    def _make_room(self, entries: int) -> _Place:
        """Allocate a program number and entries. Drop least recently used programs as needed."""
        while True:
            first = self._free_entries.take(entries) if self._free_programs else None
            if first is not None:
                return _Place(self._free_programs.pop(), first, entries)
            idle = next((program for program in self._known if program not in self._in_step), None)
            if idle is None:
                raise TablesFullError(
                    f"One step captures and steers in more ways than the tables hold ({len(self.lines)} programs, "
                    f"{len(self.entries)} operations). This is a defect of residuum: please report it."
                )
            self._wait_until_uploaded()
            self.version += 1
            place = self._known.pop(idle)
            self._free_programs.append(place.number)
            self._free_entries.give_back(place.first, place.entries)


class _Place(NamedTuple):
    """The place of a program in the tables."""

    number: int
    """The index of its lines."""
    first: int
    """The index of its first entry."""
    entries: int
    """How many entries it has."""


def _length(run: list[Step]) -> int:
    """Return how many entries the operations at a point take."""
    return entries_of(len(run), has_gates=any(step.gate is not None for step in run))


def _entries(runs: list[list[Step]]) -> npt.NDArray[np.int32]:
    """Return the entries of the operations at several points."""
    at: list[int] = []
    gates: list[tuple[int, int, Gate]] = []  # the operation's entry, the gate's, and the gate
    end = 0
    for run in runs:
        gates += [(end + k, end + len(run) + k, step.gate) for k, step in enumerate(run) if step.gate is not None]
        at += range(end, end + len(run))
        end += _length(run)
    steps = [step for run in runs for step in run]
    entries = np.zeros((end, ENTRY_FIELDS), dtype=np.int32)
    entries[at, 0] = [step.kind << KIND_SHIFT | step.keep_norm * KEEP_NORM | step.row for step in steps]
    entries[at, 1:3] = _bits(_numbers(step) for step in steps)
    scoring = [step.kind == Kind.SCORE for step in steps]
    entries[at, 3] = np.where(scoring, [step.column for step in steps], 0)
    for operation, numbers, gate in gates:
        entries[operation, 0] |= GATED
        entries[operation, 3] = gate.measure << KIND_SHIFT | gate.row
        entries[numbers, :2] = _bits([(gate.threshold, gate.sharpness)])
    return entries


def _numbers(step: Step) -> tuple[float, float]:
    """Return the two numbers of an operation's entry."""
    return (step.low, step.high) if step.kind in (Kind.CAP, Kind.SCORE, Kind.CLAMP) else (step.scale, 0.0)


def _bits(pairs: Iterable[tuple[float, float]]) -> npt.NDArray[np.int32]:
    return np.array(list(pairs), dtype=np.float32).reshape(-1, 2).view(np.int32)


def _joined(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge adjacent runs (first, count), and drop empty ones. The runs must not overlap."""
    start = stop = 0
    for first, count in sorted(runs):
        if first > stop > start:
            yield start, stop - start
        if first > stop or stop == start:
            start = first
        stop = first + count
    if stop > start:
        yield start, stop - start
