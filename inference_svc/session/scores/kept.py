"""The scores of a request that are stored with its capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from residuum.v1 import probe_pb2
from residuum.wire.limits import MAX_KEPT_SCORES
from residuum.wire.probes.arithmetic import num_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.engine.streams import Delta, Scored
    from residuum.v1 import store_pb2

_TOO_MANY = f"The request has more scores than the {MAX_KEPT_SCORES} numbers that a capture keeps."


class KeptScores:
    """Collects the scores of all sequences. If they get too many, none are kept."""

    def __init__(self, num_probes: int, num_sequences: int) -> None:
        """Start without scores."""
        self._of_sequences = [_without_scores(num_probes) for _ in range(num_sequences)]
        self._of_prompt = _without_scores(num_probes)
        self._room = MAX_KEPT_SCORES

    def add(self, sequence: int, delta: Delta) -> None:
        """Add the scores of a delta that is passed on."""
        self._extend(self._of_sequences[sequence], delta.scores)
        self._extend(self._of_prompt, delta.prompt_scores)

    def put_into(self, seal: store_pb2.SealCaptureRequest) -> None:
        """Add the scores to a seal, or why it has none."""
        if self._room < 0:
            leave_out_scores(seal, _TOO_MANY)
            return
        for sequence, kept in zip(seal.sequences, self._of_sequences, strict=True):
            sequence.scores.CopyFrom(kept)
        if any(probe.values for probe in self._of_prompt.probes):
            seal.prompt_scores.CopyFrom(self._of_prompt)

    def _extend(self, kept: probe_pb2.KeptScores, scores: Scored) -> None:
        self._room -= sum(values.size for values in scores)
        if self._room < 0:
            for message in (*self._of_sequences, self._of_prompt):
                message.Clear()
            return
        for probe, values in zip(kept.probes, scores, strict=False):  # without tokens, there are no scores
            probe.values.extend(values.ravel().tolist())


def kept_scores_of(probes: Sequence[probe_pb2.Probe], kept: Sequence[probe_pb2.ProbeScores]) -> Scored:
    """Return the scores that a capture keeps, float32 [tokens, outputs] for each probe; empty if it keeps none."""
    return tuple(
        np.array(scores.values, dtype=np.float32).reshape(-1, num_outputs(probe))
        for probe, scores in zip(probes, kept, strict=False)
    )


def leave_out_scores(seal: store_pb2.SealCaptureRequest, why: str) -> None:
    """Replace the scores of a seal by the reason why it has none, in words."""
    for sequence in seal.sequences:
        sequence.scores.CopyFrom(probe_pb2.KeptScores(unknown_detail=why))
    seal.prompt_scores.CopyFrom(probe_pb2.KeptScores(unknown_detail=why))


def _without_scores(num_probes: int) -> probe_pb2.KeptScores:
    return probe_pb2.KeptScores(probes=[probe_pb2.ProbeScores() for _ in range(num_probes)])
