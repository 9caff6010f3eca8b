"""Scores of probes, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from residuum.v1 import probe_pb2
from residuum.values.probes.probe import Probe
from residuum.wire.probes import num_outputs

Scores = dict[str, npt.NDArray[np.float32]]
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
        self._probes = probes
        self._values: list[list[float]] = [[] for _ in probes]

    def extend(self, protos: Sequence[probe_pb2.ProbeScores], rows: int | None = None) -> Scores:
        """Add the scores of further rows, and return them alone.

        Args:
            protos: The message of each probe.
            rows: The number of rows; None: any, but the same for each probe.

        Raises:
            ValueError: There is another number of probes or of rows.
        """
        if not protos and rows == 0:
            return _arrays(self._probes, [()] * len(self._probes))
        if len(protos) != len(self._probes):
            raise ValueError(f"of {len(protos)} probes instead of {len(self._probes)}")
        for probe, proto in zip(self._probes, protos, strict=True):
            rows = len(proto.values) // probe.num_outputs if rows is None else rows
            if len(proto.values) != rows * probe.num_outputs:
                raise ValueError(
                    f"{len(proto.values)} numbers of the probe {probe.name!r} for {rows} rows with "
                    f"{probe.num_outputs} each"
                )
        for values, proto in zip(self._values, protos, strict=True):
            values.extend(proto.values)
        return _arrays(self._probes, [proto.values for proto in protos])

    def all(self) -> Scores:
        """Return the scores of all rows."""
        return _arrays(self._probes, self._values)


def _arrays(probes: Iterable[Probe], values: Iterable[Sequence[float]]) -> Scores:
    return {probe.name: _array(numbers, probe.num_outputs) for probe, numbers in zip(probes, values, strict=True)}


def _array(values: Sequence[float], outputs: int) -> npt.NDArray[np.float32]:
    array = np.array(values, np.float32)
    return array if outputs == 1 else array.reshape(-1, outputs)
