"""The plan of one request, and what the plans of many requests have in common."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from inference_svc.taps.plan.captures import Capture
from inference_svc.taps.plan.operations import Kind, Operation
from residuum.wire.selection import selects_any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference_svc.taps.points import TapPoints

KEY = "residuum_plan"
"""The key of the plan in `extra_args`."""

_KEPT = 256
"""How many parts of plans a process keeps."""


class ScoreRegion(NamedTuple):
    """The place of a sequence's scores on the score board: a row for each position, from `first_position` on."""

    offset: int
    """The number of the region's first element on the board."""
    first_position: int
    positions: int
    columns: int


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """What the plans of many requests have in common. Compared by identity, so that much can be kept for each."""

    capture: Capture | None = None
    """The capture, without an ID."""
    operations: tuple[Operation, ...] = ()
    _parts: dict[tuple[TapPoints, bool, bool], SharedPlan] = field(default_factory=dict, init=False, repr=False)
    """The parts for points of this rank, of which there are few."""

    @cached_property
    def data(self) -> bytes:
        """The same in bytes, for `from_data`."""
        capture = self.capture.to_data() if self.capture else None
        return msgspec.msgpack.encode([capture, [operation.to_data() for operation in self.operations]])

    @staticmethod
    @lru_cache(maxsize=_KEPT)
    def from_data(data: bytes) -> SharedPlan:
        """Return what `data` was made of: the same object for equal bytes, while it is kept."""
        capture, operations = msgspec.msgpack.decode(data)
        return SharedPlan(
            Capture.from_data(capture) if capture else None, tuple(Operation.from_data(item) for item in operations)
        )

    def for_points(self, points: TapPoints, *, captures: bool, scores: bool) -> SharedPlan:
        """Return the part for some points of a rank; see `RequestPlan.for_points`."""
        key = (points, captures, scores)
        if key not in self._parts:
            self._parts[key] = self._part(points, captures=captures, scores=scores)
        return self._parts[key]

    def _part(self, points: TapPoints, *, captures: bool, scores: bool) -> SharedPlan:
        capture = self.capture.for_points(points) if self.capture and (captures or points.is_divided) else None
        if capture and not captures:
            capture = replace(capture, is_own=False)
        return SharedPlan(
            capture,
            tuple(
                operation
                for operation in self.operations
                if points.sees(operation.site) and (scores or operation.kind != Kind.SCORE)
            ),
        )


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
    shared: SharedPlan | None = field(default=None, init=False, compare=False, repr=False)
    """What the capture and the operations were taken from; None if they were given."""

    @classmethod
    def of(
        cls,
        shared: SharedPlan,
        prompt_tokens: int,
        capture_id: str,
        sequence: int,
        name: str = "",
        scores: ScoreRegion | None = None,
    ) -> RequestPlan:
        """Return the plan of a sequence; see the attributes."""
        capture = shared.capture.named(capture_id, sequence) if shared.capture else None
        plan = cls(prompt_tokens, capture, shared.operations, name, scores)
        object.__setattr__(plan, "shared", shared)
        return plan

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
        data: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "name": self.name,
            "scores": self.scores and list(self.scores),
            "shared": self._shared.data,
        }
        if self.capture:
            data["capture_id"], data["sequence"] = self.capture.capture_id, self.capture.sequence
        return {KEY: data}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> RequestPlan | None:
        """Return the plan in a request's `extra_args`, or None if the request has none."""
        data = (extra_args or {}).get(KEY)
        if not data:
            return None
        scores = ScoreRegion(*data["scores"]) if data["scores"] else None
        shared = SharedPlan.from_data(data["shared"])
        return cls.of(
            shared, data["prompt_tokens"], data.get("capture_id", ""), data.get("sequence", 0), data["name"], scores
        )

    def for_points(self, points: TapPoints, *, captures: bool, scores: bool = True) -> RequestPlan | None:
        """Return the part of the plan for some points of a rank; None if they have nothing to do.

        Args:
            points: Points of the rank's pipeline stage. Only layers of this stage are captured.
            captures: Whether this rank captures the request. If not, it still has its parts of divided rows.
            scores: Whether this rank computes scores.
        """
        part = self._shared.for_points(points, captures=captures, scores=scores)
        name = self.name if points.can_steer else ""  # named operations may change later, even if there are none
        if not (part.capture or part.operations or name):
            return None
        own = self.capture
        capture_id, sequence = (own.capture_id, own.sequence) if own else ("", 0)
        return self.of(part, self.prompt_tokens, capture_id, sequence, name, self.scores)

    @property
    def _shared(self) -> SharedPlan:
        return self.shared or SharedPlan(self.capture and self.capture.named("", 0), self.operations)
