"""The tokens that a search found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from residuum.v1 import store_pb2

LEFT_OUT = {
    store_pb2.LEFT_OUT_REASON_OPEN: "open",
    store_pb2.LEFT_OUT_REASON_NO_LAYER: "no_layer",
    store_pb2.LEFT_OUT_REASON_OTHER_WIDTH: "other_width",
    store_pb2.LEFT_OUT_REASON_ENCODING: "encoding",
    store_pb2.LEFT_OUT_REASON_DAMAGED: "damaged",
    store_pb2.LEFT_OUT_REASON_GONE: "gone",
}
"""The names of the reasons why a search leaves out captures."""

_WORDS = {
    "open": "still open",
    "no_layer": "without the layer and site",
    "other_width": "with rows of another width",
    "encoding": "in an encoding that is not searched (rp, rp8, project or sae)",
    "damaged": "damaged",
    "gone": "deleted meanwhile",
}
_CONTEXT = 40
"""Characters of text that a line shows before and after a token."""


@dataclass(frozen=True)
class SearchHit:
    """A token that a search found.

    Attributes:
        capture_id: The capture.
        sequence: The sequence.
        position: The position of the token's row. A reduced row has the last position that it covers.
        score: The row's score: its dot product with the vector, or their cosine.
        token_id: The token; None if the capture does not know its tokens.
        token: The text of the token; None if the capture does not have the texts of its tokens.
        before: The text before it.
        after: The text after it.
        tenant: The capture's tenant; "" is the default tenant.
    """

    capture_id: str
    sequence: int
    position: int
    score: float
    token_id: int | None = None
    token: str | None = None
    before: str = field(default="", repr=False)
    after: str = field(default="", repr=False)
    tenant: str = field(default="", repr=False)

    @classmethod
    def from_proto(cls, hit: store_pb2.SearchHit) -> SearchHit:
        """Create a hit from its message."""
        return cls(
            hit.capture_id,
            hit.sequence,
            hit.position,
            hit.score,
            token_id=hit.token_id if hit.HasField("token_id") else None,
            token=hit.text if hit.HasField("text") else None,
            before=hit.text_before,
            after=hit.text_after,
            tenant=hit.tenant,
        )

    @property
    def text(self) -> str:
        """The token in «» with the text around it, on one line. Without texts: the token's ID."""
        if self.token is None:
            return "" if self.token_id is None else f"token {self.token_id}"
        before, after = self.before[-_CONTEXT:], self.after[:_CONTEXT]
        return "".join([*map(_one_line, (before, f"«{self.token}»", after))])

    def __str__(self) -> str:
        return f"{self.score:.4g}  {self.capture_id}  {self.sequence}:{self.position}  {self.text}"


@dataclass(frozen=True)
class SearchResult(Sequence[SearchHit]):
    """The hits of a search, the best first, as a sequence. `str` shows them as a table.

    Attributes:
        hits: The hits.
        num_captures: The captures that the filter selects.
        rows_scanned: The rows that were scanned.
        bytes_scanned: The bytes of these rows in the stores.
        rows_without_score: The rows among them that have no finite score: rows with NaN or infinity, and for a cosine
            rows that are zero.
        left_out: How many captures were left out, by reason: "open", "no_layer", "other_width", "encoding", "damaged",
            "gone".

    Example:
        >>> found = client.search(joy, layer=12, k=3)
        >>> found[0].token, found[0].before
        (' happy', 'She was')
    """

    hits: tuple[SearchHit, ...] = field(repr=False)
    num_captures: int
    rows_scanned: int
    bytes_scanned: int
    rows_without_score: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.hits)

    @overload
    def __getitem__(self, index: int) -> SearchHit: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[SearchHit, ...]: ...

    def __getitem__(self, index: int | slice) -> SearchHit | tuple[SearchHit, ...]:
        return self.hits[index]

    @property
    def summary(self) -> str:
        """What was searched, in one line."""
        searched = self.num_captures - sum(self.left_out.values())
        without = f" ({self.rows_without_score} without a finite score)" if self.rows_without_score else ""
        return f"{self.rows_scanned:,} rows{without} of {searched:,} captures{self._left_out_text()}"

    def _left_out_text(self) -> str:
        parts = [f"{count:,} {_WORDS.get(reason, reason)}" for reason, count in self.left_out.items()]
        return f"; left out: {', '.join(parts)}" if parts else ""

    def __str__(self) -> str:
        cells = [(f"{hit.score:.4g}", hit.capture_id, f"{hit.sequence}:{hit.position}", hit.text) for hit in self.hits]
        rows = [("score", "capture", "sequence:position", "text"), *cells]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip() for row in rows
        ]
        return "\n".join([*lines, f"{len(self.hits)} of {self.summary}"])


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
