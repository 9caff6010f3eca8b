"""Tables in Markdown, and how figures are written in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; its first column is on the left, figures are on the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def percent(ratio: float | None, digits: int = 1) -> str:
    """Return how far a ratio is from one."""
    return "" if ratio is None else f"{ratio - 1:+.{digits}%}".replace("%", " %")


def seconds(value: float | None) -> str:
    """Return a time with three figures that count."""
    if value is None:
        return ""
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"  # noqa: PLR2004 - three figures and more


def times(ratio: float) -> str:
    """Return a ratio that is not near one."""
    return f"{ratio:.2f} ×"
