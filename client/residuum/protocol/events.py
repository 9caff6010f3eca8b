"""From the events of a generation to its reply. No I/O: both clients use it."""

from __future__ import annotations

from residuum.exceptions import ResiduumError, ServerFault
from residuum.v1 import inference_pb2
from residuum.values.replies import Reply, Sequence, TokenDelta, Usage


class ReplyBuilder:
    """Takes the events of a generation in their order, and knows the reply when the last one is in."""

    def __init__(self) -> None:
        self._started: inference_pb2.GenerationStarted | None = None
        self._finished: inference_pb2.GenerationFinished | None = None
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[int]] = {}

    @property
    def is_started(self) -> bool:
        """Whether the first event has come."""
        return self._started is not None

    @property
    def started(self) -> inference_pb2.GenerationStarted:
        """The first event.

        Raises:
            ServerFault: Something else came first.
        """
        if self._started is None:
            raise ServerFault("The server did not begin the generation with its first event.")
        return self._started

    @property
    def request_id(self) -> str:
        """The name of the request."""
        return self.started.request_id

    def add(self, response: inference_pb2.GenerateResponse) -> TokenDelta | None:
        """Take an event; return the new tokens if there are any in it.

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
            ResiduumError: The last event has not come.
        """
        finished = self._finished
        if finished is None:
            raise ResiduumError(
                "There is no reply yet: read the stream to its end. A stream that was closed before has none.",
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
        )

    def check_end(self) -> None:
        """Check, when the stream has ended well, that it was whole.

        Raises:
            ServerFault: The last event is missing.
        """
        if self._finished is None:
            raise ServerFault(
                "The server ended the generation without its last event.", metadata={"request_id": self.request_id}
            )
        if not self._finished.sequences:
            raise ServerFault("The server finished no sequence.", metadata={"request_id": self.request_id})

    def _add_delta(self, delta: inference_pb2.TokenDelta) -> TokenDelta:
        self._texts.setdefault(delta.sequence, []).append(delta.text)
        self._tokens.setdefault(delta.sequence, []).extend(delta.token_ids)
        return TokenDelta(delta.text, tuple(delta.token_ids), delta.sequence)

    def _sequence(self, index: int, end: inference_pb2.SequenceFinish) -> Sequence:
        text = "".join(self._texts.get(index, ()))
        return Sequence(text, tuple(self._tokens.get(index, ())), end.finish_reason, end.stop_reason)
