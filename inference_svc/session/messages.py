"""The messages of the tokens that a step of the engine adds to a sequence, and the last message of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_svc.requests.token_texts import unknown_texts
from inference_svc.session.scores.joined import JoinedScores
from residuum.v1 import inference_pb2
from residuum.wire.limits import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    from inference_svc.engine.streams import Delta, Scored
    from residuum.v1 import probe_pb2

_MESSAGE_SCORES = 1 << 17
"""Scores in one message: 512 KiB."""

_FINISHED_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""The largest last message of a request. Callers refuse a longer message than MAX_MESSAGE_BYTES."""

_TEXTS_TOO_LONG = "The texts of the tokens of all sequences are too long for one message."


def finished_message(finished: inference_pb2.GenerationFinished) -> inference_pb2.GenerateResponse:
    """Return the last message of a request. If it would be too long, it lacks the texts of the tokens."""
    if finished.ByteSize() > _FINISHED_BYTES:
        for sequence in finished.sequences:
            sequence.token_texts.CopyFrom(unknown_texts(_TEXTS_TOO_LONG))
    return inference_pb2.GenerateResponse(finished=finished)


def messages(index: int, delta: Delta) -> Iterable[inference_pb2.GenerateResponse]:
    """Return the messages of a delta: usually one, but many log-probabilities or scores take several.

    Args:
        index: The sequence.
        delta: What the step adds. If it adds nothing, there is no message.
    """
    is_plain = delta.logprobs is None and delta.prompt_logprobs is None and not delta.prompt_scores
    if is_plain and len(delta.token_ids) == 1:  # almost always
        return (_message_of_token(index, delta),)
    if not delta.rule_events:
        return _pieces(index, delta)
    made = [*_pieces(index, delta)]
    made[-1].delta.rule_events.extend(delta.rule_events)  # there is one: the event is that of a token
    return made


def _message_of_token(index: int, delta: Delta) -> inference_pb2.GenerateResponse:
    """Return the message of a delta of one token without log-probabilities."""
    message = _message(index, delta.text, delta.token_ids)
    scores = delta.scores
    if isinstance(scores, JoinedScores):
        # To parse the field takes a fraction of the time that objects for its probes take.
        message.delta.MergeFromString(scores.field())
    elif scores:
        _add_scores(message.delta.scores, scores, slice(1))
    if delta.rule_events:
        message.delta.rule_events.extend(delta.rule_events)
    return message


def _pieces(index: int, delta: Delta) -> Iterator[inference_pb2.GenerateResponse]:
    if delta.prompt_scores:
        for piece in _divided(delta.prompt_scores, 0, len(delta.prompt_scores[0])):
            message = _message(index)
            _add_scores(message.delta.prompt_scores, delta.prompt_scores, piece)
            yield message
    if delta.prompt_logprobs is not None:
        for part in delta.prompt_logprobs.parts():
            message = _message(index)
            message.delta.prompt_logprobs.CopyFrom(delta.prompt_logprobs.part(part))
            yield message
    if delta.text or delta.token_ids:
        yield from _pieces_of_tokens(index, delta)


def _pieces_of_tokens(index: int, delta: Delta) -> Iterator[inference_pb2.GenerateResponse]:
    tokens, text = slice(0, len(delta.token_ids)), delta.text
    for part in (tokens,) if delta.logprobs is None else delta.logprobs.parts():
        for piece in _divided(delta.scores, part.start, part.stop) if delta.scores else (part,):
            message = _message(index, text, delta.token_ids[piece])
            if delta.logprobs is not None:
                message.delta.logprobs.CopyFrom(delta.logprobs.part(piece))
            _add_scores(message.delta.scores, delta.scores, piece)
            yield message
            text = ""


def _message(index: int, text: str = "", token_ids: Sequence[int] = ()) -> inference_pb2.GenerateResponse:
    """Return a new message. Messages are filled in place: a message that is given to another one is copied."""
    message = inference_pb2.GenerateResponse()
    delta = message.delta
    delta.sequence = index  # sets `delta`, whatever else is empty
    delta.text = text
    delta.token_ids.extend(token_ids)
    return message


def _add_scores(field: RepeatedCompositeFieldContainer[probe_pb2.ProbeScores], scores: Scored, part: slice) -> None:
    for values in scores:
        field.add().values.extend(values[part].ravel().tolist())  # a list of floats takes a tenth of an array's time


def _divided(scores: Scored, start: int, stop: int) -> Iterator[slice]:
    """Divide rows of scores into pieces that fit a message."""
    rows = max(_MESSAGE_SCORES // sum(values.shape[1] for values in scores), 1)
    for first in range(start, stop, rows):
        yield slice(first, min(first + rows, stop))
