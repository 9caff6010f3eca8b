"""The prompts of a job: from JSONL, text, a table, or a list."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Union

import numpy as np

from residuum.exceptions import InvalidRequest
from residuum.extraction.inputs.tables import open_table
from residuum.protocol.arguments import short
from residuum.protocol.requests import Prompt

Source = Union[str, "os.PathLike[str]", "Iterable[Prompt | Mapping[str, Any]]"]
"""A file, a dataset's folder, or a list of prompts or of rows with columns."""

_JSON_SUFFIXES = {".jsonl", ".ndjson"}
_TEXT_SUFFIXES = {".txt", ".text"}
_TABLE_SUFFIXES = {".parquet", ".arrow"}
_NOT_JSON = (TypeError, ValueError, RecursionError)
"""What json.dumps raises for a value that JSON cannot have."""


class BadRow(InvalidRequest):
    """A row of the input holds no prompt. The message names the row."""


class Rows(Protocol):
    """The rows of an input, by their number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, number: int) -> Mapping[str, Any]:
        """Return a row as a mapping from column to value.

        Raises:
            BadRow: The row cannot be read.
        """
        ...

    def content(self, number: int) -> Any:
        """Return what the input has as a row, also if the row cannot be read."""
        ...

    def where(self, number: int) -> str:
        """Return where a row is, for people, such as "line 18 of prompts.jsonl"."""
        ...

    def close(self) -> None:
        """Close the input."""
        ...


@dataclass(frozen=True)
class Item:
    """One prompt of a job."""

    index: int
    """Its place in the job."""
    row: int
    """Its row in the input, counted from 0."""
    where: str
    """Where it is, for people."""
    prompt: Prompt | None
    """The prompt; None if the row has none."""
    labels: Mapping[str, Any]
    """The columns to keep."""
    digest: str
    """A digest of the prompt and the kept columns; of what the input has if there is no prompt."""
    error: InvalidRequest | None = None
    """Why there is no prompt."""
    documents: tuple[Mapping[str, Any], ...] = ()
    """If the prompt is a window of packed documents: where each one begins, and its labels."""
    left_out: tuple[Mapping[str, Any], ...] = ()
    """If the prompt is such a window: the broken documents that were left out there, and why."""


class Items:
    """The prompts of a job in their order."""

    def __init__(
        self,
        rows: Rows,
        *,
        column: str,
        keep: Sequence[str] = (),
        chat: bool = False,
        limit: int | None = None,
        shuffle: int | None = None,
    ) -> None:
        """Choose the prompts.

        Args:
            rows: The input.
            column: The column with the prompt: a text, token IDs or a conversation.
            keep: Further columns, which become labels of the rows.
            chat: Whether a text is a user's message in a chat.
            limit: The most prompts.
            shuffle: The seed of a random order; None keeps the order of the input.

        Raises:
            InvalidRequest: The input has no rows.
        """
        if not len(rows):
            raise InvalidRequest("The input has no prompts. Give at least one.", reason="INVALID_FIELD")
        self._rows = rows
        self._column = column
        self._keep = tuple(keep)
        self._chat = chat
        self._order: Sequence[int] = range(len(rows))
        if shuffle is not None:
            self._order = array("q", self._order)
            random.Random(shuffle).shuffle(self._order)  # noqa: S311 - the order is not a secret
        if limit is not None:
            self._order = self._order[:limit]

    def __len__(self) -> int:
        return len(self._order)

    def close(self) -> None:
        """Close the input."""
        self._rows.close()

    def item(self, index: int) -> Item:
        """Return the prompt at a place of the job. If its row is bad, the item has the error."""
        number = self._order[index]
        where = self._rows.where(number)
        try:
            row = self._rows.row(number)
            prompt = self._prompt(row, where)
            kept = {name: self._value(row, name, where) for name in self._keep}
            labels, own_digest = _labels_and_digest(prompt, kept, where)
            _check_text(prompt, where)
        except BadRow as error:
            return Item(index, number, where, None, {}, _digest_of_bad(self._rows.content(number)), error)
        return Item(index, number, where, prompt, labels, own_digest)

    def _prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        value = _plain(self._value(row, self._column, where))
        if isinstance(value, str) and self._chat:
            return [{"role": "user", "content": value}]
        if isinstance(value, (str, list)):
            return value
        raise BadRow(
            f"{where}: the column {self._column!r} holds {short(value)}. A prompt must be a text, a list of token IDs, "
            'or a conversation as a list of {"role": ..., "content": ...}.',
            reason="INVALID_FIELD",
        )

    def _value(self, row: Mapping[str, Any], column: str, where: str) -> Any:
        if column in row:
            return row[column]
        raise BadRow(
            f"{where}: there is no column {column!r}. The row has {', '.join(map(repr, row)) or 'no columns'}. Name "
            "the column with the prompt with column=, and those to keep with keep=.",
            reason="INVALID_FIELD",
        )


def open_rows(source: Source, column: str, keep: Sequence[str]) -> Rows:
    """Return the rows of an input.

    Args:
        source: A file that ends in .jsonl, .txt, .parquet or .arrow; a folder with Parquet files, or one that
            `Dataset.save_to_disk` has written; a split of such a folder, such as data/train for the files
            data/train-00000-of-00002.parquet and so on; or a list.
        column: The column that holds the prompt. A list of plain prompts has only this column.
        keep: The other columns that are needed.

    Raises:
        InvalidRequest: The kind of the input is unknown, a folder has several splits or two versions of one, or a
            table lacks a column.
        OSError: The input cannot be read.
        ImportError: The input is a table, and pyarrow is not installed.
    """
    if not isinstance(source, (str, os.PathLike)):
        return ListedRows(source, column)
    path = Path(source)
    if not path.exists():  # perhaps the name of a split
        return open_table(path, [column, *keep])
    if path.suffix in _JSON_SUFFIXES:
        return JsonLines(path)
    if path.suffix in _TEXT_SUFFIXES:
        return TextLines(path, column)
    if path.is_dir() or path.suffix in _TABLE_SUFFIXES:
        return open_table(path, [column, *keep])
    raise InvalidRequest(
        f"The suffix of {path} names no kind of input. Use .jsonl, .txt (one prompt per line), .parquet or .arrow, or "
        "a folder with a dataset.",
        reason="INVALID_FIELD",
    )


class ListedRows:
    """The rows of a list in memory."""

    def __init__(self, source: Iterable[Any], column: str) -> None:
        if hasattr(source, "columns") and hasattr(source, "to_dict"):  # iterating it gives the names of its columns
            raise TypeError('The input is a table. Give its rows: df.to_dict("records") for a DataFrame of pandas.')
        if isinstance(source, (bytes, Mapping)) or not isinstance(source, Iterable):
            raise TypeError(f"The input must be a path or a list of prompts or rows, not {short(source)}.")
        self._items = list(source)
        self._column = column

    def __len__(self) -> int:
        return len(self._items)

    def row(self, number: int) -> Mapping[str, Any]:
        """Return a row. A plain prompt is a row with one column."""
        item = self._items[number]
        return item if isinstance(item, Mapping) else {self._column: item}

    def content(self, number: int) -> Any:
        """Return what the list has."""
        return self._items[number]

    def where(self, number: int) -> str:
        """Return where a row is."""
        return f"item {number} of the input"

    def close(self) -> None:
        """Do nothing: there is no file."""


class _Lines:
    """The lines of a file that are not blank. They are read when they are needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._numbers = array("q"), array("q")
        self._file = path.open("rb")
        start = len(codecs.BOM_UTF8) if self._file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        self._file.seek(start)
        for number, line in enumerate(self._file, start=1):
            if not line.isspace():
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, number: int) -> str:
        """Return where a row is."""
        return f"line {self._numbers[number]} of {self._path.name}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def content(self, number: int) -> Any:
        """Return the bytes of a line, each as a character."""
        return self._line(number).decode("latin-1").rstrip("\r\n")

    def text(self, number: int) -> str:
        """Return the text of a line.

        Raises:
            BadRow: It is not UTF-8.
        """
        try:
            return self._line(number).decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise BadRow(
                f"{self.where(number)} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Convert "
                "the file first, for example with iconv.",
                reason="INVALID_FIELD",
            ) from None

    def _line(self, number: int) -> bytes:
        self._file.seek(self._starts[number])
        return self._file.readline()


