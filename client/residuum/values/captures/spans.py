"""The positions of the messages of a conversation, and other spans of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residuum.values.captures.blocks import Places
    from residuum.values.captures.manifest import Manifest

_ASSISTANT = "assistant"
_ADDED_SYSTEM = ": you sent none. The chat template may have added its own, which has no span"


@dataclass(frozen=True)
class MessageSpan:
    """The positions of one message of a conversation: the tokens of its content, without those of the chat template.

    The last generated token has a position but no row, because it is never fed to the model. So a span that ends with
    it, as that of a reply does, has one row fewer than positions.

    Attributes:
        role: The role of its author: "system", "user", "assistant", "tool" or "developer".
        first: The position of its first token.
        last: The position of its last token, inclusive; `first - 1` if it has no tokens.

    Example:
        >>> acts.spans[-1]
        MessageSpan(role='assistant', first=31, last=54)
    """

    role: str
    first: int
    last: int

    def __len__(self) -> int:
        """Return the number of its tokens."""
        return self.last + 1 - self.first


SpanLike = Union[str, int, MessageSpan]  # noqa: UP007 - evaluated at run time on Python 3.10
"""The forms in which users may name a span; see `Activations.select`."""


CHAT_ROLES = ("system", "user", "assistant", "tool", "developer")
"""The roles of messages. Chat templates that do not know one of them leave it out or refuse it."""


def spans_of(manifest: capture_pb2.CaptureManifest, sequence: int) -> tuple[MessageSpan, ...]:
    """Return the messages of the prompt and of one reply, which continues the assistant's message if that is the last.

    Args:
        manifest: The manifest of a sealed capture of a conversation.
        sequence: The sequence of the reply.
    """
    spans = [
        MessageSpan(item.role, item.first_position, item.first_position + item.num_positions - 1)
        for item in manifest.message_spans.spans
    ]
    first = len(manifest.description.prompt_token_ids)
    last = first + len(manifest.sequences[sequence].generated_token_ids) - 1
    if spans and spans[-1].role == _ASSISTANT:
        first = spans.pop().first
    return (*spans, MessageSpan(_ASSISTANT, first, last))


def places_in(span: SpanLike, manifest: Manifest, sequence: int, positions: npt.NDArray[np.int64]) -> Places:
    """Return which of some ascending positions of a sequence are in a span: their indices, a slice if without gaps.

    Raises:
        NoMessageSpans: The prompt is not a conversation, or the positions of its messages are not known.
        InvalidRequest: The conversation has no such message.
        TypeError: The span has none of the accepted forms.
    """
    inside = np.zeros(len(positions), dtype=np.bool_)
    for first, last in _ranges(span, manifest, sequence):
        inside |= (positions >= first) & (positions <= last)
    places = np.flatnonzero(inside)
    if not len(places):
        return slice(0)
    first, end = int(places[0]), int(places[-1]) + 1
    return slice(first, end) if end - first == len(places) else places


def _ranges(span: SpanLike, manifest: Manifest, sequence: int) -> Sequence[tuple[int, float]]:
    """Return the ranges (first, last) of a span, both inclusive."""
    if isinstance(span, MessageSpan):
        return [(span.first, span.last)]
    prompt_tokens = len(manifest.prompt_token_ids)
    if span == "prompt":
        return [(0, prompt_tokens - 1)]
    if span == "reply":
        return [(prompt_tokens, np.inf)]
    if isinstance(span, bool) or not isinstance(span, (str, int, np.integer)):
        raise TypeError(f"span= takes 'prompt', 'reply', a role, an index or a MessageSpan, not {span!r}.")
    if isinstance(span, str) and span not in CHAT_ROLES:
        choices = ", ".join(map(repr, CHAT_ROLES))
        raise _unknown(f"There is no span {span[:60]!r}. Use 'prompt', 'reply', or a role: {choices}.", manifest)
    spans = manifest.spans(sequence)
    if isinstance(span, str):
        found = [(item.first, item.last) for item in spans if item.role == span]
        if not found:
            roles = ", ".join(repr(role) for role in dict.fromkeys(item.role for item in spans))
            why = _ADDED_SYSTEM if span == "system" else ""
            message = f"The conversation has no message of {span!r}{why}. Use {roles}, 'prompt' or 'reply'."
            raise _unknown(message, manifest)
        return found
    if not -len(spans) <= span < len(spans):
        last = len(spans) - 1
        raise _unknown(f"Message {span} does not exist: the conversation has the messages 0 to {last}.", manifest)
    return [(spans[span].first, spans[span].last)]


def _unknown(message: str, manifest: Manifest) -> InvalidRequest:
    return InvalidRequest(message, reason="INVALID_FIELD", metadata={"capture_id": manifest.capture_id})
