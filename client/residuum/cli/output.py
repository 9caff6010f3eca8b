"""Output of commands: tables on a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_COMMAND_LINE_ADVICE = {
    "Give a longer timeout, or none with timeout=None": "Give a longer --timeout, or none",
    "wait=False, allow_partial=True": "--no-wait --allow-partial",
    "allow_partial=True": "--allow-partial",
    "overwrite=True": "--force",
    "Set if_exists='replace'": "Pass --if-exists replace",
    "set if_exists": "pass --if-exists",
    "Wait for it, or follow() it": "Wait for it",
    "Client(..., store='host:port')": "--store HOST:PORT",
    "with store=": "with --store",
    "TLS(..., server_name='NAME')": "--tls-server-name NAME",
    "TLS(..., cert='client.pem', key='client.key')": "--client-cert and --client-key",
    "tls=TLS(ca='ca.pem')": "--tls-ca FILE",
    "Connect without (tls=False)": "Leave --tls and --tls-ca, or RESIDUUM_TLS and RESIDUUM_TLS_CA, out",
    "the same call again with if_exists='skip'": "the same command again with --if-exists skip",
    "insecure=True": "--insecure",
    "on_error='skip'": "--on-error skip",
    "with on_long=": "with --on-long",
    "on_long='truncate'": "--on-long truncate",
    "pack=True": "--pack",
    "chat=True": "--chat",
    "context_length=, the": "--context-length, the",
    "a smaller context_length": "a smaller --context-length",
    "tokenizer= needs": "--tokenizer needs",
    "needs tokenizer=": "needs --tokenizer",
    "with tokenizer=": "with --tokenizer",
    "separator=None": "--separator none",
    "Or give a token ID, or None": "Or give a token ID, or none",
    "which context_length allows": "which --context-length allows",
    "with column=": "with --column",
    "with keep=": "with --keep",
    "needs sae=": "needs --sae",
    "features= needs": "--features needs",
    "leave out gate=": "leave out --gate",
    "leave out site=": "leave out --steer-site",
    "answer= or other=": "--answer or --other",
    "dimensions= ": "--dimensions ",
    "vectors= ": "--onto ",
    "vectors=,": "--onto,",
    "axis= ": "--axis ",
    "seed= ": "--encoding-seed ",
    "flush_interval= ": "--flush-interval ",
    'encoding="': '--encoding "',
    "leave out probes= and rules=": "leave out --probe and --rule",
    "Give each its own: Probe(..., name='question')": "Give each its own with --probe FILE:NAME",
    "client.info().num_layers": "num_layers of `residuum info`",
    "use sites=client.info().sites for all": "`residuum info` lists all",
}
"""Python advice in error messages, and its equivalent on the command line."""


class Output:
    """Prints a command's output."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.is_terminal = sys.stdout.isatty() and not as_json
        self._line_is_open = False

    def rows(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, optional: Sequence[str] = ()) -> int:
        """Print rows as a table, as tab-separated lines, or as one JSON object per line.

        Args:
            columns: The columns to print. JSON always has all fields.
            rows: The rows.
            optional: The columns that a narrow terminal may lack. The first is left out first.

        Returns:
            The number of rows.
        """
        if self.is_terminal:
            cells = [[text(row[column]) for column in columns] for row in rows]
            if cells:
                _print_rows(columns, cells, optional)
            return len(cells)
        count = 0
        for row in rows:
            count += 1
            if self.as_json:
                self.json(row)
            else:
                print(*(text(row[column]) for column in columns), sep="\t")
        return count

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Print named values."""
        if self.as_json:
            self.json(facts)
        elif self.is_terminal:
            _print_facts({name: text(value) for name, value in facts.items()})
        else:
            for name, value in facts.items():
                print(f"{name}\t{text(value)}")

    def say(self, line: str) -> None:
        """Print a line for a person; with --json nothing is printed."""
        if not self.as_json:
            print(line, flush=True)
            self._line_is_open = False

    def write(self, part: str) -> None:
        """Print part of a line immediately; with --json nothing is printed."""
        if part and not self.as_json:
            print(part, end="", flush=True)
            self._line_is_open = not part.endswith("\n")

    def end_line(self) -> None:
        """End the line of which `write` printed a part, if it is not at its end."""
        if self._line_is_open:
            self.say("")

    def json(self, value: object, *, indent: int | None = None) -> None:
        """Print one JSON object, on a line unless it is indented."""
        is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        print(json.dumps(value, default=_plain, indent=indent, ensure_ascii=not is_unicode), flush=True)

    def error(self, message: str) -> None:
        """Print one line on stderr, with Python advice translated to flags."""
        print_error(message)

    def note(self, message: str) -> None:
        """Print one line for a person on stderr, so that it does not mix with the output; nothing with --json."""
        if not self.as_json:
            print(message, file=sys.stderr, flush=True)


def prepare_streams() -> None:
    """Make stdout and stderr usable if the caller has closed them, or if their encoding lacks characters of a reply."""
    # The system frees them when the process ends.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - else print uses stdout
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr


def drop_output() -> None:
    """Drop what cannot be written to stdout any more, so that Python does not try again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(message: str) -> None:
    """Print one line on stderr, with Python advice translated to flags."""
    print(f"residuum: {' '.join(with_flags(message).split())}", file=sys.stderr, flush=True)


def with_flags(message: str) -> str:
    """Return an error message with Python advice translated to flags."""
    for python, ours in _COMMAND_LINE_ADVICE.items():
        message = message.replace(python, ours)
    message = re.sub(r"separator=(?:'(\w+)'|(\d+)) needs", r"--separator \1\2 needs", message)
    return re.sub(r"Client\(store='([^']+)'\)", r"--store \1", message)


_GAP = 2
"""Characters between two columns."""


def _print_rows(columns: Sequence[str], cells: Sequence[Sequence[str]], optional: Sequence[str]) -> None:
    """Print a table with one line for each row. Optional columns are left out until it fits, but IDs are never cut."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    widths = {name: max(map(len, (name, *column))) for name, *column in zip(columns, *cells, strict=True)}
    for name in optional:
        if sum(widths.values()) + _GAP * (len(widths) - 1) <= console.width:
            break
        widths.pop(name, None)
    console.width = max(console.width, sum(widths.values()) + _GAP * (len(widths) - 1))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
    for name, width in widths.items():
        table.add_column(name, width=width, no_wrap=True)
    shown = [index for index, name in enumerate(columns) if name in widths]
    for row in cells:
        table.add_row(*(row[index] for index in shown))
    console.print(table, markup=False, soft_wrap=False, crop=False)


def _print_facts(facts: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    Console().print(table, markup=False)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that end a line or a field, or that a terminal obeys."""


def text(value: object) -> str:
    """Return a value as readable text on one line."""
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text(item)}" for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(map(text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else _CONTROL.sub(lambda found: repr(found[0])[1:-1], str(value))


def age(span: datetime.timedelta) -> str:
    """Return a time span as readable text, such as "3 min"."""
    seconds = max(span.total_seconds(), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _plain_number(value: np.generic) -> object:
    """Return an array's number for JSON: None for NaN and infinity, which JSON does not have."""
    return value.item() if np.isfinite(value) else None


def _plain(value: object) -> object:
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, np.ndarray):
        return [_plain_number(item) for item in value] if value.ndim == 1 else [_plain(row) for row in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
