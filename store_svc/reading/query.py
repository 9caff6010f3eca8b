"""Queries: which rows of a capture a reader wants. Nothing here does I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2
from residuum.wire.rows.frame_keys import FrameKey
from residuum.wire.selection import (
    captured_positions,
    check_positions,
    expected_rows,
    is_reduced,
    layers_by_site,
    to_ranges,
    wanted_positions,
)
from store_svc.captures.positions import Positions
from store_svc.checks import invalid

_LONGEST_SPAN = 1 << 16
"""The longest span of a frame's positions for which the key alone decides. Writers make far shorter frames."""

_EVERYTHING = selection_pb2.PositionSelection()

Selection = store_pb2.ReadChunksRequest | store_pb2.ReadCapturesRequest
"""A request with a selection of rows, of one capture or of many."""


class Query:
    """The wanted rows: those that the reader selects within the capture's own selection, reduction and expected length.

    The query decides by a frame's key where it can. A frame whose rows are all wanted is sent unchanged, and a frame
    without a wanted row is never touched.
    """

    def __init__(
        self,
        request: Selection,
        description: capture_pb2.CaptureDescription,
        outcomes: Sequence[capture_pb2.SequenceOutcome],
    ) -> None:
        """Create a query.

        Args:
            request: The reader's selection.
            description: The capture's description.
            outcomes: How the capture's sequences ended. Empty until it is sealed; their lengths are then unknown.

        Raises:
            Failure: UNKNOWN_LAYER, UNKNOWN_SITE or INVALID_FIELD if the capture has nothing of what is selected, or the
                selection is invalid.
        """
        _check(request, description)
        self.capture_id = description.capture_id
        by_site = {int(site): layers for site, layers in layers_by_site(description.spec).items()}
        asked = set(request.layers) or set(description.spec.layers.list.layers)
        self._captured: Mapping[int, Sequence[int]] = by_site
        self._layers: Mapping[int, Sequence[int]] = {
            site: [layer for layer in layers if layer in asked] for site, layers in by_site.items()
        }
        self._sites = set(request.sites) or set(description.spec.sites)
        self._sequences = set(request.sequences) or set(range(description.num_sequences))
        self._prompt_tokens = len(description.prompt_token_ids)
        self._spec = description.spec
        self._positions = request.positions
        self._asks_for_all = request.positions == _EVERYTHING
        self._takes_all = self._asks_for_all and description.spec.positions == _EVERYTHING
        self._takes_all = self._takes_all and not is_reduced(description.spec)
        self._lengths = [expected_rows(self._prompt_tokens, len(item.generated_token_ids)) for item in outcomes]

    def layers_at(self, site: int) -> Sequence[int]:
        """Return the wanted layers that the capture has at one of its sites."""
        return self._layers[site]

    def wanted_layers(self, key: FrameKey) -> Sequence[int]:
        """Return the wanted layers from the first to the last one of a frame."""
        return _between(self._layers[key.site], key.first_layer, key.last_layer)

    def layers_between(self, key: FrameKey) -> Sequence[int]:
        """Return the captured layers from the first to the last one of a frame, wanted or not."""
        return _between(self._captured[key.site], key.first_layer, key.last_layer)

    def wants_positions(self, key: FrameKey) -> bool:
        """Tell whether every position from the first to the last one of a frame is certainly wanted."""
        return self._wants_positions(key.sequence, key.first_position, key.last_position)

    def wants_group(self, key: FrameKey) -> bool:
        """Tell whether a frame with this key's sequence, site, first and last layer can have a wanted row."""
        return key.sequence in self._sequences and key.site in self._sites and bool(self.wanted_layers(key))

    def wants(self, key: FrameKey) -> bool:
        """Tell whether this frame can have a wanted row."""
        if not self.wants_group(key):
            return False
        if self._takes_all:
            return not self._lengths or key.first_position < self._lengths[key.sequence]
        span = key.last_position - key.first_position + 1
        return span > _LONGEST_SPAN or bool(self._mask(key.sequence, key.first_position, span).any())

    def wants_whole(self, key: FrameKey) -> bool:
        """Tell whether every row of this frame is certainly wanted."""
        return len(self.wanted_layers(key)) == len(self.layers_between(key)) and self.wants_positions(key)

    def cut(self, header: capture_pb2.ChunkHeader) -> tuple[Sequence[int], Sequence[int]]:
        """Return the indices of the wanted layers and positions in the chunk's lists of layers and positions."""
        chosen, positions = set(self._layers[header.site]), header.positions
        layers = [at for at, layer in enumerate(header.layers) if layer in chosen]
        if self._wants_positions(header.sequence, positions[0], positions[-1]):
            return layers, range(len(positions))
        listed = list(positions)
        wanted = Positions.of(listed).filter(lambda first, count: self._mask(header.sequence, first, count))
        return layers, [at for at, position in enumerate(listed) if position in wanted]

    def _wants_positions(self, sequence: int, first: int, last: int) -> bool:
        """Tell whether every position of a frame from `first` to `last` is certainly wanted."""
        if self._takes_all:
            return not self._lengths or last < self._lengths[sequence]
        span = last - first + 1
        return span <= _LONGEST_SPAN and bool(self._mask(sequence, first, span).all())

    def _mask(self, sequence: int, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Tell which of the positions first, first + 1, ... are wanted; bool [count]."""
        length = self._lengths[sequence] if self._lengths else None
        mask = captured_positions(self._spec, self._prompt_tokens, first, count, length)
        if not self._asks_for_all:
            mask &= wanted_positions(self._positions, self._prompt_tokens, first, count)
        return mask


def _between(ascending: Sequence[int], first: int, last: int) -> Sequence[int]:
    return ascending[bisect_left(ascending, first) : bisect_right(ascending, last)]


def _short(site: str) -> str:
    """Return the name of a site that clients use, from its name in the contract."""
    return site.removeprefix("SITE_").lower()


def _check(request: Selection, description: capture_pb2.CaptureDescription) -> None:
    captured = description.spec.layers.list.layers
    for layer in _others(request.layers, captured):
        message = (
            f"The capture {description.capture_id} has no layer {layer}. Choose among its layers: {_runs(captured)}."
        )
        raise Failure(Reason.ERROR_REASON_UNKNOWN_LAYER, message, layer=layer, layers=len(captured))
    armed = [capture_pb2.Site.Name(site) for site in description.spec.sites]
    for site in _others(request.sites, description.spec.sites):
        known = site in capture_pb2.Site.values()
        name = capture_pb2.Site.Name(site) if known else str(site)  # type: ignore[arg-type] # checked above
        message = (
            f"The capture {description.capture_id} has no site {_short(name)}. "
            f"Choose among its sites: {', '.join(map(_short, armed))}."
        )
        raise Failure(Reason.ERROR_REASON_UNKNOWN_SITE, message, site=name, armed=",".join(armed))
    for sequence in _others(request.sequences, range(description.num_sequences)):
        last = description.num_sequences - 1
        raise invalid(
            "sequences",
            f"sequence {sequence} does not exist: the capture {description.capture_id} has sequences 0 to {last}",
        )
    try:
        check_positions(request.positions)
    except ValueError as error:
        raise invalid("positions", str(error)) from None


def _others(asked: Iterable[int], known: Iterable[int]) -> list[int]:
    return sorted(set(asked) - set(known))


def _runs(ascending: Iterable[int]) -> str:
    """Return ascending numbers as text, such as "3, 5-9"."""
    runs = to_ranges(np.fromiter(ascending, dtype=np.int64))
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
