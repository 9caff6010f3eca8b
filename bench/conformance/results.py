"""The outcome for an architecture, and the bounds for its rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.conformance.routing import Explained, Routing, explain

Rows = npt.NDArray[np.float32]

KILLED = "incomplete: ENGINE_DIED"
"""The only state and reason that captures may have whose engine lost a worker."""

_ROUNDED = 1e-3
"""Bounds above this are for arithmetic that rounds to fewer bits than float32 has, such as TF32."""
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

    mean_cosine: float
    max_error: float
    """The largest allowed error of a row; see `errors_of`."""
    logprob_error: float
    """The largest allowed difference of a log-probability; see `Comparison`."""
    of_stream: bool
    """Whether an error is relative to the residual stream. In 16 bits, each term of a sum is rounded. If the terms
    nearly cancel, as in the attention block of a long prompt, the sum is short, but its rounding error is not. So a
    part of a layer is compared at the scale of the stream that it is added to."""
    same_bits: bool = False
    """Whether rows of a request alone and in a batch must be the same to the bit."""

    @classmethod
    def of(cls, dtype: str, max_error: float = 0.0) -> Bounds:
        """Return the bounds for a dtype. Both sides compute in a different order, which matters little only in float32.

        Args:
            dtype: The dtype of the served model.
            max_error: `max_error`, if it is not the dtype's own.
        """
        if dtype == "float32":
            rounds = max_error > _ROUNDED
            return cls(0.999999, max_error or 2e-4, logprob_error=0.2 if rounds else 1e-3, of_stream=rounds)
        return cls(mean_cosine=0.999, max_error=max_error or 0.14, logprob_error=0.2, of_stream=True)


def errors_of(
    got: npt.NDArray[Any], expected: npt.NDArray[Any], stream: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """Return how far rows are from their references, relative to their references' length.

    Args:
        got: Captured rows, [..., hidden].
        expected: The reference's rows.
        stream: The stream to which they are added; a part that is shorter is compared with its length instead.
    """
    length = np.linalg.norm(expected, axis=-1)
    if stream is not None:
        length = np.maximum(length, np.linalg.norm(stream, axis=-1))
    scale = np.where(length == 0, 1.0, length)  # a part that the layer does not have
    errors: npt.NDArray[Any] = np.linalg.norm(got - expected, axis=-1) / scale
    return errors


@dataclass
class Comparison:
    """Compares captured rows with the reference, request by request."""

    rows: int = 0
    """Compared rows, counted once for each layer and site."""
    missing: int = 0
    """Expected rows that are not there."""
    surplus: int = 0
    """Rows that are there but were not expected."""
    site_layers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The layers of sites that some layers lack."""
    states: Counter[str] = field(default_factory=Counter)
    """The final states of the captures, from their manifests."""
    least_layer_distance: float = float("inf")
    """The smallest distance between the reference's rows of neighbouring layers, relative to their length. If it is not
    far above the bound on errors, the comparison cannot tell layers apart."""
    logprob_error: float = 0.0
    """The largest difference between the log-probability that vLLM gave a token of a reply, and the one that follows
    from the captured rows after the last layer."""
    lens_error: float = 0.0
    """The same, if the service's logit lens computes the latter."""
    attention_layers: int = 0
    """Attention weights that were compared, counted once for each request and layer."""
    attention_error: float = 0.0
    """The largest difference between an attention weight that follows from captured queries and keys, and the
    reference's."""
    other_replies: int = 0
    """Replies that stock vLLM would not have given."""
    changed_rows: int | None = None
    """Rows of the request whose steering changed, after the change; None without such a request."""
    rows_alone: int = 0
    """Rows of requests that ran alone and in a batch, counted once for each layer and site."""
    other_bits: int = 0
    """Those of them that are not the same to the bit."""
    other_places: Counter[str] = field(default_factory=Counter)
    """How many those are, by request and point, such as "request 2: q.3"."""
    ends_killed: Counter[str] | None = None
    """How captures ended whose engine lost a worker, by state and reason; None if none was killed."""
    explained: Explained = field(default_factory=Explained)
    """The rows that other experts explain."""
    _cosines: list[Rows] = field(default_factory=list)
    _errors: list[Rows] = field(default_factory=list)

    def add(self, got: Rows, present: npt.NDArray[np.bool_], expected: Rows, stream: Rows | None = None) -> None:
        """Add the rows of one request at one site.

        Args:
            got: Captured rows, [layers, positions, hidden].
            present: Which of the rows are there, [layers, positions].
            expected: The reference's rows for all expected positions.
            stream: See `errors_of`.
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
        products = np.maximum(np.linalg.norm(a, axis=-1), 1e-30) * np.where(nothing, 1.0, length)
        self._cosines.append(np.where(nothing & ~a.any(-1), 1.0, (a * b).sum(-1) / products).astype(np.float32))
        beside = None if stream is None else stream[:, : present.shape[1]][present]
        self._errors.append(errors_of(a, b, beside).astype(np.float32))

    def explain(
        self, run: Callable[[Routing], Mapping[str, Rows]], got: Mapping[str, Rows], bounds: Bounds
    ) -> Mapping[str, Rows]:
        """Return the reference's rows of one request, with the experts that vLLM chose at near ties; see `explain`.

        Args:
            run: Runs the reference.
            got: The captured rows at each site, [layers, positions, hidden].
            bounds: The bounds for rows.
        """

        def errors(site: str, layer: int, expected: Mapping[str, Rows]) -> npt.NDArray[Any]:
            stream = expected["resid_pre"][layer] if bounds.of_stream else None
            return errors_of(got[site][layer], expected[site][layer], stream)

        expected, explained = explain(run, got, errors, bounds.max_error)
        self.explained.rows += explained.rows
        self.explained.widest_gap = max(self.explained.widest_gap, explained.widest_gap)
        return expected

    def see_alone(self, alone: Rows, together: Rows, points: Sequence[str]) -> None:
        """Compare the rows of a request that ran alone with those in a batch, [layers, positions, width], bit by bit.

        Rows that only one of the two has count as different: the replies may differ in length. `points` has a name for
        each layer.
        """
        positions = min(alone.shape[1], together.shape[1])
        pair = [np.ascontiguousarray(rows[:, :positions]).view(np.uint8) for rows in (alone, together)]
        self.rows_alone += alone.shape[0] * max(alone.shape[1], together.shape[1])
        others = (pair[0] != pair[1]).any(-1).sum(-1) + abs(alone.shape[1] - together.shape[1])
        self.other_bits += int(others.sum())
        self.other_places.update({point: int(count) for point, count in zip(points, others, strict=True) if count})

    def see_layers(self, expected: Rows) -> None:
        """Update `least_layer_distance` with the reference's rows of the stream, [layers, positions, hidden]."""
        steps = np.linalg.norm(np.diff(expected, axis=0), axis=-1) / np.linalg.norm(expected[1:], axis=-1)
        self.least_layer_distance = min(self.least_layer_distance, float(steps.min()))

    def see_logprobs(self, predicted: Rows, reported: Rows) -> None:
        """Update `logprob_error` with the tokens of a reply, [tokens]."""
        self.logprob_error = float(np.maximum(self.logprob_error, np.abs(predicted - reported).max(initial=0.0)))

    def see_lens(self, predicted: Rows, reported: Rows) -> None:
        """Update `lens_error` with the tokens of a reply, [tokens]."""
        self.lens_error = float(np.maximum(self.lens_error, np.abs(predicted - reported).max(initial=0.0)))

    def see_attention(self, got: Rows, expected: Rows) -> None:
        """Compare the attention weights of a request in a layer, [heads, queries, keys]."""
        self.attention_layers += 1
        error = np.abs(got - expected).max(initial=0.0) if got.shape == expected.shape else np.inf
        self.attention_error = float(np.maximum(self.attention_error, error))

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
        """The largest error of a row; see `errors_of`."""
        return float(self._all(self._errors).max(initial=0.0))

    def faults(self, bounds: Bounds) -> list[str]:
        """Return the violations, as texts."""
        wrong = int((~(self._all(self._errors) <= bounds.max_error)).sum())  # true for NaN
        checks = {
            f"{self.missing} rows are missing": self.missing > 0,
            f"{self.surplus} rows came that were not requested": self.surplus > 0,
            f"captures ended as {dict(self.states)}": set(self.states) != {"complete"},
            "no row was compared": self.rows == 0,
            f"{wrong} of {self.rows} rows have an error above {bounds.max_error:g}": wrong > 0,
            f"mean cosine {self.mean_cosine:.8f} < {bounds.mean_cosine}": not self.mean_cosine >= bounds.mean_cosine,
            f"{self.other_replies} replies are not those of stock vLLM": self.other_replies > 0,
            "the steering changed after the last row": self.changed_rows == 0,
            "no request was running when the worker was killed": self.ends_killed == Counter(),
            f"captures ended as {dict(self.ends_killed or {})} after a worker was killed":
                not set(self.ends_killed or ()) <= {KILLED},
            f"{self.other_bits} of {self.rows_alone} rows have other bits in a batch than alone":
                bounds.same_bits and self.other_bits > 0,
            f"vLLM gave tokens other log-probabilities than follow from the captured rows: they differ by "
            f"{self.logprob_error:.2g}": not self.logprob_error <= bounds.logprob_error,
            f"the logit lens of the last layer differs from vLLM's log-probabilities by {self.lens_error:.2g}":
                not self.lens_error <= bounds.logprob_error,
            f"attention weights from captured queries and keys differ by {self.attention_error:.2g}":
                not self.attention_error <= bounds.logprob_error,
            f"the model's layers differ by only {self.least_layer_distance:.2g}, too little to tell them apart":
                self.least_layer_distance < max(0.05, bounds.max_error),
        }  # fmt: skip
        found = [fault for fault, is_so in checks.items() if is_so]
        if wrong and self.logprob_error <= bounds.logprob_error:
            found.append("but the log-probabilities that vLLM gave follow from the captured rows")
        return found

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
    sites: tuple[str, ...] = ()
    """The sites that were to be captured."""
    site_layers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The layers of sites that some layers lack."""
    quantization: str = ""
    """The format of quantised weights; empty if they are not quantised."""
    layers: int = 0
    rows: int = 0
    missing: int = 0
    min_cosine: float = 0.0
    mean_cosine: float = 0.0
    max_error: float = 0.0
    least_layer_distance: float = 0.0
    logprob_error: float = 0.0
    """See `Comparison`."""
    lens_error: float = 0.0
    """See `Comparison`."""
    attention_layers: int = 0
    """See `Comparison`."""
    attention_error: float = 0.0
    """See `Comparison`."""
    other_experts: int = 0
    """Positions, over all layers, for which vLLM's router decided otherwise than the reference's, at a near tie."""
    widest_tie: float = 0.0
    """How far apart the scores of such a tie were at most, relative to the largest score."""
    changed_rows: int | None = None
    """See `Comparison`."""
    rows_alone: int = 0
    """See `Comparison`."""
    other_bits: int = 0
    """See `Comparison`."""
    other_places: dict[str, int] = field(default_factory=dict)
    """See `Comparison`."""
    ends_killed: dict[str, int] | None = None
    """See `Comparison`."""
    states: dict[str, int] = field(default_factory=dict)
    layout: tuple[int, int] = (0, 0)
    """Tensor and pipeline parallel size, from the manifests."""
    replicas: int = 1
    """How many replicas of the model there are, from the service's log."""
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


def sites_refused(detail: str) -> frozenset[str]:
    """Return the sites that a refusal names; empty if it refuses the model."""
    named = re.match(r"\w+: ([\w, ]+) cannot be captured", detail)
    return frozenset(re.split(", | and ", named[1])) if named else frozenset()


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
