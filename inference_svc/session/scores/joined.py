"""The scores of all probes of a request in one array: what is done for each token is done once, not for each probe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, overload

import numpy as np

from residuum.v1 import inference_pb2, probe_pb2

if TYPE_CHECKING:
    import numpy.typing as npt

_NUMBER_BYTES = 4


class ScoreLayout:
    """Where the scores of each probe are: in a row of the array, and in the bytes of a message."""

    def __init__(self, outputs: Sequence[int]) -> None:
        """Lay out probes with these numbers of outputs, at least one each."""
        ends = list(accumulate(outputs))
        self.parts = [slice(end - count, end) for end, count in zip(ends, outputs, strict=True)]
        """The columns of each probe."""
        self.width = ends[-1]
        """The scores of a row."""
        fields = [
            inference_pb2.TokenDelta(scores=[probe_pb2.ProbeScores(values=[0.0] * count)]).SerializeToString()
            for count in outputs
        ]
        self._field = np.frombuffer(b"".join(fields), dtype=np.uint8)
        # The numbers are the end of each field.
        number_ends = list(accumulate(map(len, fields)))
        self._places = np.concatenate(
            [np.arange(end - _NUMBER_BYTES * count, end) for end, count in zip(number_ends, outputs, strict=True)]
        )

    def field_of(self, row: npt.NDArray[np.float32]) -> bytes:
        """Return `TokenDelta.scores` of one token as bytes of the message, given its scores, float32 [1, width]."""
        field = self._field.copy()
        field[self._places] = np.frombuffer(row.tobytes(), dtype=np.uint8)
        return field.tobytes()


class JoinedScores(Sequence["npt.NDArray[np.float32]"]):
    """The scores of each probe, float32 [tokens, outputs], as parts of one array."""

    __slots__ = ("_layout", "rows")

    def __init__(self, rows: npt.NDArray[np.float32], layout: ScoreLayout) -> None:
        """Take the scores of all probes, float32 [tokens, width of the layout]."""
        self.rows = rows
        self._layout = layout

    def __len__(self) -> int:
        """Return the number of probes."""
        return len(self._layout.parts)

    @overload
    def __getitem__(self, probe: int) -> npt.NDArray[np.float32]: ...
    @overload
    def __getitem__(self, probe: slice) -> tuple[npt.NDArray[np.float32], ...]: ...
    def __getitem__(self, probe: int | slice) -> npt.NDArray[np.float32] | tuple[npt.NDArray[np.float32], ...]:
        """Return the scores of a probe, or of several."""
        if isinstance(probe, slice):
            return tuple(self.rows[:, part] for part in self._layout.parts[probe])
        return self.rows[:, self._layout.parts[probe]]

    def field(self) -> bytes:
        """Return the scores of the only token as `TokenDelta.scores`, in the bytes of a message."""
        return self._layout.field_of(self.rows)
