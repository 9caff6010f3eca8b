"""Generates all sequences of a request at the same time, and merges their events into one stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_svc.admission.sampling import is_prefill_only
from inference_svc.engine.sampling import sampling_params
from inference_svc.requests.plans import count_spare_positions, engine_id, make_plan
from inference_svc.requests.token_texts import texts_of
from inference_svc.session.mailbox import Mailbox
from inference_svc.session.messages import finished_message, messages
from residuum.v1 import inference_pb2
from residuum.wire.probes.rules import FINISH_REASON

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

    from inference_svc.engine.engine import Engine
    from inference_svc.engine.streams import Delta
    from inference_svc.requests.registry import Running
    from inference_svc.resources.vector_activator import VectorHold
    from inference_svc.session.burst import Burst
    from inference_svc.session.scores.kept import KeptScores
    from inference_svc.session.scores.rules import SequenceRules
    from inference_svc.session.scores.scoring import SequenceScores
    from inference_svc.session.sequences import GeneratedSequence


@dataclass(frozen=True)
class _Ended:
    """The end of one of a request's sequences."""

    error: BaseException | None = None


class Generation:
    """Generates the sequences of one request."""

    def __init__(
        self,
        engine: Engine,
        running: Running,
        token_ids: Sequence[int],
        sampling: inference_pb2.SamplingParameters,
        vectors: VectorHold,
        sequences: Sequence[GeneratedSequence],
        handle: inference_pb2.CaptureHandle | None,
        count_sent: Callable[[int], None],
        burst: Burst,
        scores: Sequence[SequenceScores] = (),
        rules: Sequence[SequenceRules] = (),
        kept_scores: KeptScores | None = None,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare to generate.

        Args:
            engine: The engine.
            running: The request.
            token_ids: The tokens of its prompt.
            sampling: Its sampling parameters.
            vectors: The vectors that it holds.
            sequences: The record of each sequence, to which the tokens are added.
            handle: Tells clients where to find the capture; None if the request captures nothing.
            count_sent: Called with the number of tokens of each delta that is passed on.
            burst: The requests that arrive at this time. `ready` and the first event wait for the burst's end, or for
                the first token if that comes sooner.
            scores: The scores of each sequence; empty without probes.
            rules: The rules of each sequence; empty without rules.
            kept_scores: Where the scores that are passed on are added; None: they are not stored.
            ready: Called and waited for before the first event, while the engine generates already; None: nothing is.
        """
        self._ready = ready
        self._burst = burst
        self._count_sent = count_sent
        self._kept_scores = kept_scores
        self._scores = scores
        self._rules = rules
        self._engine = engine
        self._running = running
        self._token_ids = token_ids
        self._sampling = sampling
        self._vectors = vectors
        self._sequences = sequences
        self._handle = handle
        self._queue: Mailbox[tuple[int, Delta] | _Ended] = Mailbox()

    async def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yield the events of the generation, in the order that the contract gives."""
        tasks = [asyncio.create_task(self._generate(index)) for index in range(len(self._sequences))]
        self._running.on_abort = self._end_by_abort
        if self._running.aborted.is_set():  # it was aborted before `on_abort` was set
            self._end_by_abort()
        try:
            self._burst.call_after(self._queue.wake)
            items = await self._queue.take()  # empty if the burst is over before the first token comes
            if self._ready is not None:
                await self._ready()
            yield inference_pb2.GenerateResponse(
                started=inference_pb2.GenerationStarted(
                    request_id=self._running.request_id, prompt_token_ids=self._token_ids, capture=self._handle
                )
            )
            open_sequences = len(self._sequences)
            while open_sequences:
                deltas, ends = _merged(items or await self._queue.take())
                items = []
                for index, delta in deltas.items():
                    for event in self._delta(index, delta):
                        yield event
                for end in ends:
                    if end.error is not None:
                        try:
                            raise end.error
                        finally:
                            del end, ends  # the traceback refers to this frame: break the reference cycle
                    open_sequences -= 1
        finally:
            self._running.on_abort = None
            await _stop(tasks)  # closes the engine's generators, which stops the requests in the engine
        yield finished_message(self._finished())

    async def _generate(self, index: int) -> None:
        """Generate one sequence, and put its deltas and its end into the queue."""
        sequence = self._sequences[index]
        scores = self._scores[index] if self._scores else None
        if scores is not None:
            scores.is_used = True
        rules = self._rules[index] if self._rules else None
        has_no_reply = is_prefill_only(self._sampling)
        try:
            stream = self._engine.generate(
                engine_id(self._running.path, index),
                self._token_ids,
                sampling_params(self._sampling, index),
                make_plan(
                    self._running,
                    index,
                    len(self._token_ids),
                    self._vectors.rows,
                    count_spare_positions(self._sampling, self._running.spec.probes),
                    scores.region if scores else None,
                ),
                self._running.cache_salt(len(self._token_ids)),
                self._running.spec.adapter,
            )
            async with aclosing(stream):
                async for output in stream:
                    delta = output if scores is None else await scores.add_to(output)
                    delta = delta.without_tokens() if has_no_reply else delta
                    delta = delta if rules is None else await rules.judge(delta)
                    sequence.engine_tokens += len(delta.token_ids)
                    self._queue.put((index, delta))
                    if delta.finish_reason == FINISH_REASON:
                        break  # closing the stream stops the engine's request
        except Exception as error:  # noqa: BLE001 - the consumer of the queue raises it
            self._queue.put(_Ended(error))
        else:
            self._queue.put(_Ended())
        finally:
            sequence.has_ended.set()

    def _end_by_abort(self) -> None:
        self._queue.put(_Ended(self._running.aborted_failure()))

    def _delta(self, index: int, delta: Delta) -> Iterable[inference_pb2.GenerateResponse]:
        """Record a delta, and return its messages: usually one, but many log-probabilities take several."""
        sequence = self._sequences[index]
        sequence.add(delta.token_ids, delta.finish_reason, delta.stop_reason, delta.stop_token_id)
        sequence.rule_events += delta.rule_events
        if self._kept_scores is not None:
            self._kept_scores.add(index, delta)
        self._count_sent(len(delta.token_ids))
        return messages(index, delta)

    def _finished(self) -> inference_pb2.GenerationFinished:
        return inference_pb2.GenerationFinished(
            sequences=[
                inference_pb2.SequenceFinish(
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                    generated_tokens=len(sequence.token_ids),
                    stop_token_id=sequence.stop_token_id,
                    token_texts=texts_of(sequence.texts),
                )
                for sequence in self._sequences
            ],
            usage=inference_pb2.Usage(
                prompt_tokens=len(self._token_ids),
                generated_tokens=sum(len(sequence.token_ids) for sequence in self._sequences),
            ),
            capture=self._handle,
        )


def _merged(items: Iterable[tuple[int, Delta] | _Ended]) -> tuple[dict[int, Delta], list[_Ended]]:
    """Return items with one delta for each sequence.

    There are several if the client is slower than the engine: then messages get longer, and the queue does not grow.
    """
    deltas: dict[int, Delta] = {}
    ends: list[_Ended] = []
    for item in items:
        if isinstance(item, _Ended):
            ends.append(item)
        else:
            index, delta = item
            deltas[index] = deltas[index].followed_by(delta) if index in deltas else delta
    return deltas, ends


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks that have not ended, and wait for their end."""
    unfinished = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    if unfinished:
        await asyncio.gather(*unfinished, return_exceptions=True)
