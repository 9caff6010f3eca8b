"""Prompts in JSONL and text files as datasets of Ray Data: the same prompts that `Client.extract` reads.

Ray's own readers change them. That of JSON makes the number 7 of the text "007", and that of text ends lines also
within a prompt, at characters such as U+2028.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

import pyarrow as pa
import ray
from ray.data import Dataset
from ray.data.datasource import FileBasedDatasource

from residuum.extraction.inputs.prompts import BadRow
from residuum.protocol.arguments import short

_BLOCK_LINES = 4096


def read_lines(source: str | list[str], column: str) -> Dataset:
    """Return the prompts of text files: one for each line that is not blank."""
    return ray.data.read_datasource(_Lines(source)).flat_map(partial(_texts, column))


def read_json_lines(source: str | list[str]) -> Dataset:
    """Return the rows of JSONL files, with the values that the files have."""
    return ray.data.read_datasource(_Lines(source)).flat_map(_objects)


class _Lines(FileBasedDatasource):  # type: ignore[misc] # Ray has no types
    """The lines that are not blank, and where they are."""

    def _read_stream(self, f: Any, path: str) -> Iterator[Any]:
        lines: list[bytes] = []
        where: list[str] = []
        for number, line in enumerate(io.BufferedReader(f), start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text and not text.isspace():
                lines.append(text.rstrip(b"\r\n"))
                where.append(f"line {number} of {PurePath(path).name}")
            if len(lines) == _BLOCK_LINES:
                yield pa.table({"line": lines, "where": where})
                lines, where = [], []
        if lines:
            yield pa.table({"line": lines, "where": where})


# These are generators: Ray wraps the error of another function, and the command would print a traceback.
def _texts(column: str, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {column: _text(row)}


def _text(row: Mapping[str, Any]) -> str:
    try:
        return str(row["line"].decode())
    except UnicodeDecodeError as error:
        raise BadRow(
            f"{row['where']} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Convert the file "
            "first, for example with iconv.",
            reason="INVALID_FIELD",
        ) from None


def _objects(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text = _text(row)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise BadRow(f"{row['where']} is not JSON: {error}.", reason="INVALID_FIELD") from None
    if not isinstance(found, dict):
        raise BadRow(
            f'{row["where"]} is {short(found)}, not a JSON object such as {{"text": "The sea is"}}.',
            reason="INVALID_FIELD",
        )
    yield found
