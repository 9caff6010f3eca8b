"""The positions of a conversation's messages in its prompt.

A chat template is a program, and does not say where it puts a message. So the conversation is rendered a second time,
with a marker in place of each content. What is between the markers is the template's own text. If the prompt is exactly
these texts with the contents between them, the characters of each content are known. Templates may strip the white
space around a content. If the template changes anything else, the match fails and no positions are returned.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Messages = Sequence[dict[str, str]]
    Range = tuple[int, int]

_CHANGED = (
    "The model's chat template does not keep the messages as they are: it changes their text, leaves some out, or "
    "writes other text for other contents. So their positions cannot be found."
)
_OTHER_TOKENS = (
    "The tokens of the prompt cannot be assigned to the characters of the messages, because the tokenizer changes the "
    "text. So the positions of the messages cannot be found."
)


class UnknownSpansError(Exception):
    """The positions cannot be found. The text says why."""


def find_spans(
    messages: Messages,
    render: Callable[[Messages], str],
    token_ids: Sequence[int],
    texts: Sequence[str],
    tokenizer: Any,
) -> capture_pb2.MessageSpans:
    """Return the positions of the messages.

    Args:
        messages: The conversation.
        render: Returns the text of a prompt for messages, as the model's chat template makes it.
        token_ids: The tokens of the prompt.
        texts: The text of each of them.
        tokenizer: The tokenizer.

    Raises:
        UnknownSpansError: The positions cannot be found.
    """
    text = render(messages)
    contents = _content_ranges(messages, render, text)
    starts, ends = zip(*_token_ranges(text, token_ids, texts, tokenizer), strict=True)
    spans = capture_pb2.MessageSpans()
    for message, content in zip(messages, contents, strict=True):
        first, count = _positions(starts, ends, content)
        spans.spans.add(role=message["role"], first_position=first, num_positions=count)
    return spans


def _content_ranges(messages: Messages, render: Callable[[Messages], str], text: str) -> list[Range]:
    """Return the characters [start, end) of each content in the text of the prompt."""
    secret = secrets.token_hex(8)
    marked = render([{**message, "content": f"M{secret}x{at}M"} for at, message in enumerate(messages)])
    parts = re.split(f"M{secret}x(\\d+)M", marked)
    own, order = parts[::2], [int(number) for number in parts[1::2]]
    if sorted(order) != list(range(len(messages))) or not text.startswith(own[0]):
        raise UnknownSpansError(_CHANGED)
    ranges: dict[int, Range] = {}
    at = len(own[0])
    for number, after in zip(order, own[1:], strict=True):
        content = messages[number]["content"]
        is_last = len(ranges) + 1 == len(messages)
        for form in dict.fromkeys((content, content.strip(), content.rstrip(), content.lstrip())):
            end = at + len(form)
            if text.startswith(form + after, at) and (not is_last or end + len(after) == len(text)):
                break
        else:
            raise UnknownSpansError(_CHANGED)
        ranges[number] = at, end
        at = end + len(after)
    return [ranges[number] for number in range(len(messages))]


def _token_ranges(text: str, token_ids: Sequence[int], texts: Sequence[str], tokenizer: Any) -> list[Range]:
    """Return the characters [start, end) of each token in the text of the prompt.

    Every token of a character that takes several tokens gets the whole character.
    """
    if "".join(texts) == text:
        ends = list(accumulate(map(len, texts)))
        starts = [0, *ends[:-1]]
        for at in range(len(ends) - 2, -1, -1):
            if not texts[at]:  # the next token completes its character
                ends[at] = ends[at + 1]
        return list(zip(starts, ends, strict=True))
    # A tokenizer that changes the text, such as one that normalises Unicode, may know the original characters.
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        same = list(encoded["input_ids"]) == list(token_ids)
        offsets = [(int(start), int(end)) for start, end in encoded["offset_mapping"]] if same else []
    except Exception as error:  # a tokenizer without offsets raises one of many classes
        raise UnknownSpansError(_OTHER_TOKENS) from error
    if not same:
        raise UnknownSpansError(_OTHER_TOKENS)
    # Some tokenizers leave white space out of the offsets. It belongs to the token after it.
    befores = [0, *(end for _, end in offsets[:-1])]
    return [
        (before if text[before:start].isspace() else start, end)
        for (start, end), before in zip(offsets, befores, strict=True)
    ]


def _positions(starts: Sequence[int], ends: Sequence[int], content: Range) -> Range:
    """Return the first position whose token overlaps a range of characters, and the number of these tokens."""
    first = bisect_right(ends, content[0])
    return first, max(bisect_left(starts, content[1]) - first, 0) if content[0] < content[1] else 0
