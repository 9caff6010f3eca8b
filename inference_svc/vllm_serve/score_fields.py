"""Adds a field `residuum` with scores and events to the choices of vLLM's answers.

vLLM builds its answers from fields that it knows, so the scores take another way: this ASGI middleware keeps an
`Answer` for each HTTP request. The front end adds the scores of each output before vLLM's endpoint turns the output
into a part of the answer, and the middleware puts them into that part. Answers without scores pass unchanged.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from inference_svc.admission.rules import action_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence

    from inference_svc.engine.streams import Delta
    from residuum.v1 import rule_pb2

    Message = MutableMapping[str, Any]
    Send = Callable[[Message], Awaitable[None]]
    Receive = Callable[[], Awaitable[Message]]
    App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_FIELD = "residuum"
_PREFIX = b"data: "
_BATCH = "/v1/chat/completions/batch"

_current: ContextVar[Answer | None] = ContextVar("residuum_answer", default=None)


def current_answer() -> Answer | None:
    """Return the answer of the current HTTP request; None if the server runs without the middleware."""
    return _current.get()


class Answer:
    """The scores of one HTTP request that its answer does not have yet."""

    def __init__(self, path: str) -> None:
        """Start without scores. `path` is that of the HTTP request."""
        self.is_batch = path.endswith(_BATCH)
        """Whether the answer has a choice for each of several conversations."""
        self.has_scores = False
        """Whether a prompt of the request has probes. Set before the answer begins."""
        self._waiting: dict[int, dict[str, Any]] = defaultdict(dict)

    def add(self, choice: int, names: Sequence[str], delta: Delta) -> None:
        """Add the scores and events of an output.

        Args:
            choice: The index of the output's choice in the answer.
            names: The names of the probes.
            delta: The output's tokens with their scores.
        """
        fields = self._waiting[choice]
        for name, scores in (("scores", delta.scores), ("prompt_scores", delta.prompt_scores)):
            for probe, values in zip(names, scores, strict=False):  # without tokens, there are no scores
                numbers = values.tolist() if values.shape[1] > 1 else values[:, 0].tolist()
                fields.setdefault(name, {}).setdefault(probe, []).extend(map(_plain, numbers))
        if delta.rule_events:
            fields.setdefault("rule_events", []).extend(map(_event, delta.rule_events))

    def put_into(self, document: Any) -> bool:
        """Put what is waiting into the choices of an answer, or of a part of one. Return whether there was anything."""
        choices: Iterable[Any] = document.get("choices") or () if isinstance(document, dict) else ()
        has_changed = False
        for choice in choices:
            # vLLM begins a chat's stream with the role alone, after it has the first token.
            if self._waiting.get(choice["index"]) and not (choice.get("delta") or {}).get("role"):
                choice[_FIELD] = self._waiting.pop(choice["index"])
                has_changed = True
        return has_changed


class ScoreFields:
    """The ASGI middleware: `vllm serve --middleware inference_svc.vllm_serve.score_fields.ScoreFields`."""

    def __init__(self, app: App) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = Answer(scope["path"])
        _current.set(answer)
        await self._app(scope, receive, _Sender(answer, send))


class _Sender:
    """Sends the parts of an answer, with scores if it has any."""

    def __init__(self, answer: Answer, send: Send) -> None:
        self._answer = answer
        self._send = send
        self._start: Message | None = None
        """The start of an answer that is sent with its whole body."""
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if not self._answer.has_scores:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            if message["status"] == 200 and kinds[:1] == [b"application/json"]:  # noqa: PLR2004 - OK
                self._start = message
            else:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._start is None:
            await self._send({**message, "body": self._streamed(message.get("body", b""))})
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole(self._start)

    def _streamed(self, body: bytes) -> bytes:
        """Return a part of a stream of server-sent events with its scores."""
        return b"\n".join(map(self._line, body.split(b"\n")))

    def _line(self, line: bytes) -> bytes:
        return _PREFIX + self._with_scores(line[len(_PREFIX) :]) if line.startswith(_PREFIX + b"{") else line

    async def _send_whole(self, start: Message) -> None:
        body = self._with_scores(self._body)
        others = [item for item in start["headers"] if item[0].lower() != b"content-length"]
        await self._send({**start, "headers": [*others, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    def _with_scores(self, text: bytes) -> bytes:
        try:
            document = json.loads(text)
        except ValueError:  # an event that was cut in two
            return text
        if not self._answer.put_into(document):
            return text
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _event(event: rule_pb2.RuleEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rule": event.rule,
        "token": event.token,
        "score": _plain(event.score),
        "action": action_name(event.action),
    }
    return {**fields, "first_position": event.first_position} if event.HasField("first_position") else fields


def _plain(number: Any) -> Any:
    """Return a number, or a list of numbers, as JSON has it: a number that is not finite becomes null."""
    if isinstance(number, list):
        return [_plain(item) for item in number]
    return number if math.isfinite(number) else None
