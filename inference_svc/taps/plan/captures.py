"""Which rows of a request are captured, and how they are encoded."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

from inference_svc.taps.encodings.projections import is_computed
from inference_svc.taps.plan.operations import with_selection
from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.limits import BLOCK_TOKENS
from residuum.wire.rows.encodings import RANDOM_PROJECTIONS, row_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from inference_svc.taps.points import TapPoints
    from residuum.v1 import tensor_pb2
    from residuum.wire.rows.encodings import RowFormat

Places = tuple[tuple[capture_pb2.Site.ValueType, tuple[int, ...]], ...]
"""Where rows are captured: sites, ascending, and the layers at each."""


@dataclass(frozen=True)
class RowEncoding:
    """How captured rows are encoded. The fields are those of capture.proto."""

    encoding: capture_pb2.Encoding.ValueType = capture_pb2.ENCODING_RAW
    dimensions: int = 0
    seed: int = 0
    axis: capture_pb2.QuantizationAxis.ValueType = capture_pb2.QUANTIZATION_AXIS_UNSPECIFIED
    rows: tuple[int, ...] = ()
    """For PROJECT, the rows of the vector bank that hold its vectors."""
    sae: str = ""
    """For SAE, the name of the encoder; see `SAECache`."""
    features: int = 0
    """For SAE, the number of its features."""
    chosen: tuple[int, ...] = ()
    """For SAE, the features that are kept; empty: the strongest."""

    @property
    def has_basis(self) -> bool:
        """Whether rows are multiplied with a basis: vectors, an encoder, or the signs of a random projection."""
        return bool(self.rows or self.sae) or self.encoding in RANDOM_PROJECTIONS

    def format_of(self, width: int, dtype: tensor_pb2.DataType.ValueType) -> RowFormat:
        """Return the format of encoded rows that had `width` elements of `dtype`."""
        return row_format(self.encoding, width, dtype, self.dimensions, self.axis, self.features)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RowEncoding:
        """Return the encoding whose `vars` are `data`."""
        return cls(**{**data, "rows": tuple(data["rows"]), "chosen": tuple(data["chosen"])})


@dataclass(frozen=True)
class Capture:
    """Which rows of a request are captured, and how they are encoded."""

    capture_id: str
    sequence: int
    layers: tuple[int, ...]
    """The layers, ascending."""
    positions: selection_pb2.PositionSelection
    sites: tuple[capture_pb2.Site.ValueType, ...] = (capture_pb2.SITE_RESID_POST,)
    """The sites, ascending."""
    sheds: bool = False
    """Drop rows when the ring is full, instead of waiting (policy SHED)."""
    before_steering: bool = False
    """Capture rows as they were before steering."""
    is_probe: bool = False
    """Keep the rows in the worker for the self-test, instead of sending them to a store."""
    encoding: RowEncoding = field(default_factory=RowEncoding)
    reduction: capture_pb2.Reduction.ValueType = capture_pb2.REDUCTION_NONE
    flush_interval: int = BLOCK_TOKENS
    """Most positions of generated tokens that a block holds before it leaves."""
    spare_positions: int = 0
    """With a reduction: how many positions the engine may compute beyond the request's end."""
    site_layers: tuple[tuple[int, ...], ...] = ()
    """The layers at each site, in the order of the sites; empty: `layers` at all of them."""
    is_own: bool = True
    """Whether this rank sends the rows. If it does not, another one does, and needs this rank's parts of them."""

    @cached_property
    def places(self) -> Places:
        """The layers at each site."""
        return tuple(zip(self.sites, self.site_layers or repeat(self.layers), strict=False))

    @cached_property
    def units(self) -> int:
        """Rows of one captured position: one for each site and, within a site, for each layer."""
        return sum(len(layers) for _, layers in self.places)

    @cached_property
    def header_parts(self) -> tuple[bytes, ...]:
        """The part of the chunk headers of each site that the capture alone decides, serialised."""
        return tuple(
            capture_pb2.ChunkHeader(sequence=self.sequence, site=site, layers=layers).SerializeToString()
            for site, layers in self.places
        )

    @property
    def is_reduced(self) -> bool:
        """Whether a reduction replaces many rows by one."""
        return self.reduction != capture_pb2.REDUCTION_NONE

    @property
    def is_computed(self) -> bool:
        """Whether a reduction computes the rows that are sent; see the function `is_computed`."""
        return is_computed(self.reduction)

    @property
    def is_followed(self) -> bool:
        """Whether the sink keeps state for the capture between blocks; see `FollowedCaptures`."""
        return self.is_reduced or self.encoding.has_basis

    def named(self, capture_id: str, sequence: int) -> Self:
        """Return the same capture for another sequence."""
        _ = self.units  # computed once for all of them
        named = object.__new__(type(self))
        vars(named).update(vars(self), capture_id=capture_id, sequence=sequence)
        vars(named).pop("header_parts", None)
        return named

    def to_data(self) -> dict[str, Any]:
        """Return the capture as plain data, for `from_data`."""
        return {
            **{item.name: getattr(self, item.name) for item in fields(self) if item.name != "is_own"},
            "layers": list(self.layers),
            "site_layers": [list(layers) for layers in self.site_layers],
            "sites": [int(site) for site in self.sites],
            "positions": self.positions.SerializeToString(),
            "encoding": {**vars(self.encoding), "rows": list(self.encoding.rows), "chosen": list(self.encoding.chosen)},
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Capture:
        """Return the capture that `to_data` converted."""
        encoding = RowEncoding.from_data(data["encoding"])
        site_layers = tuple(map(tuple, data["site_layers"]))
        restored = {**with_selection(data), "sites": tuple(data["sites"]), "site_layers": site_layers}
        return cls(**{**restored, "encoding": encoding})

    def for_points(self, points: TapPoints) -> Capture | None:
        """Return the part of the capture that some points see; None if they see nothing of it."""
        seen = [(site, points.own(layers)) for site, layers in self.places if points.sees(site)]
        places = [(site, layers) for site, layers in seen if layers]
        if not places:
            return None
        sites, site_layers = zip(*places, strict=True)
        same = len(set(site_layers)) == 1
        layers = site_layers[0] if same else points.own(self.layers)
        return replace(self, sites=sites, layers=layers, site_layers=() if same else site_layers)
