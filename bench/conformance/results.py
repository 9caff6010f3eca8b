"""What is found out about an architecture, and whether it holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


_REFUSALS = (
    "CannotTapError",
    "UnsupportedEngineError",
    "IncompatibleEngineError",
    "UntappedLayersError",
    "SelfTestError",
)
"""By these the service says at its start that it would not be exact."""


class Verdict(str, Enum):
    """How an architecture did."""

    EXACT = "exact"
    """Every row is there, and is that of transformers."""
    REFUSED = "refused"
    """The service refused it at its start, with a reason of its own."""
    WRONG = "WRONG"
    """Rows are missing, or differ."""
    FAILED = "FAILED"
    """The service did not come up, or a request failed, for another reason."""


@dataclass(frozen=True)
class Bounds:
    """What rows are held to."""

    min_cosine: float
    mean_cosine: float
    max_error: float
    """The largest distance of a row from its reference, relative to the reference's length."""
    outliers: float = 0.0
    """The share of rows that may miss the least cosine or the largest error."""

    @classmethod
    def of(cls, dtype: str, *, routed: bool) -> Bounds:
        """Return what a dtype allows: both sides compute in another order, and float32 alone hardly shows it.

        Where rows are routed to experts, rounding to 16 bits sends some of them to another: these rows are far off, and
        rightly so. That they are the rows of their tokens and layers is for float32 to prove.
        """
        if dtype == "float32":
            return cls(min_cosine=0.9999, mean_cosine=0.999999, max_error=2e-4)
        if routed:
            return cls(min_cosine=0.99, mean_cosine=0.98, max_error=0.15, outliers=0.1)
        return cls(min_cosine=0.99, mean_cosine=0.999, max_error=0.15)


@dataclass
class Comparison:
    """Captured rows against the reference, request by request."""

    rows: int = 0
    """Rows that were compared, counted once for each layer and site."""
    missing: int = 0
    """Rows that should have been there and were not."""
    surplus: int = 0
    """Rows that should not have been there."""
    states: Counter[str] = field(default_factory=Counter)
    """How the captures ended, by their manifests."""
    least_layer_distance: float = float("inf")
    """How close the reference's rows of neighbouring layers come at their closest, relative to their length. Far more
    than the bound on errors, or the comparison could not tell layers apart."""
    _cosines: list[Rows] = field(default_factory=list)
    _errors: list[Rows] = field(default_factory=list)

    def add(self, got: Rows, present: npt.NDArray[np.bool_], expected: Rows) -> None:
        """Take the rows of one request at one site.

        Args:
            got: Captured rows, [layers, positions, hidden].
            present: Which of them there are, [layers, positions].
            expected: The reference's rows, of all that should be there.
        """
        shape = expected.shape[:2]
        if got.shape[:2] != shape:
            there = min(got.shape[1], shape[1]) if got.shape[0] == shape[0] else 0
            self.missing += shape[0] * (shape[1] - there)
            self.surplus += got.shape[0] * (got.shape[1] - there)
            got, present, expected = got[:, :there], present[:, :there], expected[:, :there]
        self.missing += int((~present).sum())
        a, b = got[present].astype(np.float64), expected[present].astype(np.float64)
        self.rows += len(a)
        length = np.linalg.norm(b, axis=-1)
        nothing = length == 0  # what a layer does not have adds nothing
        scale = np.where(nothing, 1.0, length)
        products = np.maximum(np.linalg.norm(a, axis=-1), 1e-30) * scale
        self._cosines.append(np.where(nothing & ~a.any(-1), 1.0, (a * b).sum(-1) / products).astype(np.float32))
        self._errors.append((np.linalg.norm(a - b, axis=-1) / scale).astype(np.float32))

    def see_layers(self, expected: Rows) -> None:
        """Look how far apart the reference's layers are, by its rows [layers, positions, hidden] of the stream."""
        steps = np.linalg.norm(np.diff(expected, axis=0), axis=-1) / np.linalg.norm(expected[1:], axis=-1)
        self.least_layer_distance = min(self.least_layer_distance, float(steps.min()))

    @property
    def min_cosine(self) -> float:
        """The least cosine of a row and its reference."""
        return float(self._all(self._cosines).min(initial=1.0))

    @property
    def mean_cosine(self) -> float:
        """The mean of the same."""
        cosines = self._all(self._cosines)
        return float(cosines.astype(np.float64).mean()) if len(cosines) else 0.0

    @property
    def max_error(self) -> float:
        """The largest distance of a row from its reference, relative to the reference's length."""
        return float(self._all(self._errors).max(initial=0.0))

    def faults(self, bounds: Bounds) -> list[str]:
        """Return what is wrong, in words."""
        cosines, errors = self._all(self._cosines), self._all(self._errors)
        holds = (cosines >= bounds.min_cosine) & (errors <= bounds.max_error)  # NaN does not
        outliers = int((~holds).sum())
        checks = {
            f"{self.missing} rows are missing": self.missing > 0,
            f"{self.surplus} rows came that nobody asked for": self.surplus > 0,
            f"captures ended as {dict(self.states)}": set(self.states) != {"complete"},
            "no row was compared": self.rows == 0,
            f"{outliers} of {self.rows} rows have a cosine below {bounds.min_cosine:g} or an error above "
            f"{bounds.max_error:g}": outliers > bounds.outliers * self.rows,
            f"mean cosine {self.mean_cosine:.8f} < {bounds.mean_cosine}": not self.mean_cosine >= bounds.mean_cosine,
            f"the model's layers differ by {self.least_layer_distance:.2g} only, which proves little":
                self.least_layer_distance < max(0.05, bounds.max_error),
        }  # fmt: skip
        return [fault for fault, is_so in checks.items() if is_so]

    @staticmethod
    def _all(parts: Sequence[Rows]) -> Rows:
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class Outcome:
    """What was found out about one architecture."""

    name: str
    verdict: Verdict
    detail: str = ""
    """Why, if it is not exact."""
    layers: int = 0
    rows: int = 0
    missing: int = 0
    min_cosine: float = 0.0
    mean_cosine: float = 0.0
    max_error: float = 0.0
    least_layer_distance: float = 0.0
    states: dict[str, int] = field(default_factory=dict)
    layout: tuple[int, int] = (0, 0)
    """Tensor and pipeline parallel size, as the manifests say."""
    capturing_ranks: int = 0
    """Workers with a ring, as the service says."""
    model_runner: str = ""
    """Which of vLLM's model runners ran, "v1" or "v2", as the service says; empty if it did not come up."""
    start_seconds: float = 0.0
    seconds: float = 0.0
    """Until all was compared, with the start."""

    @property
    def holds(self) -> bool:
        """Whether nobody can get wrong rows: they are right, or there are none."""
        return self.verdict in {Verdict.EXACT, Verdict.REFUSED}


def failure_of(log: str) -> tuple[Verdict, str]:
    """Return why a service did not come up, from its log: refused by name, or anything else."""
    lines = log.replace("\\n", "\n")  # tracebacks stand in records of JSON
    errors: list[str] = re.findall(r"\b(\w+(?:Error|Exception): .+?)(?:\"[,}]|$)", lines, flags=re.MULTILINE)
    refusals = [error for error in errors if error.startswith(_REFUSALS)]
    if refusals:
        return Verdict.REFUSED, refusals[0]
    return Verdict.FAILED, errors[0] if errors else "its log names no error"
