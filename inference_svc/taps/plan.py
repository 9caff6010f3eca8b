"""Request plans: the capture and the steering operations of one request, for the workers.

A plan travels in `SamplingParams.extra_args`. The worker reads it once, when the request is first scheduled. vLLM
serialises `extra_args` with msgpack, so a plan is plain data, and position selections are protobuf bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from inference_svc.taps.encodings.projections import is_computed
from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.encodings import RANDOM_PROJECTIONS, RowFormat
from residuum.wire.limits import BLOCK_TOKENS
from residuum.wire.selection import selects_any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference_svc.taps.points import TapPoints
    from residuum.v1 import tensor_pb2

KEY = "residuum_plan"
"""The key of the plan in `extra_args`."""


Places = tuple[tuple[capture_pb2.Site.ValueType, tuple[int, ...]], ...]
"""Where rows are captured: sites, ascending, and the layers at each."""


class Kind(IntEnum):
    """The kinds of steering operations, as numbers for the device tables."""

    ADD = 0
    ABLATE = 1
    CAP = 2
    """Also used to set a projection to a value: a cap whose bounds are equal."""
    SET = 3
    MULTIPLY = 4
    SCORE = 5
    """Changes nothing: writes the inner product of the row and the vector into a column of the row's scores."""
    CLAMP = 6
    """Keeps a feature of a sparse autoencoder within bounds. Its gate has the measure FEATURE; no other one has it."""


STEERING_KINDS = tuple(kind for kind in Kind if kind not in (Kind.SCORE, Kind.CLAMP))
"""The kinds that change rows, and that may have a gate or none."""


class Measure(IntEnum):
    """What a gate measures of a row, as numbers for the device tables."""

    PROJECTION = 0
    INNER_PRODUCT = 1
    COSINE = 2
    FEATURE = 3
    """The value of a feature: x . g + bias if that is above the threshold, and otherwise 0. The gate has the bias in
    place of its sharpness, and how far it is open is this value."""


class Gate(NamedTuple):
    """How far an operation applies to a row: sigmoid(sharpness * (measure - threshold)).

    steering.proto defines it; infinite sharpness makes the gate hard.
    """

    row: int
    """The gate vector's row in the bank."""
    threshold: float
    """The measure above which the gate is open. The bias is subtracted already."""
    sharpness: float = float("inf")
    """Infinite: the gate is open or closed. Negative: it is open below the threshold. FEATURE: the bias."""
    measure: Measure = Measure.PROJECTION


