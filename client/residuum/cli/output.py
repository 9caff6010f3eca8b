"""What a command prints: tables on a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Output:
    """Where a command's answer goes."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.is_terminal = sys.stdout.isatty() and not as_json

    def rows(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Show things that have the same columns: a table, tab-separated lines, or a JSON object a line."""
        if self.as_json:
            for row in rows:
                self.json(row)
        elif self.is_terminal:
            self._table(columns, rows)
        else:
            for row in rows:
                print(*(text(row[column]) for column in columns), sep="\t")

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Show what there is to say about one thing."""
        if self.as_json:
            self.json(facts)
        elif self.is_terminal:
            self._table(("", " "), ({"": name, " ": value} for name, value in facts.items()), header=False)
        else:
            for name, value in facts.items():
                print(f"{name}\t{text(value)}")

    def say(self, line: str) -> None:
        """Print a line for a person; programs that asked for JSON get none."""
        if not self.as_json:
            print(line, flush=True)

    def write(self, part: str) -> None:
        """Print a part of a line at once."""
        if not self.as_json:
            print(part, end="", flush=True)

    def json(self, value: object) -> None:
        """Print one JSON object on a line."""
        print(json.dumps(value, default=_plain, ensure_ascii=False), flush=True)

    def error(self, message: str) -> None:
        """Print one line on stderr."""
        print(f"residuum: {' '.join(message.split())}", file=sys.stderr, flush=True)

    def _table(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, header: bool = True) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, show_header=header, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(text(row[column]) for column in columns))
        Console().print(table, markup=False)


def text(value: object) -> str:
    """Return a value as a person reads it, on one line."""
    if isinstance(value, datetime.datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text(item)}" for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(map(text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def size(count: int) -> str:
    """Return bytes as a person reads them, such as "2.5 MiB"."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:  # noqa: PLR2004 - the step between the units
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _plain(value: object) -> object:
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
