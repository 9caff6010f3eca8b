"""The outcome for an architecture, and the bounds for its rows."""

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
"""The errors with which the service refuses at startup an architecture that it cannot capture exactly."""


class Verdict(str, Enum):
    """The verdict on an architecture."""

    EXACT = "exact"
    """Every row is there and equals that of transformers."""
    REFUSED = "refused"
    """The service refused it at startup, with one of its own reasons."""
    WRONG = "WRONG"
    """Rows are missing, or differ. Or the service should have refused the architecture, with another reason."""
    FAILED = "FAILED"
    """The service did not start, or a request failed, for another reason."""


@dataclass(frozen=True)
class Bounds:
    """The bounds for rows."""

    min_cosine: float
    mean_cosine: float
    max_error: float
    """The largest allowed distance of a row from its reference, relative to the reference's length."""
    outliers: float = 0.0
    """The share of rows that may violate the least cosine or the largest error."""

    @classmethod
    def of(cls, dtype: str, *, routed: bool) -> Bounds:
        """Return the bounds for a dtype. Both sides compute in a different order, which matters little only in float32.

        If rows are routed to experts, rounding to 16 bits routes some rows to another expert. Such rows are correct but
        far from the reference. Only float32 proves that they belong to their tokens and layers.
        """
        if dtype == "float32":
            return cls(min_cosine=0.9999, mean_cosine=0.999999, max_error=2e-4)
        if routed:
            return cls(min_cosine=0.99, mean_cosine=0.98, max_error=0.15, outliers=0.1)
        return cls(min_cosine=0.99, mean_cosine=0.999, max_error=0.15)


@dataclass
class Comparison:
    """Compares captured rows with the reference, request by request."""

    rows: int = 0
    """Compared rows, counted once for each layer and site."""
    missing: int = 0
    """Expected rows that are not there."""
    surplus: int = 0
    """Rows that are there but were not expected."""
    states: Counter[str] = field(default_factory=Counter)
    """The final states of the captures, from their manifests."""
    least_layer_distance: float = float("inf")
    """The smallest distance between the reference's rows of neighbouring layers, relative to their length. If it is not
    far above the bound on errors, the comparison cannot tell layers apart."""
    _cosines: list[Rows] = field(default_factory=list)
    _errors: list[Rows] = field(default_factory=list)

    def add(self, got: Rows, present: npt.NDArray[np.bool_], expected: Rows) -> None:
        """Add the rows of one request at one site.

        Args:
            got: Captured rows, [layers, positions, hidden].
            present: Which of the rows are there, [layers, positions].
            expected: The reference's rows for all expected positions.
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
        nothing = length == 0  # a part that the layer does not have
        scale = np.where(nothing, 1.0, length)
        products = np.maximum(np.linalg.norm(a, axis=-1), 1e-30) * scale
        self._cosines.append(np.where(nothing & ~a.any(-1), 1.0, (a * b).sum(-1) / products).astype(np.float32))
        self._errors.append((np.linalg.norm(a - b, axis=-1) / scale).astype(np.float32))

    def see_layers(self, expected: Rows) -> None:
        """Update `least_layer_distance` with the reference's rows of the stream, [layers, positions, hidden]."""
        steps = np.linalg.norm(np.diff(expected, axis=0), axis=-1) / np.linalg.norm(expected[1:], axis=-1)
        self.least_layer_distance = min(self.least_layer_distance, float(steps.min()))

    @property
    def min_cosine(self) -> float:
        """The least cosine between a row and its reference."""
        return float(self._all(self._cosines).min(initial=1.0))

    @property
    def mean_cosine(self) -> float:
        """The mean cosine between a row and its reference."""
        cosines = self._all(self._cosines)
        return float(cosines.astype(np.float64).mean()) if len(cosines) else 0.0

    @property
    def max_error(self) -> float:
        """The largest distance of a row from its reference, relative to the reference's length."""
        return float(self._all(self._errors).max(initial=0.0))

    def faults(self, bounds: Bounds) -> list[str]:
        """Return the violations, as texts."""
        cosines, errors = self._all(self._cosines), self._all(self._errors)
        holds = (cosines >= bounds.min_cosine) & (errors <= bounds.max_error)  # false for NaN
        outliers = int((~holds).sum())
        checks = {
            f"{self.missing} rows are missing": self.missing > 0,
            f"{self.surplus} rows came that were not requested": self.surplus > 0,
            f"captures ended as {dict(self.states)}": set(self.states) != {"complete"},
            "no row was compared": self.rows == 0,
            f"{outliers} of {self.rows} rows have a cosine below {bounds.min_cosine:g} or an error above "
            f"{bounds.max_error:g}": outliers > bounds.outliers * self.rows,
            f"mean cosine {self.mean_cosine:.8f} < {bounds.mean_cosine}": not self.mean_cosine >= bounds.mean_cosine,
            f"the model's layers differ by only {self.least_layer_distance:.2g}, too little to tell them apart":
                self.least_layer_distance < max(0.05, bounds.max_error),
        }  # fmt: skip
        return [fault for fault, is_so in checks.items() if is_so]

    @staticmethod
    def _all(parts: Sequence[Rows]) -> Rows:
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class Outcome:
    """The outcome for one architecture."""

    name: str
    verdict: Verdict
    detail: str = ""
    """The reason, if the verdict is not EXACT."""
    layers: int = 0
    rows: int = 0
    missing: int = 0
    min_cosine: float = 0.0
    mean_cosine: float = 0.0
    max_error: float = 0.0
    least_layer_distance: float = 0.0
    states: dict[str, int] = field(default_factory=dict)
    layout: tuple[int, int] = (0, 0)
    """Tensor and pipeline parallel size, from the manifests."""
    capturing_ranks: int = 0
    """The number of workers with a ring, from the service's log."""
    model_runner: str = ""
    """The model runner of vLLM, "v1" or "v2", from the service's log; empty if the service did not start."""
    start_seconds: float = 0.0
    seconds: float = 0.0
    """Seconds from the start of the service to the end of the comparison."""

    @property
    def holds(self) -> bool:
        """Whether no user can get wrong rows: they are exact, or the architecture is refused."""
        return self.verdict in {Verdict.EXACT, Verdict.REFUSED}


def failure_of(log: str, expected: str = "") -> tuple[Verdict, str]:
    """Return the verdict and the first error from the log of a service that did not start.

    Args:
        log: The log.
        expected: Part of the reason for which the service must refuse; empty if any reason will do.
    """
    lines = log.replace("\\n", "\n")  # tracebacks are escaped in JSON records
    errors: list[str] = re.findall(r"\b(\w+(?:Error|Exception): .+?)(?:\"[,}]|$)", lines, flags=re.MULTILINE)
    refusals = [error for error in errors if error.startswith(_REFUSALS)]
    if refusals:
        if expected not in refusals[0]:
            return Verdict.WRONG, f"refused, but not with {expected!r}: {refusals[0]}"
        return Verdict.REFUSED, refusals[0]
    return Verdict.FAILED, errors[0] if errors else "its log contains no error"
