"""Rows of many captures as one array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.values.captures.activations import Activations
from residuum.values.captures.alike import Kind
from residuum.wire.labels import LabelValue


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one layer at one site, of many captures, as one array. All arrays have the same order.

    Rows are ordered by capture, then by sequence, then by position. A partial capture has only its present rows.

    Attributes:
        layer: The layer.
        site: The site, such as "resid_post".
        captures: The IDs of the captures, in the order in which they were asked for. One without a row is also listed.
        values: The rows; float32 [rows, width].
        capture_index: Each row's capture, as an index into `captures`; int64 [rows].
        sequences: Each row's sequence; int64 [rows].
        positions: Each row's position, counted over prompt and reply; int64 [rows].
        token_ids: The token ID at each row's position, -1 if unknown; int64 [rows].
        capture_labels: The labels of each capture, in the order of `captures`.

    Example:
        >>> rows = client.rows(prefix="train-", layer=12, positions="last_prompt")
        >>> rows.values.shape, len(rows.captures)
        ((500, 576), 500)
    """

    layer: int
    site: str
    captures: tuple[str, ...]
    values: npt.NDArray[np.float32]
    capture_index: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]

    capture_labels: tuple[Mapping[str, LabelValue], ...]

    def labels(self, name: str) -> list[LabelValue | None]:
        """Return the label of each row's capture; None for a capture without the label.

        Example:
            >>> probe = LogisticRegression().fit(rows.values, rows.labels("y"))
        """
        found = [labels.get(name) for labels in self.capture_labels]
        return [found[index] for index in self.capture_index.tolist()]

    @property
    def ids(self) -> npt.NDArray[np.str_]:
        """The ID of each row's capture; [rows]."""
        return np.array(self.captures, dtype=np.str_)[self.capture_index]

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        count, width = self.values.shape
        return f"Rows({count} × {width}, {len(self.captures)} captures, {self.site} of layer {self.layer})"


def check_one(layer: object, site: object) -> None:
    """Check that a layer is one number and a site one name.

    Raises:
        InvalidRequest: They are not.
    """
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
        raise InvalidRequest(
            f"layer= takes the number of one layer, such as 12, not {layer!r}. For several layers, make a call for "
            "each.",
            reason="INVALID_FIELD",
            metadata={"field": "layer"},
        )
    if not isinstance(site, str):
        raise InvalidRequest(
            f"site= takes the name of one site, such as 'resid_post', not {site!r}. For several sites, make a call for "
            "each.",
            reason="INVALID_FIELD",
            metadata={"field": "site"},
        )


class RowsBuilder:
    """Collects the rows of one layer at one site."""

    def __init__(self, layer: int, site: str) -> None:
        check_one(layer, site)
        self._layer = layer
        self._site = site
        self._captures: list[str] = []
        self._labels: list[Mapping[str, LabelValue]] = []
        self._kind: Kind | None = None
        self._width = 0
        self._values: list[npt.NDArray[np.float32]] = []
        self._columns: tuple[list[npt.NDArray[np.int64]], ...] = ([], [], [], [])

    def add(self, acts: Activations) -> None:
        """Add the rows of a capture.

        Raises:
            InvalidRequest: Its rows have another width than those of the captures before it, or mean something else.
        """
        capture_id, index = acts.manifest.capture_id, len(self._captures)
        self._captures.append(capture_id)
        self._labels.append(acts.manifest.labels)
        if self._kind is None:
            self._kind, self._width = Kind(acts.manifest), acts.width
        if acts.width != self._width:
            raise InvalidRequest(
                f"The rows of {self._kind.first} have {self._width} elements, and those of {capture_id} have "
                f"{acts.width}, so they do not fit into one array. Read captures of one model and encoding.",
                reason="INVALID_FIELD",
            )
        self._kind.check(acts.manifest, "array of rows")
        for sequence in acts.sequences:
            part = acts.select(sequence=sequence, site=self._site)
            present = part.present[part.layers.index(self._layer)]
            values, positions, tokens = part[self._layer], part.positions, part.token_ids
            if not present.all():
                values, positions, tokens = values[present], positions[present], tokens[present]
            self._values.append(values)
            for column, items in zip(
                self._columns,
                (_same(index, len(values)), _same(sequence, len(values)), positions, tokens),
                strict=True,
            ):
                column.append(items)

    def rows(self) -> Rows:
        """Return all rows. Without a capture, their width is 0."""
        values = np.concatenate(self._values) if self._values else np.empty((0, 0), np.float32)
        columns = [np.concatenate(column) if column else np.empty(0, np.int64) for column in self._columns]
        return Rows(
            layer=self._layer,
            site=self._site,
            captures=tuple(self._captures),
            values=values,
            capture_index=columns[0],
            sequences=columns[1],
            positions=columns[2],
            token_ids=columns[3],
            capture_labels=tuple(self._labels),
        )


def _same(number: int, count: int) -> npt.NDArray[np.int64]:
    return np.full(count, number, dtype=np.int64)


def in_order(wanted: Sequence[str], found: Iterable[Activations]) -> list[Activations]:
    """Return activations in the order of their captures' IDs."""
    by_id = {acts.manifest.capture_id: acts for acts in found}
    return [by_id[capture_id] for capture_id in wanted]
