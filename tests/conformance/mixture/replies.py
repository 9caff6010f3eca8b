"""Checks replies: their tokens, ends, log-probabilities, scores and rule events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.conformance.mixture.probing import firing, running_bound, score, smoothed
from tests.reference.tiny import EOS

if TYPE_CHECKING:
    import residuum
    from tests.conformance.mixture.cases import Case, Outcome
    from tests.conformance.mixture.expected import Expected
    from tests.conformance.mixture.tally import Tally

LOGPROB_ERROR = 1e-4
"""How far a log-probability may be off. Logits of random tokens differ by about 1, and rows by `ROW_ERROR`; the largest
difference that was seen is half of this."""


def check_reply(case: Case, outcome: Outcome, expected: list[Expected], tally: Tally) -> None:
    """Check a reply that came to its end."""
    reply = outcome.reply
    assert reply is not None
    name, prompt = case.name, len(outcome.prompt)
    if list(reply.prompt_token_ids) != outcome.prompt:
        tally.fault(name, "the reply has another prompt")
    for index, sequence in enumerate(reply.sequences):
        if list(sequence.token_ids) != outcome.streamed.get(index, []):
            tally.fault(name, f"sequence {index}: the reply and the stream have other tokens")
        _check_end(case, sequence, tally)
        known = expected[index]
        _check_greedy(case, sequence, known, prompt, tally)
        _check_logprobs(name, sequence.logprobs, list(sequence.token_ids), known, prompt - 1, tally)
        if case.probes:
            _check_scores(case, sequence.scores, known, prompt - 1, len(sequence.token_ids), tally)
        _check_rules(case, reply, index, tally)
    if "prompt_logprobs" in case.sampling:
        _check_prompt_logprobs(name, reply, expected[0], tally)
    if case.score_prompt:
        _check_scores(case, reply.prompt_scores, expected[0], 0, prompt, tally)
    generated = sum(len(sequence.token_ids) for sequence in reply.sequences)
    if (reply.usage.prompt_tokens, reply.usage.generated_tokens) != (prompt, generated):
        tally.fault(name, f"usage says {reply.usage}")


def _check_end(case: Case, sequence: residuum.Sequence, tally: Tally) -> None:
    tokens, most = list(sequence.token_ids), int(case.sampling["max_tokens"])
    least = int(case.sampling.get("min_tokens", 0))
    stops = {*case.sampling.get("stop_token_ids", ()), *(() if case.sampling["ignore_eos"] else (EOS,))}
    texts = [str(text) for text in case.sampling.get("stop", ())]
    tally.counts[f"replies that end by {sequence.finish_reason}"] += 1
    if stops.intersection(tokens[:-1]):
        tally.fault(case.name, "the reply continues after a stop token")
    words = [f"t{token}" for token in tokens]
    if set(texts).intersection(words[least:-1]):
        tally.fault(case.name, "the reply continues after a stop string")
    if not least and any(text in sequence.text.split() for text in texts):
        tally.fault(case.name, "the text of the reply has a stop string")
    if sequence.finish_reason != "rule" and len(tokens) < least:
        tally.fault(case.name, f"the reply has {len(tokens)} tokens, less than {least}")
    ends = {
        "length": len(tokens) == most,
        "stop": bool(tokens) and (tokens[-1] in stops or words[-1] in texts),
        "rule": any(rule.given.name == sequence.stop_reason for rule in case.rules),
    }
    if not ends.get(sequence.finish_reason, False):
        tally.fault(case.name, f"{len(tokens)} tokens of {most} end by {sequence.finish_reason!r}")


def _check_greedy(case: Case, sequence: residuum.Sequence, known: Expected, prompt: int, tally: Tally) -> None:
    if not case.sampling.keys().isdisjoint({"temperature", "min_tokens", "logit_bias"}):
        return
    for at, token in enumerate(sequence.token_ids):
        position = prompt - 1 + at
        if position >= known.decided:
            break
        tally.counts["greedy tokens checked"] += 1
        row = known.logprobs[position]
        if row.max() - row[token] > 2 * LOGPROB_ERROR:
            tally.fault(case.name, f"greedy token {at} is {row.max() - row[token]:.3g} less likely than the best")
            break


def _check_logprobs(
    name: str, found: residuum.Logprobs | None, tokens: list[int], known: Expected, first: int, tally: Tally
) -> None:
    if found is None or not tokens:
        return
    count = max(min(known.decided - first, len(tokens)), 0)
    rows = known.logprobs[first : first + count]
    worst = np.abs(found.tokens[:count] - rows[np.arange(count), tokens[:count]]).max(initial=0)
    if found.top.shape[1]:
        best = -np.sort(-rows, axis=1)[:, : found.top.shape[1]]
        worst = max(worst, np.abs(found.top[:count] - best).max(initial=0))
    tally.counts["log-probabilities compared"] += count
    tally.see("log-probabilities", float(worst) / LOGPROB_ERROR)
    if not worst <= LOGPROB_ERROR:
        tally.fault(name, f"a log-probability is off by {worst:.3g}")


def _check_prompt_logprobs(name: str, reply: residuum.Reply, known: Expected, tally: Tally) -> None:
    found = reply.prompt_logprobs
    prompt = list(reply.prompt_token_ids)
    if found is None or len(found.tokens) != len(prompt):
        tally.fault(name, "the log-probabilities of the prompt are missing")
        return
    count = max(min(known.decided, len(prompt) - 1), 0)
    worst = np.abs(found.tokens[1 : count + 1] - known.logprobs[np.arange(count), prompt[1 : count + 1]]).max(initial=0)
    tally.counts["log-probabilities of prompts compared"] += count
    if not worst <= LOGPROB_ERROR:
        tally.fault(name, f"a log-probability of the prompt is off by {worst:.3g}")


def _check_scores(
    case: Case, given: residuum.Scores | None, known: Expected, first: int, count: int, tally: Tally
) -> None:
    if given is None:
        tally.fault(case.name, "the scores are missing")
        return
    check_scores(case, given, known, first, count, tally)


def check_scores(case: Case, given: residuum.Scores, known: Expected, first: int, count: int, tally: Tally) -> None:
    """Check the scores of `count` rows from position `first` on."""
    for probe in case.probes:
        found = given[probe.name].reshape(-1, probe.num_outputs)
        if len(found) != count:
            tally.fault(case.name, f"{probe.name} has {len(found)} scores for {count} rows")
            continue
        scored = score(probe, np.concatenate([known.at(*place) for place in probe.places], axis=-1))
        rows = slice(first, first + min(max(known.decided - first, 0), count))
        values, bounds = smoothed(probe, scored.values[rows]), scored.bounds[rows]
        bounds = running_bound(bounds) if probe.smooth and len(bounds) else bounds
        if not len(values):
            continue
        part = float((np.abs(found[: len(values)] - values) / bounds).max())
        tally.counts["scores compared"] += len(values)
        kind = "attention probes" if probe.attention else "MLP probes" if probe.mlp else "linear probes"
        tally.counts[f"probes: {kind}"] += 1
        tally.see(f"scores of {kind}", part)
        if not part <= 1:
            at = int((np.abs(found[: len(values)] - values) / bounds).max(axis=1).argmax())
            tally.fault(case.name, f"the score {at} of {probe.name} is {part:.3g} times too far off")


def _check_rules(case: Case, reply: residuum.Reply, index: int, tally: Tally) -> None:
    sequence = reply.sequences[index]
    events = {event.rule: event for event in reply.events if event.sequence == index}
    for rule, _ in case.rules:
        assert sequence.scores is not None
        token, event = firing(rule, sequence.scores[rule.probe_name]), events.pop(rule.name, None)
        if (event.token if event else None) != token:
            tally.fault(case.name, f"rule {rule.name} fired at {event and event.token}, not at {token}")
        if event is None or token is None:
            continue
        tally.counts[f"rule events: {event.action}"] += 1
        column = sequence.scores[rule.probe_name].reshape(len(sequence.token_ids), -1)[:, int(rule.output)]
        if np.float32(event.score) != column[token]:
            tally.fault(case.name, f"the event of {rule.name} has another score")
        ended = sequence.finish_reason == "rule" and token == len(sequence.token_ids) - 1
        if event.action == "abort" and not ended:
            tally.fault(case.name, f"rule {rule.name} did not end the reply")
    if events:
        tally.fault(case.name, f"events of unknown rules: {list(events)}")
