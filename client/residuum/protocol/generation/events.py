"""Builds a reply from the events of its generation. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Sequence as Items

from residuum.exceptions import ResiduumError, ServerFault
from residuum.v1 import inference_pb2, probe_pb2
from residuum.values.captures.tokens import split_texts
from residuum.values.probes.probe import Probe
from residuum.values.probes.rules import RuleEvent
from residuum.values.probes.scores import ScoreList, Scores
from residuum.values.replies.generation import Reply, Sequence, TokenDelta, Usage
from residuum.values.replies.logprobs import Logprobs


class ReplyBuilder:
    """Collects the events of a generation, in order, and builds the reply after the last one.

    Args:
        probes: The request's probes, in the order of their scores.
    """

    def __init__(self, probes: Items[Probe] = ()) -> None:
        self._started: inference_pb2.GenerationStarted | None = None
        self._finished: inference_pb2.GenerationFinished | None = None
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[inference_pb2.Logprobs]] = {}
        self._prompt_logprobs: list[inference_pb2.Logprobs] = []
        self._probes = probes
        self._scores: dict[int, ScoreList] = {}
        self._prompt_scores: ScoreList | None = None
        self._events: dict[int, list[RuleEvent]] = {}

    @property
    def is_started(self) -> bool:
        """Whether the first event has arrived."""
        return self._started is not None

    @property
    def started(self) -> inference_pb2.GenerationStarted:
        """The first event.

        Raises:
            ServerFault: It has not arrived.
        """
        if self._started is None:
            raise ServerFault("The server did not send the first event of the generation, `started`.")
        return self._started

    @property
    def request_id(self) -> str:
        """The ID of the request."""
        return self.started.request_id

    def add(self, response: inference_pb2.GenerateResponse) -> TokenDelta | None:
        """Add an event and return its new tokens; None if it has none.

        Raises:
            ServerFault: The event is out of order.
        """
        kind = response.WhichOneof("event")
        if (kind == "started") != (self._started is None) or self._finished is not None:
            raise ServerFault(f"The server sent {kind or 'an unknown event'} out of order.")
        if kind == "delta":
            return self._add_delta(response.delta)
        if kind == "started":
            self._started = response.started
        elif kind == "finished":
            self._finished = response.finished
        return None

    def reply(self) -> Reply:
        """Return the reply.

        Raises:
            ResiduumError: The last event has not arrived.
        """
        finished = self._finished
        if finished is None:
            raise ResiduumError(
                "There is no reply yet. Read the stream to its end; a stream that was closed before its end has no "
                "reply.",
                metadata={"request_id": self.request_id},
            )
        handle = finished.capture if finished.HasField("capture") else self.started.capture
        return Reply(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.started.prompt_token_ids),
            sequences=tuple(self._sequence(index, end) for index, end in enumerate(finished.sequences)),
            usage=Usage(finished.usage.prompt_tokens, finished.usage.generated_tokens),
            store_endpoint=handle.store_endpoint,
            captured=bool(handle.capture_id),
            skipped=self.started.skipped,
            prompt_logprobs=_logprobs(self._prompt_logprobs, of_prompt=True),
            prompt_scores=self._prompt_scores.all() if self._prompt_scores else None,
            events=tuple(event for index in range(len(finished.sequences)) for event in self._events.get(index, ())),
        )

    def check_end(self) -> None:
        """Check that a stream that ended without an error was complete.

        Raises:
            ServerFault: The last event is missing, or has no sequences.
        """
        if self._finished is None:
            raise ServerFault(
                "The server ended the generation without its last event.", metadata={"request_id": self.request_id}
            )
        if not self._finished.sequences:
            raise ServerFault(
                "The server ended the generation without any sequence.", metadata={"request_id": self.request_id}
            )

    def _add_delta(self, delta: inference_pb2.TokenDelta) -> TokenDelta | None:
        prompt_scores = self._add_prompt_scores(delta)
        if delta.HasField("prompt_logprobs"):
            self._prompt_logprobs.append(delta.prompt_logprobs)
            if not (delta.text or delta.token_ids or prompt_scores):
                return None
        own = [delta.logprobs] if delta.HasField("logprobs") else []
        self._logprobs.setdefault(delta.sequence, []).extend(own)
        self._texts.setdefault(delta.sequence, []).append(delta.text)
        self._tokens.setdefault(delta.sequence, []).extend(delta.token_ids)
        scores, events = self._add_scores(delta), tuple(map(RuleEvent.from_proto, delta.rule_events))
        self._events.setdefault(delta.sequence, []).extend(events)
        token_ids, logprobs = tuple(delta.token_ids), _logprobs(own)
        return TokenDelta(delta.text, token_ids, delta.sequence, logprobs, scores, prompt_scores, events)

    def _add_scores(self, delta: inference_pb2.TokenDelta) -> Scores | None:
        if not self._has_scores or (self.started.skipped and not delta.scores):
            return None
        return _extended(self._scores_of(delta.sequence), delta.scores, len(delta.token_ids))

    def _add_prompt_scores(self, delta: inference_pb2.TokenDelta) -> Scores | None:
        if not (self._has_scores and delta.prompt_scores):
            return None
        if self._prompt_scores is None:
            self._prompt_scores = ScoreList(self._probes)
        return _extended(self._prompt_scores, delta.prompt_scores, None)

    @property
    def _has_scores(self) -> bool:
        """Whether the reply has scores."""
        return bool(self._probes)

    def _are_complete(self, sequence: int) -> bool:
        """Whether the scores of a sequence arrived. A capture that a skipped reply repeats may have none."""
        return not self.started.skipped or sequence in self._scores

    def _scores_of(self, sequence: int) -> ScoreList:
        if sequence not in self._scores:
            self._scores[sequence] = ScoreList(self._probes)
        return self._scores[sequence]

    def _sequence(self, index: int, end: inference_pb2.SequenceFinish) -> Sequence:
        text = "".join(self._texts.get(index, ()))
        token_ids = tuple(self._tokens.get(index, ()))
        return Sequence(
            text,
            token_ids,
            end.finish_reason,
            end.stop_reason,
            end.stop_token_id if end.HasField("stop_token_id") else None,
            _logprobs(self._logprobs.get(index, [])),
            _token_texts(end, len(token_ids)),
            self._scores_of(index).all() if self._has_scores and self._are_complete(index) else None,
        )


def _token_texts(end: inference_pb2.SequenceFinish, count: int) -> tuple[str, ...] | None:
    """Return the texts of `count` tokens; None if the server does not know them.

    Raises:
        ServerFault: There is another number of texts.
    """
    if not end.HasField("token_texts") or end.token_texts.unknown_detail:
        return None
    texts = split_texts(end.token_texts)
    if len(texts) != count:
        raise ServerFault(f"The server sent {len(texts)} texts for {count} tokens.")
    return texts


def _logprobs(protos: list[inference_pb2.Logprobs], *, of_prompt: bool = False) -> Logprobs | None:
    """Return the log-probabilities of consecutive messages; None if there are none.

    Raises:
        ServerFault: The lengths in a message are inconsistent.
    """
    try:
        return Logprobs.from_protos(protos, of_prompt=of_prompt) if protos else None
    except ValueError as error:
        raise ServerFault(f"The server sent inconsistent log-probabilities: {error}.") from None


def _extended(scores: ScoreList, protos: Items[probe_pb2.ProbeScores], rows: int | None) -> Scores:
    """Add the scores of further rows, and return them alone.

    Raises:
        ServerFault: Their number is wrong.
    """
    try:
        return scores.extend(protos, rows)
    except ValueError as error:
        raise ServerFault(f"The server sent inconsistent scores: {error}.") from None
