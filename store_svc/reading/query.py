"""What a reader wants of a capture. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2
from residuum.wire.selection import (
    captured_positions,
    check_positions,
    expected_rows,
    to_ranges,
    wanted_positions,
)
from store_svc.captures.positions import Positions
from store_svc.checks import invalid
from store_svc.database.keys import FrameKey

_LONGEST_SPAN = 1 << 16
"""From the first to the last position of a frame that is judged by its key alone. Writers make far shorter ones."""

_EVERYTHING = selection_pb2.PositionSelection()


class Query:
    """The rows that are wanted: by the reader, and by the capture's own selection, reduction and expected length.

    Frames are judged by their keys as far as that goes: one whose rows are all wanted is sent as it lies, one of which
    none are wanted is never touched.
    """

    def __init__(
        self,
        request: store_pb2.ReadChunksRequest,
        description: capture_pb2.CaptureDescription,
        outcomes: Sequence[capture_pb2.SequenceOutcome],
    ) -> None:
        """Make a query.

        Args:
            request: What the reader wants.
            description: What the capture is of.
            outcomes: How its sequences ended; empty while it is not sealed, and then its length is not known.

        Raises:
            Failure: UNKNOWN_LAYER, UNKNOWN_SITE or INVALID_FIELD.
        """
        _check(request, description)
        self.capture_id = request.capture_id
        self._captured_layers = list(description.spec.layers.list.layers)
        self._layers = sorted(set(request.layers)) or self._captured_layers
        self._sites = set(request.sites) or set(description.spec.sites)
        self._sequences = set(request.sequences) or set(range(description.num_sequences))
        self._prompt_tokens = len(description.prompt_token_ids)
        self._spec = description.spec
        self._positions = request.positions
        self._asks_for_all = request.positions == _EVERYTHING
        self._lengths = [expected_rows(self._prompt_tokens, len(item.generated_token_ids)) for item in outcomes]

    def wants_group(self, key: FrameKey) -> bool:
        """Tell whether any frame with the same sequence, site, first and last layer can be wanted."""
        return (
            key.sequence in self._sequences
            and key.site in self._sites
            and bool(_between(self._layers, key.first_layer, key.last_layer))
        )

    def wants(self, key: FrameKey) -> bool:
        """Tell whether a row of this frame can be wanted."""
        if not self.wants_group(key):
            return False
        span = key.last_position - key.first_position + 1
        return span > _LONGEST_SPAN or bool(self._mask(key.sequence, key.first_position, span).any())

    def wants_whole(self, key: FrameKey) -> bool:
        """Tell whether every row of this frame is surely wanted."""
        captured = _between(self._captured_layers, key.first_layer, key.last_layer)
        if len(_between(self._layers, key.first_layer, key.last_layer)) != len(captured):
            return False
        span = key.last_position - key.first_position + 1
        return span <= _LONGEST_SPAN and bool(self._mask(key.sequence, key.first_position, span).all())

    def cut(self, header: capture_pb2.ChunkHeader) -> tuple[list[int], list[int]]:
        """Return the indices of the wanted layers and positions in a chunk's own lists of them."""
        layers, positions = set(self._layers), list(header.positions)
        wanted = Positions.of(positions).that(lambda first, count: self._mask(header.sequence, first, count))
        return (
            [at for at, layer in enumerate(header.layers) if layer in layers],
            [at for at, position in enumerate(positions) if position in wanted],
        )

    def _mask(self, sequence: int, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Tell which of the positions first, first + 1, ... are wanted; bool [count]."""
        length = self._lengths[sequence] if self._lengths else None
        mask = captured_positions(self._spec, self._prompt_tokens, first, count, length)
        if not self._asks_for_all:
            mask &= wanted_positions(self._positions, self._prompt_tokens, first, count)
        return mask


def _between(ascending: list[int], first: int, last: int) -> list[int]:
    return ascending[bisect_left(ascending, first) : bisect_right(ascending, last)]


def _check(request: store_pb2.ReadChunksRequest, description: capture_pb2.CaptureDescription) -> None:
    captured = description.spec.layers.list.layers
    for layer in _others(request.layers, captured):
        message = f"The capture has no layer {layer}; it has {_runs(captured)}."
        raise Failure(Reason.ERROR_REASON_UNKNOWN_LAYER, message, layer=layer, layers=len(captured))
    armed = ",".join(capture_pb2.Site.Name(site) for site in description.spec.sites)
    for site in _others(request.sites, description.spec.sites):
        known = site in capture_pb2.Site.values()
        name = capture_pb2.Site.Name(site) if known else str(site)  # type: ignore[arg-type] # the line above
        message = f"The capture has no site {name}; it has {armed.replace(',', ', ')}."
        raise Failure(Reason.ERROR_REASON_UNKNOWN_SITE, message, site=name, armed=armed)
    for sequence in _others(request.sequences, range(description.num_sequences)):
        raise invalid("sequences", f"the capture has {description.num_sequences} sequences, not {sequence}")
    try:
        check_positions(request.positions)
    except ValueError as error:
        raise invalid("positions", str(error)) from None


def _others(asked: Iterable[int], known: Iterable[int]) -> list[int]:
    return sorted(set(asked) - set(known))


def _runs(ascending: Iterable[int]) -> str:
    """Return ascending numbers for a message, such as "3, 5-9"."""
    runs = to_ranges(np.fromiter(ascending, dtype=np.int64))
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
