"""Packing: documents are joined and cut into windows of equal length, as training of sparse autoencoders wants it.

The rule is that of SAELens with its defaults (`prepend_bos=True`, `sequence_separator_token="bos"`): the separator is
between two documents and at the start of each window, unless the document has it there already. What does not fill the
last window is left out.
"""

from __future__ import annotations

import functools
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from residuum.exceptions import InvalidRequest, LeftOutWarning
from residuum.extraction.inputs import BadRow, Item, Items, digest
from residuum.extraction.tokenizer import Tokenizer
from residuum.protocol.requests import short


@dataclass(frozen=True)
class Window:
    """The tokens of a window, and which documents they are from."""

    tokens: list[int]
    parts: list[tuple[int, int, int]]
    """The position of each document's first token, or of the separator before it; the document; and its token there."""
    after: tuple[int, int]
    """The document and the token with which the next window starts."""


class PackedItems:
    """Windows of documents, as the prompts of a job."""

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
        """Cut the documents into windows. This reads all of them once, to learn their lengths, and keeps none.

        Args:
            documents: The documents in their order.
            length: The tokens of a window.
            separator: The token between documents; None for none.
            tokenizer: Makes tokens of texts; None if the documents are lists of token IDs.
            limit: The most windows.
            on_error: What to do with a document that is broken.

        Raises:
            InvalidRequest: The documents do not fill a window, or one is broken.
        """
        self._documents = documents
        self._length = length
        self._separator = separator
        self._tokenizer = tokenizer
        self._on_error = on_error
        self._errors: dict[int, BadRow] = {}
        self._recent = functools.lru_cache(maxsize=16)(self._tokens)
        self._starts = array("q"), array("q")
        cursor = (0, 0)
        while limit is None or len(self) < limit:
            window = self._window(*cursor)
            if window is None:
                break
            for numbers, number in zip(self._starts, cursor, strict=True):
                numbers.append(number)
            cursor = window.after
        self._warn()
        if not len(self):
            raise InvalidRequest(
                f"The documents have fewer than {length} tokens in all, and fill no window. Give more documents, or a "
                "smaller context_length.",
                reason="INVALID_FIELD",
            )

    def __len__(self) -> int:
        return len(self._starts[0])

    def close(self) -> None:
        """Close the input."""
        self._documents.close()

    def item(self, index: int) -> Item:
        """Return a window as a prompt."""
        window = self._window(*(numbers[index] for numbers in self._starts))
        if window is None:
            raise InvalidRequest("The input has changed while the job ran. Restore it.", reason="INVALID_FIELD")
        documents: list[dict[str, Any]] = []
        for position, number, offset in window.parts:
            document = self._documents.item(number)
            documents.append(
                {"position": position, "input_row": document.row, "offset": offset, "labels": dict(document.labels)}
            )
        row = self._documents.item(window.parts[0][1]).row
        where = f"window {index}, which begins in {self._documents.item(window.parts[0][1]).where}"
        value = digest([window.tokens, documents])
        return Item(index, row, where, window.tokens, {}, value, documents=tuple(documents))

    def _window(self, document: int, offset: int) -> Window | None:
        tokens: list[int] = []
        parts: list[tuple[int, int, int]] = []
        while document < len(self._documents):
            rest = self._recent(document)
            if offset >= len(rest):
                document, offset = document + 1, 0
                continue
            parts.append((len(tokens), document, offset))
            if self._separator is not None and rest[offset] != self._separator:
                tokens.append(self._separator)
            count = self._length - len(tokens)
            tokens.extend(rest[offset : offset + count])
            offset += min(count, len(rest) - offset)
            if len(tokens) == self._length:
                return Window(tokens, parts, (document, offset))
        return None

    def _tokens(self, number: int) -> Sequence[int]:
        document = self._documents.item(number)
        try:
            return self._tokens_of(document)
        except BadRow as error:
            if self._on_error == "stop":
                raise
            self._errors[number] = error
            return ()

    def _tokens_of(self, document: Item) -> Sequence[int]:
        if isinstance(document.error, BadRow):
            raise document.error
        text = document.prompt
        if isinstance(text, str):
            if self._tokenizer is not None:
                return self._tokenizer.encode(text)
            raise BadRow(
                f"{document.where} is a text, which can be packed only with a tokenizer. Give the model's folder with "
                "tokenizer=, or documents as lists of token IDs.",
                reason="INVALID_FIELD",
            )
        tokens = list(text or ())
        if all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
            return [token for token in tokens if isinstance(token, int)]
        raise BadRow(
            f"{document.where} holds {short(text)}. Only texts and lists of token IDs can be packed. Render "
            "conversations to text first.",
            reason="INVALID_FIELD",
        )

    def _warn(self) -> None:
        if self._errors:
            first = next(iter(self._errors.values()))
            warnings.warn(
                f"{len(self._errors)} documents were left out. The first: {first}", LeftOutWarning, stacklevel=4
            )


def documents_of(lines: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the documents of each prompt: of a packed one, those of its window; else the prompt itself."""
    return [line.get("documents") or [{"position": 0, **line}] for line in lines]
