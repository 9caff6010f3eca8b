"""Packing: documents are joined and cut into windows of equal length, as training of sparse autoencoders wants it.

The rule is that of SAELens with its defaults (`prepend_bos=True`, `sequence_separator_token="bos"`): the separator is
between two documents and at the start of each window, unless the document has it there already. What does not fill the
last window is left out.
"""

from __future__ import annotations

import bisect
import operator
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, LeftOutWarning
from residuum.extraction.inputs.prompts import BadRow, Item, Items, digest
from residuum.extraction.inputs.tokenizer import Tokenizer
from residuum.protocol.arguments import short
from residuum.protocol.caller import warn_caller

_CACHED_TOKENS = 4 << 20
"""The most tokens of documents that are kept, so that a long document is not read again for each of its windows."""
_LEAST_TOKENS = 1024
"""As how many tokens a short document counts there: its labels take memory, too."""
_PAUSE_SECONDS = 0.02
"""The longest time between two pauses of `cut`."""
_LARGEST_TOKEN = 2**32 - 1


@dataclass(frozen=True)
class Document:
    """A document, as it is cached."""

    tokens: npt.NDArray[np.uint32]
    """Its token IDs; none if it is broken and left out."""
    row: int
    """Its row in the input."""
    where: str
    """Where it is, for people."""
    labels: Mapping[str, Any]
    """The columns to keep."""


@dataclass(frozen=True)
class Window:
    """The tokens of a window, and which documents they are from."""

    tokens: list[int]
    parts: list[tuple[int, Document, int]]
    """The position of each document's first token, or of the separator before it; the document; and its token there."""
    after: tuple[int, int]
    """The document and the token with which the next window starts."""


