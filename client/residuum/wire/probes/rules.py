"""When a rule fires. rule.proto defines it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from residuum.v1 import probe_pb2
from residuum.wire.probes.arithmetic import num_outputs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from residuum.v1 import rule_pb2

FINISH_REASON = "rule"
"""The finish reason of a sequence that a rule ended."""

NEVER = (1 << 32) - 1
"""The first position of a change of steering in a sequence that the change does not apply to."""


def problem_of(rule: rule_pb2.Rule, probe: probe_pb2.Probe) -> str:
    """Return what is wrong with the output and the threshold of a rule, in words; empty if nothing is.

    Args:
        rule: The rule.
        probe: The probe that it names.
    """
    outputs, side = num_outputs(probe), rule.WhichOneof("threshold")
    if rule.output >= outputs:
        has = f"{outputs} output{'s' * (outputs != 1)}"
        return f"the probe {probe.name!r} has {has}; output {rule.output} does not exist (they count from 0)"
    if side is None:
        return "it has no threshold: set above or below"
    threshold = getattr(rule, side)
    if not math.isfinite(threshold):
        return f"{side} is {threshold}; it must be finite"
    if probe.activation != probe_pb2.PROBE_ACTIVATION_UNSPECIFIED and (
        threshold >= 1 if side == "above" else threshold <= 0
    ):
        activation = probe_pb2.ProbeActivation.Name(probe.activation).removeprefix("PROBE_ACTIVATION_").lower()
        return (
            f"it can never fire: scores of the probe {probe.name!r} are from 0 to 1 (its activation is {activation}), "
            f"and none is {side} {threshold:g}"
        )
    return ""


class RuleWatch:
    """Watches the scores of one sequence for one rule."""

    def __init__(self, rule: rule_pb2.Rule) -> None:
        """Watch for a valid rule; see `problem_of`."""
        self.rule = rule
        self.has_fired = False
        self._side = rule.WhichOneof("threshold")
        self._threshold: float = getattr(rule, str(self._side))
        self._needed = max(rule.for_tokens, 1)
        self._held = 0
        """For how many tokens in a row, up to the latest one, the comparison holds."""

    def add(self, scores: npt.NDArray[np.float32]) -> int | None:
        """Return the index of the token at which the rule fires, among these next tokens; None if it does not.

        Args:
            scores: The scores of the rule's output, float32 [tokens].
        """
        if self.has_fired:
            return None
        holds = scores > self._threshold if self._side == "above" else scores < self._threshold
        for index, holds_here in enumerate(holds.tolist()):
            self._held = self._held + 1 if holds_here else 0
            if self._held == self._needed:
                self.has_fired = True
                return index
        return None