class TextLines(_Lines):
    """One prompt per line."""

    def __init__(self, path: Path, column: str) -> None:
        super().__init__(path)
        self._column = column

    def row(self, number: int) -> Mapping[str, Any]:
        """Return a row with one column."""
        return {self._column: self.text(number)}


class JsonLines(_Lines):
    """One JSON object per line."""

    def row(self, number: int) -> Mapping[str, Any]:
        """Return the object of a line."""
        try:
            row = json.loads(self.text(number))
        except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
            raise BadRow(f"{self.where(number)} is not JSON: {error}.", reason="INVALID_FIELD") from None
        if isinstance(row, dict):
            return row
        raise BadRow(
            f'{self.where(number)} is {short(row)}, not a JSON object such as {{"text": "The sea is"}}.',
            reason="INVALID_FIELD",
        )


def _plain(value: Any) -> Any:
    """Return a value of numpy as one of Python."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _plain_within(value: Any) -> Any:
    """Return a value as one of Python, also within lists and mappings."""
    if isinstance(value, Mapping):
        return {name: _plain_within(item) for name, item in value.items()}
    value = _plain(value)
    return [_plain_within(item) for item in value] if isinstance(value, list) else value


def _labels_and_digest(prompt: Prompt, kept: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """Return the kept columns as values of Python, and the digest of a row.

    Raises:
        BadRow: JSON cannot have a value, such as a mapping with keys of several types.
    """
    try:
        labels = _plain_within(kept)
        return labels, digest([prompt, labels])
    except _NOT_JSON as error:
        raise BadRow(
            f"{where} has a value that cannot be written as JSON: {error}. The keys of mappings must be texts, and no "
            "value may contain itself. Correct the row, or do not keep the column.",
            reason="INVALID_FIELD",
        ) from None


def _digest_of_bad(content: Any) -> str:
    """Return the digest of a row without a prompt. The error is not part of it: its words differ between versions."""
    try:
        return digest([_plain_within(content)])
    except _NOT_JSON:
        return digest([])


def _check_text(prompt: Prompt, where: str) -> None:
    """Check that a prompt can be sent: JSON may name half of a character, which UTF-8 cannot encode.

    Raises:
        BadRow: It cannot.
    """
    try:
        json.dumps(prompt, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadRow(
            f"{where} has half of a character (a lone surrogate), which no prompt can have. Correct the text.",
            reason="INVALID_FIELD",
        ) from None


def digest(value: Any) -> str:
    """Return the digest of what a prompt is."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
