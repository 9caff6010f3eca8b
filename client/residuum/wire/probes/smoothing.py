"""Smoothing of scores. probe.proto defines it (`Smoothing`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from residuum.v1 import probe_pb2
from residuum.wire.limits import MAX_SMOOTHING_WINDOW

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]
    Exact = npt.NDArray[np.float64]


def from_text(text: str) -> probe_pb2.Smoothing:
    """Return the message of a text: ema:DECAY, max, max:TOKENS, mean or mean:TOKENS.

    Raises:
        ValueError: The text is none of these, or a number is out of range.
    """
    kind, colon, number = text.partition(":")
    spec = probe_pb2.Smoothing()
    if kind == "ema" and colon:
        spec.ema = float(number)
    elif kind in {"max", "mean"}:
        window = int(number) if colon else 0
        if not bool(colon) <= window <= MAX_SMOOTHING_WINDOW:
            raise ValueError(f"a window has 1 to {MAX_SMOOTHING_WINDOW} tokens, not {window}")
        setattr(spec, kind, window)
    if problem := problem_of(spec):
        raise ValueError(f"{text!r} is not a smoothing: {problem}")
    return spec


def problem_of(spec: probe_pb2.Smoothing) -> str:
    """Return what is wrong with a message, in words; empty if nothing is."""
    method = spec.WhichOneof("method")
    if method is None:
        return "it has no method that this version knows: set ema, max or mean"
    if method == "ema":
        return "" if 0 < spec.ema < 1 else f"the decay of an EMA must be above 0 and below 1, not {spec.ema:g}"
    window = getattr(spec, method)
    return "" if window <= MAX_SMOOTHING_WINDOW else f"a window has at most {MAX_SMOOTHING_WINDOW} tokens, not {window}"


class Smoother:
    """Smooths the scores of consecutive rows, which may arrive in parts. The arithmetic is float64."""

    def __init__(self, spec: probe_pb2.Smoothing, outputs: int) -> None:
        """Begin before the first row.

        Args:
            spec: A valid message; see `problem_of`.
            outputs: Scores of each row.
        """
        self._method = spec.WhichOneof("method")
        self._decay = spec.ema
        self._window = 0 if self._method == "ema" else getattr(spec, str(self._method))
        self._last: list[float] = [math.nan] * outputs
        """EMA: the latest result of each output; NaN before the first one."""
        neutral = -np.inf if self._method == "max" else 0.0
        self._kept: Exact = np.full((max(self._window - 1, 1), outputs), neutral)
        """With a window: its rows without the next one. Without: the maximum or the sum of all rows."""
        self._counts: Exact = np.zeros_like(self._kept)
        """Mean: for each number in `_kept`, how many finite scores it holds."""

    def add(self, scores: FloatArray) -> FloatArray:
        """Return the smoothed scores of the next rows, float32 [rows, outputs], given their scores in this shape."""
        if not len(scores):
            return scores
        if self._method == "ema":
            return self._averages(scores)
        exact, finite = scores.astype(np.float64), np.isfinite(scores)
        if self._method == "max":
            smoothed, self._kept = self._over(np.maximum, self._kept, np.where(finite, exact, -np.inf))
        else:
            sums, self._kept = self._over(np.add, self._kept, np.where(finite, exact, 0.0))
            counts, self._counts = self._over(np.add, self._counts, finite.astype(np.float64))
            smoothed = sums / np.maximum(counts, 1)
        result: FloatArray = np.where(finite, smoothed, exact).astype(np.float32)
        return result

    def _averages(self, scores: FloatArray) -> FloatArray:
        """Return the exponential moving averages. Plain floats: numpy would take ten times as long for each step."""
        last, decay, rest = self._last, self._decay, 1.0 - self._decay
        rows = scores.tolist()
        for row in rows:
            for output, score in enumerate(row):
                if math.isfinite(score):
                    before = last[output]
                    last[output] = row[output] = score if math.isnan(before) else decay * before + rest * score
        return np.array(rows, dtype=np.float32)

    def _over(self, combine: np.ufunc, kept: Exact, scores: Exact) -> tuple[Exact, Exact]:
        """Return a combination of the window up to each row, and what to keep for the next rows."""
        if self._window == 1:
            return scores, kept
        joined = np.concatenate([kept, scores])
        if not self._window:
            found: Exact = combine.accumulate(joined)[1:]
            return found, found[-1:]
        return _of_windows(combine, joined, self._window), joined[1 - self._window :]


def _of_windows(combine: np.ufunc, rows: Exact, window: int) -> Exact:
    """Return a combination of each `window` consecutive rows. The time does not depend on the window.

    Rows are divided into blocks of a window's length. A window is the end of a block and the beginning of the next one,
    so it needs only the running combinations of each block in both directions (van Herk; Gil and Werman). Unlike
    differences of cumulative sums, these lose no digits after a large number.
    """
    count, outputs = len(rows) - window + 1, rows.shape[1]
    if count == 1:
        only: Exact = combine.reduce(rows, axis=0)[None]
        return only
    padded = np.concatenate([rows, np.zeros((-len(rows) % window, outputs))])  # no window has these
    blocks = padded.reshape(-1, window, outputs)
    begins = combine.accumulate(blocks, axis=1).reshape(padded.shape)
    ends = combine.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].reshape(padded.shape)
    found: Exact = combine(ends[:count], begins[window - 1 : window - 1 + count])
    found[::window] = ends[:count:window]  # these windows are whole blocks
    return found
