"""Answers a request with a capture that exists already (IF_EXISTS_SKIP), without generating."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from inference_svc.session.messages import finished_message
from residuum.v1 import inference_pb2, rule_pb2
from residuum.wire.probes.rules import FINISH_REASON

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from residuum.v1 import capture_pb2, probe_pb2


class Stops(NamedTuple):
    """What the sequences of a request stop at."""

    strings: Sequence[str]
    token_ids: Sequence[int]
    """The stop tokens that the request names."""
    eos_token_id: int | None
    """The model's own EOS token; None if the request ignores it."""
    are_shown: bool = False
    """Whether the text includes the stop string or stop token (vLLM's `include_stop_str_in_output`)."""
    min_tokens: int = 0
    """No stop string ends a sequence of at most this many tokens."""


@dataclass(frozen=True)
class KeptSequence:
    """One sequence of the capture."""

    token_ids: list[int]
    text: str
    """The text of the tokens, up to the stop string or stop token. Empty without a tokenizer."""
    finish_reason: str
    stop_reason: str
    """The stop string or the rule that ended the sequence. Empty: none did."""
    stop_token_id: int | None = None
    """The stop token that ended the sequence. None: none did, or it was the model's own EOS token."""
    token_texts: capture_pb2.TokenTexts | None = None
    """The texts of the tokens."""
    rule_events: tuple[rule_pb2.RuleEvent, ...] = ()
    """The rules that fired."""
    scores: tuple[probe_pb2.ProbeScores, ...] = ()
    """The scores of the tokens; empty if the capture has none."""


async def kept_sequences(
    manifest: capture_pb2.CaptureManifest,
    stops: Stops,
    text_of: Callable[[Sequence[int], Sequence[int]], Awaitable[str]],
    token_texts_of: Callable[[Sequence[int], Sequence[int]], Awaitable[capture_pb2.TokenTexts]] | None = None,
) -> list[KeptSequence]:
    """Return the sequences of a COMPLETE capture.

    Args:
        manifest: Its manifest.
        stops: What its request stops at.
        text_of: Returns the text of a reply, from the tokens of the prompt and of the reply.
        token_texts_of: Returns the text of each token of a reply in the same way. None: nobody needs them.
    """
    sequences = []
    for index, sequence in enumerate(manifest.sequences):
        token_ids, ended = list(sequence.generated_token_ids), sequence.finish_reason
        prompt, last, stopped_by = manifest.description.prompt_token_ids, None, ""
        text = await text_of(prompt, token_ids)
        # A rule may end a sequence at a token at which vLLM stops, too. Then the text ends where vLLM ends it.
        if token_ids and ended in {"stop", FINISH_REASON}:
            earlier = await text_of(prompt, token_ids[:-1])
            is_token = token_ids[-1] == stops.eos_token_id or token_ids[-1] in stops.token_ids
            # vLLM looks for stop strings in the text that it shows, which a stop token may end before.
            has_strings = len(token_ids) > stops.min_tokens and (stops.are_shown or not is_token)
            at, stopped_by = _stop_of(text, earlier, stops.strings if has_strings else ())
            if stopped_by:
                text = text[: at + len(stopped_by) if stops.are_shown else at]
            elif is_token or ended == "stop":  # a stop token, perhaps one of the model's further EOS tokens
                text = text if stops.are_shown else earlier
                has_last = ended == "stop" and token_ids[-1] != stops.eos_token_id
                last = token_ids[-1] if has_last else None
        texts = sequence.token_texts
        if token_texts_of is not None and len(texts.lengths) != len(token_ids):  # the capture is older than these texts
            texts = await token_texts_of(prompt, token_ids)
        events = tuple(event for event in manifest.rule_events if event.sequence == index)
        by_rule = next((event.rule for event in events if event.action == rule_pb2.RULE_ACTION_ABORT), "")
        reason = by_rule if ended == FINISH_REASON else stopped_by
        scores = tuple(sequence.scores.probes)
        sequences.append(KeptSequence(token_ids, text, ended, reason, last, texts, events, scores))
    return sequences


def _stop_of(text: str, earlier: str, stop: Sequence[str]) -> tuple[int, str]:
    """Return where a text ends, and the stop string that ended it, as vLLM does.

    That is the first one that the last token completes. Others may be in the text before, because of `min_tokens`.

    Args:
        text: The text of all tokens.
        earlier: The text of all but the last one. It may end with a part of a character.
        stop: The stop strings.
    """
    known = next((at for at, (old, new) in enumerate(zip(earlier, text, strict=False)) if old != new), len(earlier))
    found = [(at + len(word), at, word) for word in stop if (at := text.find(word, max(known + 1 - len(word), 0))) >= 0]
    _, at, word = min(found, key=itemgetter(0), default=(0, len(text), ""))
    return at, word


async def replay(
    manifest: capture_pb2.CaptureManifest,
    sequences: Sequence[KeptSequence],
    handle: inference_pb2.CaptureHandle | None,
    count_sent: Callable[[int], None],
) -> AsyncGenerator[inference_pb2.GenerateResponse]:
    """Yield the events of `Generate` for a capture that exists already, and count their tokens."""
    description = manifest.description
    yield inference_pb2.GenerateResponse(
        started=inference_pb2.GenerationStarted(
            request_id=description.capture_id,
            prompt_token_ids=description.prompt_token_ids,
            capture=handle,
            skipped=True,
        )
    )
    if manifest.prompt_scores.probes:
        delta = inference_pb2.TokenDelta(prompt_scores=manifest.prompt_scores.probes)
        yield inference_pb2.GenerateResponse(delta=delta)
    for index, item in enumerate(sequences):
        if not item.token_ids:
            continue  # a request with max_tokens=0
        delta = inference_pb2.TokenDelta(
            sequence=index,
            text=item.text,
            token_ids=item.token_ids,
            scores=item.scores,
            rule_events=item.rule_events,
        )
        count_sent(len(item.token_ids))
        yield inference_pb2.GenerateResponse(delta=delta)
    yield finished_message(
        inference_pb2.GenerationFinished(
            sequences=[
                inference_pb2.SequenceFinish(
                    finish_reason=item.finish_reason,
                    stop_reason=item.stop_reason,
                    generated_tokens=len(item.token_ids),
                    stop_token_id=item.stop_token_id,
                    token_texts=item.token_texts,
                )
                for item in sequences
            ],
            usage=inference_pb2.Usage(
                prompt_tokens=len(description.prompt_token_ids),
                generated_tokens=sum(len(item.token_ids) for item in sequences),
            ),
            capture=handle,
        )
    )
