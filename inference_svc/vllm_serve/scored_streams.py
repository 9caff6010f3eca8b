"""The scores and rules of a sequence that vLLM generates: they are added to vLLM's own outputs."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from inference_svc.engine.streams import Delta
from residuum.wire.rules import FINISH_REASON

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inference_svc.session.rules import SequenceRules
    from inference_svc.session.scoring import SequenceScores
    from inference_svc.session.sequences import GeneratedSequence

    Scored = tuple[Any, Delta | None]
    """vLLM's output, and its tokens with their scores and events; None without probes."""


async def scored_stream(
    stream: AsyncGenerator[Any],
    sequence: GeneratedSequence,
    scores: SequenceScores | None,
    rules: SequenceRules | None,
) -> AsyncGenerator[Scored]:
    """Yield the outputs of a sequence with their scores. A rule that fires may end it.

    Args:
        stream: vLLM's outputs, of the kind DELTA.
        sequence: The record of the sequence.
        scores: Its scores; None without probes.
        rules: Its rules; None without rules.

    Raises:
        Failure: The scores did not arrive, or the steering of a rule could not be applied.
    """
    if scores is not None:
        scores.is_used = True
    try:
        async with aclosing(stream):
            async for step in stream:
                delta = await scores.add_to(_delta(step)) if scores is not None else None
                if delta is not None and rules is not None:
                    delta = await rules.judge(delta)
                    if delta.finish_reason == FINISH_REASON:
                        _end(step, delta)
                sequence.engine_tokens += len(step.outputs[0].token_ids)
                yield step, delta
                if step.finished:
                    return  # closing the stream stops vLLM's request
    finally:
        sequence.has_ended.set()


def _delta(step: Any) -> Delta:
    completion = step.outputs[0]
    return Delta(completion.text, list(completion.token_ids), completion.finish_reason)


def _end(step: Any, delta: Delta) -> None:
    """Make an output the last one of a sequence that a rule ended."""
    completion, count = step.outputs[0], len(delta.token_ids)
    completion.text, completion.token_ids = delta.text, delta.token_ids
    completion.finish_reason, completion.stop_reason = FINISH_REASON, delta.stop_reason
    if completion.logprobs is not None:
        completion.logprobs = completion.logprobs[:count]
    step.finished = True
