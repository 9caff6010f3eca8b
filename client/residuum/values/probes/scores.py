"""Scores of probes, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from residuum.v1 import probe_pb2
from residuum.values.probes.probe import Probe
from residuum.wire.probes.arithmetic import num_outputs

Floats = npt.NDArray[np.float32]
Scores = dict[str, Floats]
"""The scores of rows by the name of the probe: float32 [rows] of a probe with one output, else [rows, outputs]."""


def kept_scores(probes: Iterable[probe_pb2.Probe], kept: probe_pb2.KeptScores) -> Scores | None:
    """Return scores that are stored with a capture; None if there are none.

    Args:
        probes: The probes of the capture's description.
        kept: The scores.
    """
    if not kept.probes:
        return None
    return {
        probe.name: _array(scores.values, num_outputs(probe)) for probe, scores in zip(probes, kept.probes, strict=True)
    }


class ScoreList:
    """The scores of consecutive rows, which arrive in parts."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._outputs = {probe.name: probe.num_outputs for probe in probes}
        self._parts: list[tuple[Floats, int]] = []
        """The numbers of each part, those of one probe after those of another, and its rows."""

    def extend(self, protos: Sequence[probe_pb2.ProbeScores], rows: int | None = None) -> Scores:
        """Add the scores of further rows, and return them alone.

        Args:
            protos: The message of each probe.
            rows: The number of rows; None: any, but the same for each probe.

        Raises:
            ValueError: There is another number of probes or of rows.
        """
        values = [proto.values[:] for proto in protos]  # lists, which are read faster than protobuf's containers
        if values or rows != 0:
            rows = self._checked(values, rows)
        # One array for all probes, because to make an array takes longer than all else that is done for a token.
        joined = np.array([*chain.from_iterable(values)], np.float32)
        self._parts.append((joined.copy(), rows))  # the caller may change what it gets
        return self._by_name(joined, rows)

    def all(self) -> Scores:
        """Return the scores of all rows."""
        by_name = [self._by_name(joined, rows) for joined, rows in self._parts]
        if not by_name:
            return self._by_name(np.empty(0, np.float32), 0)
        return {name: np.concatenate([part[name] for part in by_name]) for name in self._outputs}

    def _checked(self, values: Sequence[Sequence[float]], rows: int | None) -> int:
        """Return the number of rows that each probe has scores of."""
        if len(values) != len(self._outputs):
            raise ValueError(f"of {len(values)} probes instead of {len(self._outputs)}")
        for (name, outputs), numbers in zip(self._outputs.items(), values, strict=True):
            rows = len(numbers) // outputs if rows is None else rows
            if len(numbers) != rows * outputs:
                raise ValueError(f"{len(numbers)} numbers of the probe {name!r} for {rows} rows with {outputs} each")
        return rows or 0

    def _by_name(self, joined: Floats, rows: int) -> Scores:
        found, begin = {}, 0
        for name, outputs in self._outputs.items():
            end = begin + rows * outputs
            found[name] = joined[begin:end] if outputs == 1 else joined[begin:end].reshape(-1, outputs)
            begin = end
        return found


def _array(values: Sequence[float], outputs: int) -> Floats:
    array = np.array(values, np.float32)
    return array if outputs == 1 else array.reshape(-1, outputs)
