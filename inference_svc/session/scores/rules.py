"""The rules of a request while it generates: each token is judged by its scores before it is passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from inference_svc.admission.rules import ABORT, STEER, action_name
from residuum.v1 import rule_pb2
from residuum.wire.probes.rules import FINISH_REASON, RuleWatch
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from inference_svc.admission.specs import ResolvedSpec
    from inference_svc.engine.streams import Delta
    from inference_svc.metrics import RuleCounts
    from inference_svc.session.steering_changes import SteeringChanges
    from residuum.v1 import probe_pb2

    TextOf = Callable[[Sequence[int]], Awaitable[str]]

_log = get_logger(__name__)


class _Watched(NamedTuple):
    """A rule of the request."""

    watch: RuleWatch
    probe: int
    """The index of its probe."""

    @property
    def rule(self) -> rule_pb2.Rule:
        return self.watch.rule

    def scores(self, delta: Delta) -> npt.NDArray[np.float32]:
        """Return the scores that the rule watches, float32 [tokens]."""
        return delta.scores[self.probe][:, self.rule.output]


def sequence_rules(
    spec: ResolvedSpec,
    num_sequences: int,
    changes: SteeringChanges | None,
    text_of: TextOf,
    counts: RuleCounts,
    *,
    has_stop_strings: bool,
) -> list[SequenceRules]:
    """Return the rules of each sequence of a request; an empty list without rules. See `SequenceRules`."""
    probes = spec.probes
    if probes is None or not probes.rules:
        return []
    num_shown = len(spec.shown_probes)
    return [
        SequenceRules(index, probes, changes, text_of, counts, num_shown, has_stop_strings=has_stop_strings)
        for index in range(num_sequences)
    ]


class SequenceRules:
    """The rules of a request in one of its sequences."""

    def __init__(
        self,
        index: int,
        spec: probe_pb2.ProbeSpec,
        changes: SteeringChanges | None,
        text_of: TextOf,
        counts: RuleCounts,
        num_shown: int | None = None,
        *,
        has_stop_strings: bool = False,
    ) -> None:
        """Watch a sequence from its first token on.

        Args:
            index: The sequence.
            spec: The checked probes and rules.
            changes: Changes the request's steering; None: no rule steers.
            text_of: Returns the text of the first tokens of the reply.
            counts: Counts the rules that fire.
            num_shown: How many of the probes, the first ones, the caller gets scores of; None: all.
            has_stop_strings: Whether the request has stop strings. Then the engine holds back text that may begin one.
        """
        self._has_stop_strings = has_stop_strings
        self._num_shown = num_shown
        self._index = index
        self._changes = changes
        self._text_of = text_of
        self._counts = counts
        names = [probe.name for probe in spec.probes]
        self._watches = [_Watched(RuleWatch(rule), names.index(rule.probe)) for rule in spec.rules]
        self._token_ids: list[int] = []
        """The tokens until now."""
        self._texts: list[str] = []
        """The text until now, in parts."""

    async def judge(self, delta: Delta) -> Delta:
        """Return a delta with the events of its tokens. A rule that aborts makes it the last one, and may shorten it.

        Raises:
            Failure: A rule fired, and its steering could not be applied.
        """
        before = len(self._token_ids)
        self._token_ids += delta.token_ids
        fired = self._fired(delta)
        aborting = [(at, watched.rule.name) for at, watched in fired if watched.rule.action == ABORT]
        if aborting:
            last, name = min(aborting, key=lambda item: item[0])
            fired = [item for item in fired if item[0] <= last]
            delta = await self._ended(delta, last + 1, name)
        self._texts.append(delta.text)
        # Of rules that fire at the same token, the one that was given first comes first.
        fired.sort(key=lambda item: item[0])
        events = [await self._event(watched, before + at, delta, at) for at, watched in fired]
        return self._shown(delta._replace(rule_events=tuple(events)) if events else delta)

    def _shown(self, delta: Delta) -> Delta:
        """Return a delta without the scores that the caller did not ask for."""
        if self._num_shown is None:
            return delta
        shown = slice(self._num_shown)
        return delta._replace(scores=delta.scores[shown], prompt_scores=delta.prompt_scores[shown])

    def _fired(self, delta: Delta) -> list[tuple[int, _Watched]]:
        """Return the rules that fire, each with the index of its token in the delta."""
        found = [(item.watch.add(item.scores(delta)), item) for item in self._watches] if delta.token_ids else []
        return [(at, item) for at, item in found if at is not None]

    async def _ended(self, delta: Delta, count: int, rule: str) -> Delta:
        """Return the last delta of the sequence, which ends after the first `count` tokens of this one."""
        text = delta.text
        if count < len(delta.token_ids) or (self._has_stop_strings and not delta.finish_reason):
            text = await self._last_text(len(self._token_ids) - len(delta.token_ids), count)
        return delta.cut(count, text, FINISH_REASON, rule)

    async def _last_text(self, before: int, count: int) -> str:
        """Return the text that was not sent yet, of a reply that ends `count` tokens after its first `before`.

        The engine does not say which text is that of which token, and holds back what may begin a stop string.
        """
        del self._token_ids[before + count :]
        whole, sent = await self._text_of(self._token_ids), "".join(self._texts)
        if whole.startswith(sent):
            return whole[len(sent) :]
        # The tokenizer decodes the whole reply otherwise than its parts.
        return whole[len(await self._text_of(self._token_ids[:before])) :]

    async def _event(self, watched: _Watched, token: int, delta: Delta, at: int) -> rule_pb2.RuleEvent:
        """Do what a rule says, and return its event."""
        rule, score = watched.rule, float(watched.scores(delta)[at])
        event = rule_pb2.RuleEvent(rule=rule.name, sequence=self._index, token=token, score=score, action=rule.action)
        if rule.action == STEER and self._changes is not None and not delta.finish_reason:
            first = await self._changes.add(self._index, rule)
            if first is not None:
                event.first_position = first
        action = action_name(rule.action)
        self._counts.add(rule.name, action)
        _log.info("rule fired", rule=rule.name, action=action, sequence=self._index, token=token, score=round(score, 6))
        return event