@dataclass(frozen=True)
class Operation:
    """One steering operation with its vector resolved to a row of the bank."""

    kind: Kind
    row: int
    """The vector's row in the bank."""
    layers: tuple[int, ...]
    """The layers at which it is applied, ascending."""
    positions: selection_pb2.PositionSelection
    """The positions to which it is applied."""
    scale: float = 1.0
    """Factor of ADD and ABLATE."""
    low: float = float("-inf")
    """Lower bound of CAP and CLAMP."""
    high: float = float("inf")
    """Upper bound of CAP and CLAMP."""
    keep_norm: bool = False
    """Rescale the row to the norm that it had before."""
    site: capture_pb2.Site.ValueType = capture_pb2.SITE_RESID_POST
    """The site at which it is applied."""
    gate: Gate | None = None
    """How far it applies to each row; None: completely."""
    column: int = 0
    """For SCORE, the column of the row's scores."""

    def to_data(self) -> dict[str, Any]:
        """Return the operation as plain data, for `from_data`."""
        return {
            **vars(self),
            "kind": int(self.kind),
            "site": int(self.site),
            "layers": list(self.layers),
            "positions": self.positions.SerializeToString(),
            "gate": [*self.gate[:-1], int(self.gate.measure)] if self.gate else None,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Operation:
        """Return the operation that `to_data` converted."""
        gate = None
        if data["gate"]:
            row, threshold, sharpness, measure = data["gate"]
            gate = Gate(row, threshold, sharpness, Measure(measure))
        return cls(**{**_restore(data), "kind": Kind(data["kind"]), "gate": gate})


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
        return _format(self.encoding, width, dtype, self.dimensions, self.axis, self.features)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RowEncoding:
        """Return the encoding whose `vars` are `data`."""
        return cls(**{**data, "rows": tuple(data["rows"]), "chosen": tuple(data["chosen"])})


@lru_cache(maxsize=64)
def _format(
    encoding: capture_pb2.Encoding.ValueType,
    width: int,
    dtype: tensor_pb2.DataType.ValueType,
    dimensions: int,
    axis: capture_pb2.QuantizationAxis.ValueType,
    features: int,
) -> RowFormat:
    return RowFormat(encoding, width, dtype, dimensions, axis, features)


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
        restored = {**_restore(data), "sites": tuple(data["sites"]), "site_layers": site_layers}
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


class ScoreRegion(NamedTuple):
    """The place of a sequence's scores on the score board: a row for each position, from `first_position` on."""

    offset: int
    """The number of the region's first element on the board."""
    first_position: int
    positions: int
    columns: int


@dataclass(frozen=True)
class RequestPlan:
    """Everything that the taps do for one request."""

    prompt_tokens: int
    capture: Capture | None = None
    operations: tuple[Operation, ...] = ()
    name: str = ""
    """The name under which the inference service changes the request's operations. Empty: they never change."""
    scores: ScoreRegion | None = None
    """Where the scores go that its operations compute."""

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether rows would be missing if the engine read a prompt's start from the prefix cache.

        The engine always computes the last token of a prompt. So nothing is lost if only this token and generated
        tokens are captured or scored.
        """
        if self.scores is not None and self.scores.first_position < self.prompt_tokens - 1:
            return True
        if self.capture is None:
            return False
        return selects_any(self.capture.positions, self.prompt_tokens, 0, self.prompt_tokens - 1)

    def to_extra_args(self) -> dict[str, Any]:
        """Return the plan as the value of `SamplingParams.extra_args`."""
        data: dict[str, Any] = {"prompt_tokens": self.prompt_tokens, "name": self.name}
        if self.capture:
            data["capture"] = self.capture.to_data()
        data["operations"] = [operation.to_data() for operation in self.operations]
        data["scores"] = list(self.scores) if self.scores else None
        return {KEY: data}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> RequestPlan | None:
        """Return the plan in a request's `extra_args`, or None if the request has none."""
        data = (extra_args or {}).get(KEY)
        if not data:
            return None
        capture = data.get("capture")
        return cls(
            prompt_tokens=data["prompt_tokens"],
            capture=Capture.from_data(capture) if capture else None,
            operations=tuple(Operation.from_data(item) for item in data["operations"]),
            name=data["name"],
            scores=ScoreRegion(*data["scores"]) if data["scores"] else None,
        )

    def for_points(self, points: TapPoints, *, captures: bool, scores: bool = True) -> RequestPlan | None:
        """Return the part of the plan for some points of a rank; None if they have nothing to do.

        Args:
            points: Points of the rank's pipeline stage. Only layers of this stage are captured.
            captures: Whether this rank captures the request. If not, it still has its parts of divided rows.
            scores: Whether this rank computes scores.
        """
        capture = self.capture.for_points(points) if self.capture and (captures or points.is_divided) else None
        if capture and not captures:
            capture = replace(capture, is_own=False)
        operations = tuple(
            operation
            for operation in self.operations
            if points.sees(operation.site) and (scores or operation.kind != Kind.SCORE)
        )
        name = self.name if points.can_steer else ""  # named operations may change later, even if there are none
        if not (capture or operations or name):
            return None
        return replace(self, capture=capture, operations=operations, name=name)


def _restore(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, "layers": tuple(item["layers"]), "positions": _selection(item["positions"])}


@lru_cache(maxsize=256)
def _selection(data: bytes) -> selection_pb2.PositionSelection:
    """Return a selection. Operations and captures with equal ones share it, also of other requests: never change it."""
    return selection_pb2.PositionSelection.FromString(data)
