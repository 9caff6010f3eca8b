"""The ledger: which rows of a capture are stored, expected and missing. It uses no clock and no database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.selection import captured_positions, expected_rows, is_reduced, layers_by_site
from store_svc.captures.positions import Positions

Row = tuple[int, int, int]
"""A row of the ledger: (sequence, site, layer). Each has a set of positions."""


class Cells(NamedTuple):
    """The cells of a chunk, a loss or a RowSet: every combination of its layers and positions."""

    sequence: int
    """The sequence."""
    site: int
    """The site."""
    layers: Sequence[int]
    """The layers."""
    positions: Positions
    """The positions."""

    def rows(self) -> Iterator[Row]:
        """Yield the ledger rows that the cells belong to."""
        for layer in self.layers:
            yield self.sequence, self.site, layer


class Ledger:
    """The rows of one capture.

    *Stored* cells are in the database. *Served* cells are the stored cells that readers get: the request selected them,
    and they lie below the expected length once it is known. A reduced capture serves only the last cell of each phase.

    After `expect`, two counts follow each change: `missing` (expected but not stored) and `outstanding` (expected,
    neither stored nor lost).
    """

    def __init__(self, description: capture_pb2.CaptureDescription) -> None:
        self._prompt_tokens = len(description.prompt_token_ids)
        self._spec = description.spec
        self._counts_all = not is_reduced(self._spec) and self._spec.positions == selection_pb2.PositionSelection()
        self._sequences = range(description.num_sequences)
        self._layers = layers_by_site(description.spec)
        self._stored: dict[Row, Positions] = {}
        self._lost: dict[Row, Positions] = {}
        self._expected: list[Positions] | None = None
        self.num_rows = 0
        """Served cells that are stored."""
        self.missing = 0
        """Expected cells that are not stored; 0 before `expect`."""
        self.outstanding = 0
        """Expected cells that are neither stored nor lost; 0 before `expect`."""
        self.num_blocks = 0
        """Blocks of positions of stored and lost cells. The ledger's memory is proportional to this number."""

    def fork(self) -> Ledger:
        """Return a copy that can be changed while others read this one."""
        fork = object.__new__(Ledger)
        fork.__dict__.update(self.__dict__)
        fork._stored = dict(self._stored)
        fork._lost = dict(self._lost)
        return fork

    def fresh(self, cells: Cells) -> dict[Positions, list[int]]:
        """Return the cells worth storing: a map from a set of positions to the layers that lack exactly these.

        A cell is worth storing if it is not stored yet. Once the expected length is known, a layer without any new
        expected cell is left out.
        """
        groups: dict[Positions, list[int]] = {}
        expected = self._expected[cells.sequence] if self._expected is not None else None
        found: dict[Positions | None, Positions] = {}  # most layers have the same set, also as an object
        for row in cells.rows():
            have = self._stored.get(row)
            if have not in found:
                new = cells.positions - have if have else cells.positions
                found[have] = new if expected is None or new & expected else Positions()
            if new := found[have]:
                groups.setdefault(new, []).append(row[2])
        return groups

    def has(self, cells: Cells) -> bool:
        """Return whether all cells that the request selected are stored, expected or not."""
        selected = self._selected(cells.positions)
        return all(not selected - self._stored.get(row, Positions()) for row in cells.rows())

    def add(self, cells: Cells) -> None:
        """Record cells as stored. None of them may be recorded as stored already."""
        served = self.served(cells.sequence, cells.positions)
        count = len(served)
        unions: dict[Positions | None, Positions] = {}  # see `fresh`
        for row in cells.rows():
            have = self._stored.get(row)
            if have not in unions:
                unions[have] = have | cells.positions if have else cells.positions
            now = self._stored[row] = unions[have]
            self.num_blocks += now.num_blocks - (have.num_blocks if have else 0)
            self.num_rows += count
            if self._expected is not None:
                self.missing -= count
                self.outstanding -= len(served - self._lost[row]) if row in self._lost else count

    def lose(self, cells: Cells) -> bool:
        """Record cells as lost, and return whether any was not. A lost cell that arrives later still counts as stored.

        Layers that have lost the same cells share one set. Otherwise one report could fill the store's memory.
        """
        is_new = False
        changes: dict[Positions | None, tuple[Positions, Positions]] = {}  # see `fresh`
        for row in cells.rows():
            before = self._lost.get(row)
            if before not in changes:
                new = cells.positions - before if before else cells.positions
                changes[before] = new, before | new if before else new
            new, now = changes[before]
            if not new:
                continue
            is_new = True
            self._lost[row] = now
            self.num_blocks += now.num_blocks - (before.num_blocks if before else 0)
            if self._expected is not None:
                absent = new - self._stored.get(row, Positions())
                self.outstanding -= len(absent & self._expected[cells.sequence])
        return is_new

    def expect(self, generated_tokens: Sequence[int]) -> None:
        """Fix the expected cells from the number of tokens that each sequence generated."""
        lengths = [expected_rows(self._prompt_tokens, count) for count in generated_tokens]
        self._expect([self._wanted(length) for length in lengths])

    def expect_found(self) -> None:
        """Fix the expected cells when the number of generated tokens is unknown.

        For each sequence, the prompt is expected, and every position with at least one stored row. The model computed
        such a position, so its rows at the other layers and sites are missing.
        """
        found = [self._wanted(self._prompt_tokens) for _ in self._sequences]
        for row in self._all_rows():
            found[row[0]] |= self.served(row[0], self._stored.get(row, Positions()))
        self._expect(found)

    def served(self, sequence: int, positions: Positions) -> Positions:
        """Return the subset of the positions that is served, as far as is known."""
        if self._expected is not None:
            return positions & self._expected[sequence]
        return self._selected(positions)

    def present(self) -> list[Cells]:
        """Return the served cells that are stored."""
        return self._gather(lambda sequence, have: self.served(sequence, have or Positions()))

    def absent(self) -> list[Cells]:
        """Return the expected cells that are not stored; empty before `expect`."""
        expected = self._expected
        if expected is None:
            return []
        return self._gather(lambda sequence, have: expected[sequence] - (have or Positions()))

    def _gather(self, positions_of: Callable[[int, Positions | None], Positions]) -> list[Cells]:
        """Return the cells that a function selects, with the layers that have the same positions together.

        Args:
            positions_of: Returns the positions of a row from its sequence and from what it has stored.
        """
        found: dict[tuple[int, Positions | None], Positions] = {}  # see `fresh`
        groups: dict[tuple[int, int, Positions], list[int]] = {}
        for row in self._all_rows():
            sequence, site, layer = row
            key = sequence, self._stored.get(row)
            if key not in found:
                found[key] = positions_of(*key)
            if positions := found[key]:
                groups.setdefault((sequence, site, positions), []).append(layer)
        return [Cells(sequence, site, layers, positions) for (sequence, site, positions), layers in groups.items()]

    def _selected(self, positions: Positions) -> Positions:
        """Return the subset of the positions that the request selected."""
        if not positions or self._counts_all:
            return positions
        return positions.filter(lambda first, count: captured_positions(self._spec, self._prompt_tokens, first, count))

    def _wanted(self, length: int) -> Positions:
        return Positions.where(captured_positions(self._spec, self._prompt_tokens, 0, length, length))

    def _expect(self, expected: list[Positions]) -> None:
        self._expected = expected
        self.num_rows = self.missing = self.outstanding = 0
        counts: dict[tuple[int, Positions | None, Positions | None], tuple[int, int, int]] = {}  # see `fresh`
        for row in self._all_rows():
            key = row[0], self._stored.get(row), self._lost.get(row)
            if key not in counts:
                sequence, have, lost = key
                wanted = expected[sequence]
                absent = wanted - have if have else wanted
                outstanding = absent - lost if lost else absent
                counts[key] = len(wanted) - len(absent), len(absent), len(outstanding)
            present, missing, left = counts[key]
            self.num_rows += present
            self.missing += missing
            self.outstanding += left

    def _all_rows(self) -> Iterator[Row]:
        for sequence in self._sequences:
            for site, layers in self._layers.items():
                for layer in layers:
                    yield sequence, site, layer