class PackedItems:
    """Windows of documents, as the prompts of a job. `cut` must run first."""

    def __init__(
        self,
        documents: Items,
        *,
        length: int,
        separator: int | None,
        tokenizer: Tokenizer | None,
        limit: int | None,
        on_error: Literal["stop", "skip"],
    ) -> None:
        """Choose the documents; this reads none.

        Args:
            documents: The documents in their order.
            length: The tokens of a window.
            separator: The token between documents; None for none.
            tokenizer: Makes tokens of texts; None if the documents are lists of token IDs.
            limit: The most windows.
            on_error: What to do with a document that is broken.
        """
        self.separator = separator
        """The token between documents."""
        self.tokenizer = tokenizer
        """What makes tokens of texts."""
        self._documents = documents
        self._length = length
        self._limit = limit
        self._on_error = on_error
        self._left_out: dict[int, tuple[int, BadRow]] = {}  # in the order of the documents
        self._left_out_numbers: list[int] = []
        self._cache: OrderedDict[int, Document] = OrderedDict()
        self._cached_tokens = 0
        self._starts = array("q"), array("q")

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self._documents)

    def cut(self) -> Iterator[int]:
        """Find where each window starts. This reads all documents once, and pauses now and then.

        Yields:
            At each pause, at which other work may run, the number of documents that have been read.

        Raises:
            InvalidRequest: The documents do not fill a window, or one is broken.
        """
        cursor, paused = (0, 0), time.monotonic()
        while self._limit is None or len(self) < self._limit:
            window: Window | None = None
            for count, step in enumerate(self._windows(*cursor)):
                window = step
                if time.monotonic() - paused > _PAUSE_SECONDS:
                    yield cursor[0] + count
                    paused = time.monotonic()
            if window is None:
                break
            for numbers, number in zip(self._starts, cursor, strict=True):
                numbers.append(number)
            cursor = window.after
        self._left_out_numbers = list(self._left_out)
        self._warn()
        if not len(self):
            raise InvalidRequest(
                f"The documents have fewer than {self._length} tokens in all, and fill no window. Give more documents, "
                "or a smaller context_length.",
                reason="INVALID_FIELD",
            )

    def __len__(self) -> int:
        return len(self._starts[0])

    def close(self) -> None:
        """Close the input."""
        self._documents.close()

    def item(self, index: int) -> Item:
        """Return a window as a prompt."""
        *_, window = [None, *self._windows(*(numbers[index] for numbers in self._starts))]
        if window is None:
            raise InvalidRequest("The input has changed while the job ran. Restore it.", reason="INVALID_FIELD")
        documents: list[dict[str, Any]] = [
            {"position": position, "input_row": document.row, "offset": offset, "labels": dict(document.labels)}
            for position, document, offset in window.parts
        ]
        first = window.parts[0][1]
        where = f"window {index}, which begins in {first.where}"
        value = digest([window.tokens, documents])
        return Item(
            index, first.row, where, window.tokens, {}, value, documents=tuple(documents),
            left_out=tuple(self._left_out_before(index)),
        )  # fmt: skip

    def _left_out_before(self, index: int) -> Iterator[Mapping[str, Any]]:
        """Yield the documents that were left out between the starts of a window and of the next one."""
        starts, numbers = self._starts[0], self._left_out_numbers
        first = bisect.bisect_left(numbers, starts[index]) if index else 0
        last = bisect.bisect_left(numbers, starts[index + 1]) if index + 1 < len(self) else len(numbers)
        for number in numbers[first:last]:
            row, error = self._left_out[number]
            yield {"input_row": row, "failed": {"reason": error.reason, "message": str(error)}}

    def _windows(self, document: int, offset: int) -> Iterator[Window | None]:
        """Yield None after each document, and the window last; only None if the documents do not fill it."""
        tokens: list[int] = []
        parts: list[tuple[int, Document, int]] = []
        while document < len(self._documents):
            found = self._document(document)
            if offset >= len(found.tokens):
                document, offset = document + 1, 0
                yield None
                continue
            parts.append((len(tokens), found, offset))
            if self.separator is not None and found.tokens[offset] != self.separator:
                tokens.append(self.separator)
            count = min(self._length - len(tokens), len(found.tokens) - offset)
            tokens.extend(found.tokens[offset : offset + count].tolist())
            offset += count
            if len(tokens) == self._length:
                yield Window(tokens, parts, (document, offset))
                return

    def _document(self, number: int) -> Document:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        item = self._documents.item(number)
        try:
            tokens = self._tokens_of(item)
        except BadRow as error:
            if self._on_error == "stop":
                raise
            self._left_out[number] = (item.row, error)
            tokens = np.empty(0, np.uint32)
        found = self._cache[number] = Document(tokens, item.row, item.where, item.labels)
        self._cached_tokens += max(_LEAST_TOKENS, len(tokens))
        while self._cached_tokens > _CACHED_TOKENS and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_tokens -= max(_LEAST_TOKENS, len(oldest.tokens))
        return found

    def _tokens_of(self, document: Item) -> npt.NDArray[np.uint32]:
        if isinstance(document.error, BadRow):
            raise document.error
        prompt = document.prompt
        if isinstance(prompt, str):
            if self.tokenizer is not None:
                return np.array(self.tokenizer.encode(prompt), np.uint32)
            raise BadRow(
                f"{document.where} is a text, which can be packed only with a tokenizer. Give the model's folder with "
                "tokenizer=, or documents as lists of token IDs.",
                reason="INVALID_FIELD",
            )
        values = list(prompt or ())
        if any(isinstance(value, Mapping) for value in values):
            raise BadRow(
                f"{document.where} is a conversation. Only texts and lists of token IDs can be packed. Render "
                "conversations to text first.",
                reason="INVALID_FIELD",
            )
        return np.array([_token_id(value, document.where) for value in values], np.uint32)

    def _warn(self) -> None:
        if self._left_out:
            _, first = next(iter(self._left_out.values()))
            warn_caller(f"{len(self._left_out)} documents were left out. The first: {first}", LeftOutWarning)


def _token_id(value: Any, where: str) -> int:
    """Return a token ID as an int of Python; lists of numpy's integers are common."""
    number = None if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or not 0 <= number <= _LARGEST_TOKEN:
        raise BadRow(
            f"{where} has {short(value)} among its token IDs. A token ID is a whole number from 0 to "
            f"{_LARGEST_TOKEN}. Correct the row.",
            reason="INVALID_FIELD",
        )
    return number


def documents_of(lines: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the documents of each prompt: of a packed one, those of its window; else the prompt itself."""
    return [line.get("documents") or [{"position": 0, **line}] for line in lines]
