"""Rules: what the server does when the scores of a probe cross a threshold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.v1 import rule_pb2
from residuum.values.probes.probe import Probe
from residuum.values.selections.items import item_list
from residuum.values.steering.operation_list import operation_list, steering_spec
from residuum.values.steering.operations import Operation
from residuum.values.tensors.numbers import finite_float32, without_torch
from residuum.wire.probes.arithmetic import is_valid_probe_name
from residuum.wire.probes.rules import RuleWatch, problem_of

ACTIONS = {name.removeprefix("RULE_ACTION_").lower(): number for name, number in rule_pb2.RuleAction.items() if number}
"""What the server may do when a rule fires, by name."""

ACTION_NAMES = {number: name for name, number in ACTIONS.items()}


@dataclass(frozen=True)
class Rule:
    """Acts on a reply while it is generated: flags it, ends it or steers it, when a probe's scores cross a threshold.

    The server compares the score of each generated token before it sends the token. The rule fires at the first token
    at which the comparison holds for the `for_tokens`-th token in a row, and at most once in each sequence. Its event
    is in `delta.events`, in `reply.events` and in the manifest of the capture.

    Attributes:
        probe: The probe, whose scores the reply then has as well; or the name of one in `probes=`.
        above: The score must be above this number. Give either `above` or `below`.
        below: The score must be below this number.
        for_tokens: For how many tokens in a row.
        then: What the server does: "flag" only sends and records the event. "abort" also ends the sequence: the token
            is its last one, and its finish reason "rule". Operations, as for `steer=`, apply from the engine's next
            step on, after those that apply already; the event says from which position.
        output: The output of the probe, counted from 0, or its name.
        name: The name of the rule, 1 to 64 of the characters a-z A-Z 0-9 . _ -. Default: the probe's name. The rules
            of a request have different names.

    Raises:
        InvalidRequest: A number is out of range, or the rule can never fire.
        TypeError: An argument has the wrong type.

    Example:
        >>> rule = residuum.Rule(toxic, above=0.9, for_tokens=3, then="abort")
        >>> reply = client.generate("Once upon a time", max_tokens=200, rules=[rule])
        >>> reply.finish_reason, reply.stop_reason
        ('rule', 'toxic')
    """

    probe: Probe | str
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    for_tokens: int = 1
    then: str | Operation | Iterable[Operation] = "flag"
    output: int | str = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.probe, (Probe, str)):
            raise TypeError(f"Rule takes a residuum.Probe, or the name of one, not {self.probe!r}.")
        if (self.above is None) == (self.below is None):
            raise InvalidRequest("Rule: give either above= or below=.", reason="INVALID_FIELD")
        for side in ("above", "below"):
            if getattr(self, side) is not None:
                object.__setattr__(self, side, finite_float32(f"Rule: {side}", getattr(self, side)))
        object.__setattr__(self, "for_tokens", _whole("for_tokens", self.for_tokens, 1))
        object.__setattr__(self, "output", self._output())
        object.__setattr__(self, "then", _action(self.then))
        if not isinstance(self.name, str):
            raise TypeError(f"Rule: name must be a text, not {self.name!r}.")
        object.__setattr__(self, "name", self.name or self.probe_name)
        if not is_valid_probe_name(self.name):
            raise InvalidRequest(
                f"Rule: {self.name!r} is not a valid name. Use 1 to 64 of the characters a-z A-Z 0-9 . _ -",
                reason="INVALID_FIELD",
            )
        if isinstance(self.probe, Probe):
            self.check(self.probe)

    def _output(self) -> int | str:
        """Return the index of the output; its name, if the probe is not known yet.

        Raises:
            InvalidRequest: The probe has no output of this name.
        """
        if not isinstance(self.output, str):
            return _whole("output", self.output, 0)
        if not isinstance(self.probe, Probe):
            return self.output
        if self.output not in self.probe.output_names:
            has = ", ".join(self.probe.output_names) or "no names of outputs; give output_names= or an index"
            raise InvalidRequest(
                f"Rule: the probe {self.probe.name!r} has no output {self.output!r}. It has {has}.",
                reason="INVALID_FIELD",
            )
        return self.probe.output_names.index(self.output)

    @property
    def probe_name(self) -> str:
        """The name of the probe."""
        return self.probe.name if isinstance(self.probe, Probe) else self.probe

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations that it steers with; none if it does not steer."""
        return () if isinstance(self.then, str) else tuple(operation_list(self.then))

    def check(self, probe: Probe) -> None:
        """Check the rule against its probe.

        Raises:
            InvalidRequest: The probe has no such output, or none of its scores can satisfy the rule.
        """
        if problem := problem_of(self.to_proto(), probe.to_proto()):
            raise InvalidRequest(f"Rule {self.name!r}: {problem}.", reason="INVALID_FIELD")

    def fires_at(self, scores: npt.ArrayLike) -> int | None:
        """Return the token at which the rule fires, given the scores of a reply's tokens; None if it does not.

        Args:
            scores: [tokens] or [tokens, outputs], such as `reply.scores["toxic"]`.

        Raises:
            InvalidRequest: The scores have another shape, or lack the rule's output.
        """
        given = np.asarray(without_torch(scores), np.float32)
        columns = given[:, None] if given.ndim == 1 else given
        if columns.ndim != 2 or self._index >= columns.shape[1]:  # noqa: PLR2004 - tokens and outputs
            raise InvalidRequest(
                f"Rule {self.name!r} watches output {self._index}, and the scores have the shape {given.shape}. Give "
                "scores of the shape [tokens, outputs] with this output, or [tokens] for output 0.",
                reason="INVALID_FIELD",
            )
        return RuleWatch(self.to_proto()).add(columns[:, self._index])

    @property
    def _index(self) -> int:
        """The index of the output."""
        if isinstance(self.output, str):
            raise InvalidRequest(
                f"Rule {self.name!r}: the output {self.output!r} is known only with the probe. Give the probe instead "
                "of its name, or an index.",
                reason="INVALID_FIELD",
            )
        return self.output

    def to_proto(self) -> rule_pb2.Rule:
        """Return the rule's message, with the digests of its vectors instead of their values."""
        message = rule_pb2.Rule(
            name=self.name,
            probe=self.probe_name,
            output=self._index,
            for_tokens=self.for_tokens,
            action=ACTIONS["steer" if self.operations else str(self.then)],
        )
        if self.above is not None:
            message.above = self.above
        if self.below is not None:
            message.below = self.below
        if self.operations:
            message.steering.CopyFrom(steering_spec(self.operations))
        return message


