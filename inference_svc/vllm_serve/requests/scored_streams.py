"""The scores and rules of the sequences that vLLM generates: judged with each output, and recorded."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from inference_svc.engine.streams import Delta
from inference_svc.session.scores.kept import kept_scores_of
from residuum.wire.probes.rules import FINISH_REASON
from svc_common.logs import bind_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from inference_svc.session.capture_session import CaptureSession
    from inference_svc.session.existing_capture import KeptSequence
    from inference_svc.session.scores.rules import SequenceRules
    from inference_svc.session.scores.scoring import SequenceScores
    from inference_svc.session.sequences import GeneratedSequence
    from inference_svc.vllm_serve.requests.request_admission import AdmittedRequest, ReceivedRequest
    from residuum.v1 import capture_pb2

    Scored = tuple[Any, Delta | None]
    """vLLM's output, and its tokens with their scores and events; None without probes."""


async def scored_stream(
    stream: AsyncGenerator[Any],
    known_id: str,
    sequence: GeneratedSequence,
    scores: SequenceScores | None,
    rules: SequenceRules | None,
) -> AsyncGenerator[Scored]:
    """Yield the outputs of a sequence with their scores. A rule that fires may end it.

    Args:
        stream: vLLM's outputs, of the kind DELTA.
        known_id: The ID of the request that the caller knows. The lines of the log that are written meanwhile carry it.
        sequence: The record of the sequence.
        scores: Its scores; None without probes.
        rules: Its rules; None without rules.

    Raises:
        Failure: The scores did not arrive, or the steering of a rule could not be applied.
    """
    # Here and not in the runner: this runs in a task of its own, so no other request of the endpoint gets the ID.
    bind_request(known_id)
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


def record(session: CaptureSession, admitted: AdmittedRequest, index: int, delta: Delta) -> None:
    """Add the scores and events of an output of the sequence `index` to the capture and to the answer."""
    session.sequences[index].rule_events += delta.rule_events
    if session.scores is not None:
        session.scores.add(index, delta)
    answer = admitted.received.answer
    if answer is not None and admitted.spec.probes is not None:
        names = [probe.name for probe in admitted.spec.shown_probes]
        answer.add(_choice(admitted.received, index), names, delta)


def record_kept(
    manifest: capture_pb2.CaptureManifest, admitted: AdmittedRequest, sequences: Sequence[KeptSequence]
) -> None:
    """Add the scores and events of a capture that exists already to the answer."""
    answer = admitted.received.answer
    if answer is None or admitted.spec.probes is None:
        return
    probes = admitted.spec.shown_probes
    for index, item in enumerate(sequences):
        prompt = kept_scores_of(probes, manifest.prompt_scores.probes) if index == 0 else ()
        scores = kept_scores_of(probes, item.scores)
        delta = Delta("", item.token_ids, scores=scores, prompt_scores=prompt, rule_events=item.rule_events)
        answer.add(_choice(admitted.received, index), [probe.name for probe in probes], delta)


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


def _choice(received: ReceivedRequest, index: int) -> int:
    """Return the index of a sequence among the choices of an answer, which has those of all prompts."""
    return received.prompt_number * int(received.sampling.n) + index
