"""When a rule fires."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residuum.v1 import probe_pb2, rule_pb2
from residuum.wire.probes.rules import RuleWatch, problem_of

SIGMOID = probe_pb2.PROBE_ACTIVATION_SIGMOID
SCORES = st.lists(st.one_of(st.floats(-2, 2, width=32), st.just(math.nan)), max_size=30)


@given(SCORES, st.lists(st.integers(0, 30), max_size=4), st.floats(-1, 1, width=32), st.integers(0, 5), st.booleans())
def test_a_rule_fires_once_at_the_first_token_of_enough_in_a_row(
    scores: list[float], cuts: list[int], threshold: float, for_tokens: int, below: bool
) -> None:
    side = {"below" if below else "above": threshold}
    watch = RuleWatch(rule_pb2.Rule(for_tokens=for_tokens, **side))
    fired, first = [], 0
    for part in np.split(np.array(scores, np.float32), sorted(min(cut, len(scores)) for cut in cuts)):
        index = watch.add(part)
        if index is not None:
            fired.append(first + index)
        first += len(part)
    needed = max(for_tokens, 1)
    holds = [score < threshold if below else score > threshold for score in scores]
    ends = [end for end in range(needed - 1, len(scores)) if all(holds[end + 1 - needed : end + 1])]
    assert fired == ends[:1]
    assert watch.has_fired == bool(ends)


@pytest.mark.parametrize(
    ("rule", "activation", "words"),
    [
        (rule_pb2.Rule(above=0.9), SIGMOID, ""),
        (rule_pb2.Rule(above=0), SIGMOID, ""),
        (rule_pb2.Rule(below=1), SIGMOID, ""),
        (rule_pb2.Rule(above=1.2), None, ""),
        (rule_pb2.Rule(above=1.2), SIGMOID, "never fire.*from 0 to 1.*sigmoid.*above 1.2"),
        (rule_pb2.Rule(above=1), SIGMOID, "never fire"),
        (rule_pb2.Rule(below=0), probe_pb2.PROBE_ACTIVATION_SOFTMAX, "never fire.*softmax.*below 0"),
        (rule_pb2.Rule(above=math.nan), None, "above is nan; it must be finite"),
        (rule_pb2.Rule(below=-math.inf), None, "below is -inf; it must be finite"),
        (rule_pb2.Rule(), None, "set above or below"),
        (rule_pb2.Rule(above=0.5, output=2), SIGMOID, "has 2 outputs; output 2 does not exist"),
    ],
)
def test_what_is_wrong_with_a_rule(rule: rule_pb2.Rule, activation: probe_pb2.ProbeActivation, words: str) -> None:
    probe = probe_pb2.Probe(name="p", outputs=[probe_pb2.ProbeOutput()] * 2, activation=activation)
    problem = problem_of(rule, probe)
    assert bool(words) == bool(problem)
    assert re.search(words, problem)
