"""Pictures of a value for each layer and position, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

_DOWN, _LEFT, _TOP = 14, 64, 26
_WHITE, _RED = 255, (178, 24, 43)
_NARROWEST = 344
"""The least width, which leaves room for the title."""
_LABELLED = 5
"""Every fifth layer has a label."""
_LETTER = 6
"""The width of a letter, for the number of letters that a cell shows."""
_DARK = 0.6
"""From this share on, white text is easier to read."""


class Cell(NamedTuple):
    """What the picture shows for a layer and position."""

    share: float
    """From 0, white, to 1, red; other numbers are clipped, and NaN is white."""
    details: str
    """What the mouse pointer shows."""
    text: str = ""
    """A text inside the cell, which is cut if it is too long."""


def grid_picture(
    title: str,
    layers: Sequence[int],
    cells: Sequence[Sequence[Cell]],
    columns: Sequence[Sequence[str]],
    across: int = 56,
) -> str:
    """Return a picture as SVG: layers from bottom to top, positions from left to right.

    Args:
        title: The title.
        layers: The layer of each row of cells.
        cells: [layers][positions].
        columns: The lines of text below each position.
        across: The width of a cell.
    """
    return "\n".join(_lines(title, layers, cells, columns, across))


def _lines(
    title: str, layers: Sequence[int], cells: Sequence[Sequence[Cell]], columns: Sequence[Sequence[str]], across: int
) -> Iterator[str]:
    width, bottom = max(_LEFT + across * len(columns) + 12, _NARROWEST), _TOP + _DOWN * len(layers)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 40}" font-family="sans-serif">'
    yield "<style>text { font-size: 10px }</style>"
    yield '<rect width="100%" height="100%" fill="white"/>'
    yield f'<text x="{_LEFT}" y="14">{escape(title)}</text>'
    for index, (layer, row) in enumerate(zip(layers, cells, strict=True)):
        y = _TOP + _DOWN * (len(layers) - 1 - index)
        if index % _LABELLED == 0 or index == len(layers) - 1:
            yield f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">layer {layer}</text>'
        for place, cell in enumerate(row):
            yield from _cell(cell, layer, _LEFT + across * place, y, across)
    for place, lines in enumerate(columns):
        for number, text in enumerate(lines):
            x, y = _LEFT + across * place + across // 2, bottom + 14 + 12 * number
            yield f'<text x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'
    yield "</svg>\n"


def _cell(cell: Cell, layer: int, x: int, y: int, across: int) -> Iterator[str]:
    share = float(np.clip(np.nan_to_num(cell.share), 0, 1))
    colour = tuple(round(_WHITE - share * (_WHITE - end)) for end in _RED)
    details = f"<title>layer {layer}, {escape(cell.details)}</title>"
    yield (
        f'<rect x="{x}" y="{y}" width="{across}" height="{_DOWN}" fill="rgb{colour}" stroke="#ddd" stroke-width="0.5">'
        f"{details}</rect>"
    )
    if cell.text:
        most = across // _LETTER
        shown = cell.text if len(cell.text) <= most else cell.text[: most - 1] + "…"
        fill = "white" if share > _DARK else "black"
        place = f'x="{x + across // 2}" y="{y + 10}" text-anchor="middle" fill="{fill}"'
        yield f"<text {place}>{escape(shown)}{details}</text>"