@dataclass(frozen=True)
class RuleEvent:
    """A rule has fired.

    Attributes:
        rule: The name of the rule.
        token: The generated token at which it fired, counted from 0: an index into `reply.token_ids`.
        score: The score of that token.
        action: What the server did: "flag", "abort" or "steer"; "unknown" if this version does not know it.
        sequence: The sequence in which it fired.
        first_position: "steer": the first position with the rule's operations; None if the sequence ended before.
    """

    rule: str
    token: int
    score: float
    action: str
    sequence: int = 0
    first_position: int | None = None

    @classmethod
    def from_proto(cls, proto: rule_pb2.RuleEvent) -> RuleEvent:
        """Return the value of a message."""
        return cls(
            rule=proto.rule,
            token=proto.token,
            score=proto.score,
            action=ACTION_NAMES.get(proto.action, "unknown"),
            sequence=proto.sequence,
            first_position=proto.first_position if proto.HasField("first_position") else None,
        )


def rule_list(
    rules: Rule | Iterable[Rule] | None, probes: tuple[Probe, ...]
) -> tuple[tuple[Rule, ...], tuple[Probe, ...]]:
    """Return the rules that a user gave as `rules=`, and all probes of the request: those of the rules come last.

    Raises:
        TypeError: An item is not a rule.
        InvalidRequest: Two rules have the same name, or a rule can never fire or names a probe that the request lacks.
    """
    items = item_list(rules)
    for item in items:
        if not isinstance(item, Rule):
            raise TypeError(f"rules= takes a list of residuum.Rule, not {item!r}.")
    twice = [name for name, times in Counter(item.name for item in items).items() if times > 1]
    if twice:
        raise _invalid(f"Several rules have the name {twice[0]!r}. Give each its own: Rule(..., name='strict').")
    known = {probe.name: probe for probe in probes}
    for index, item in enumerate(items):
        if isinstance(item.probe, Probe) and known.setdefault(item.probe_name, item.probe) != item.probe:
            raise _invalid(
                f"The rule {item.name!r} has a probe of the name {item.probe_name!r}, and another probe has that name. "
                "Give each probe its own: Probe(..., name='question')."
            )
        if item.probe_name not in known:
            has = f"Its probes are: {', '.join(known)}." if known else "It has no probes."
            raise _invalid(f"The rule {item.name!r} names the probe {item.probe!r}, which the request lacks. {has}")
        items[index] = replace(item, probe=known[item.probe_name])  # checks the rule
    return tuple(items), tuple(known.values())


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="INVALID_FIELD", metadata={"field": "probes"})


def _whole(name: str, given: Any, least: int) -> int:
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"Rule: {name} must be a whole number, not {given!r}.")
    number: int = given.__index__()
    if not least <= number < 1 << 32:
        raise InvalidRequest(f"Rule: {name} must be at least {least}, not {number}.", reason="INVALID_FIELD")
    return number


def _action(given: Any) -> str | tuple[Operation, ...]:
    """Return the value of `then`: a name, or operations."""
    if isinstance(given, str):
        if given not in {"flag", "abort"}:
            raise InvalidRequest(
                f"Rule: then must be 'flag', 'abort', or operations such as [Add(...)], not {given!r}.",
                reason="INVALID_FIELD",
            )
        return given
    operations = operation_list(given)
    if not operations:
        raise InvalidRequest("Rule: then has no operations. Use 'flag' to do nothing.", reason="INVALID_FIELD")
    if any(operation.rows for operation in operations):
        raise InvalidRequest(
            "Rule: then has a StoredRow, but takes vectors only. Read the row first, as in acts.vector(12, 4).",
            reason="INVALID_FIELD",
        )
    return tuple(operations)
