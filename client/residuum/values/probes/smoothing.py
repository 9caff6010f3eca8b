"""Smoothing: EMA, RollingMax and RollingMean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.v1 import probe_pb2
from residuum.values.tensors.numbers import finite_float32, without_torch
from residuum.wire.probes.smoothing import Smoother, from_text, problem_of


class _Smoothing:
    """What all kinds of smoothing share."""

    def to_proto(self) -> probe_pb2.Smoothing:
        """Return the message."""
        raise NotImplementedError

    def apply(self, scores: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return smoothed scores of consecutive rows, computed here, as the server computes them.

        Args:
            scores: [rows], or [rows, outputs].

        Returns:
            float32, in the same shape.

        Example:
            >>> residuum.EMA(0.5).apply([0.0, 1.0, 1.0])
            array([0.  , 0.5 , 0.75], dtype=float32)
        """
        given = np.asarray(without_torch(scores), np.float32)
        if not given.size:
            return np.zeros_like(given)
        columns = given.reshape(len(given), -1)
        return Smoother(self.to_proto(), columns.shape[1]).add(columns).reshape(given.shape)


@dataclass(frozen=True)
class EMA(_Smoothing):
    """The exponential moving average of a probe's scores: decay · (result before) + (1 - decay) · score.

    The first result is the first score.

    Attributes:
        decay: How much of the result before is kept, above 0 and below 1.

    Raises:
        InvalidRequest: The decay is out of range.
        TypeError: The decay is not a number.

    Example:
        >>> residuum.Probe(direction, layer=12, activation="sigmoid", smooth=residuum.EMA(0.9))
    """

    decay: float

    def __post_init__(self) -> None:
        decay = np.float32(finite_float32("EMA: decay", self.decay))
        object.__setattr__(self, "decay", float(str(decay)))  # the shortest number that is this float32
        _check("EMA", probe_pb2.Smoothing(ema=self.decay))

    def to_proto(self) -> probe_pb2.Smoothing:
        """Return the message."""
        return probe_pb2.Smoothing(ema=self.decay)

    def __str__(self) -> str:
        return f"ema:{self.decay}"


@dataclass(frozen=True)
class _Rolling(_Smoothing):
    tokens: int | None = None
    _KIND: ClassVar[str] = ""
    """The field of the message."""

    def __post_init__(self) -> None:
        _check(type(self).__name__, self._proto(_window(self, self.tokens)))

    def to_proto(self) -> probe_pb2.Smoothing:
        """Return the message."""
        return self._proto(self.tokens or 0)

    def __str__(self) -> str:
        return self._KIND if self.tokens is None else f"{self._KIND}:{self.tokens}"

    def _proto(self, tokens: int) -> probe_pb2.Smoothing:
        proto = probe_pb2.Smoothing()
        setattr(proto, self._KIND, tokens)
        return proto


@dataclass(frozen=True)
class RollingMax(_Rolling):
    """The maximum of a probe's scores of the latest tokens.

    Attributes:
        tokens: How many tokens, 1 to 1024; None: all of the reply, or of the prompt.

    Raises:
        InvalidRequest: The number is out of range.
        TypeError: The number is not an integer.
    """

    tokens: int | None = None
    _KIND: ClassVar[str] = "max"


@dataclass(frozen=True)
class RollingMean(_Rolling):
    """The mean of a probe's scores of the latest tokens.

    Attributes:
        tokens: How many tokens, 1 to 1024; None: all of the reply, or of the prompt.

    Raises:
        InvalidRequest: The number is out of range.
        TypeError: The number is not an integer.
    """

    tokens: int | None = None
    _KIND: ClassVar[str] = "mean"


Smoothing = Union[EMA, RollingMax, RollingMean]  # noqa: UP007 - evaluated at run time on Python 3.10
"""How the scores of a probe are smoothed."""


def parse_smoothing(text: str) -> Smoothing:
    """Return the smoothing of a text: ema:DECAY, max, max:TOKENS, mean or mean:TOKENS.

    Raises:
        InvalidRequest: The text is none of these, or a number is out of range.
    """
    try:
        spec = from_text(text)
    except ValueError:
        raise InvalidRequest(
            f"{text!r} is not a smoothing. Use ema:DECAY (0 to 1), max, max:TOKENS, mean or mean:TOKENS (1 to 1024).",
            reason="INVALID_FIELD",
        ) from None
    if spec.WhichOneof("method") == "ema":
        return EMA(spec.ema)
    return RollingMax(spec.max or None) if spec.HasField("max") else RollingMean(spec.mean or None)


def smoothing_of(given: Any) -> Smoothing | None:
    """Return the value of `smooth=`.

    Raises:
        TypeError: It is none of EMA, RollingMax and RollingMean.
    """
    if given is not None and not isinstance(given, (EMA, RollingMax, RollingMean)):
        raise TypeError(f"Probe: smooth must be residuum.EMA, RollingMax, RollingMean or None, not {given!r}.")
    return given


def _window(value: _Rolling, given: Any) -> int:
    if given is None:
        return 0
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{type(value).__name__}: tokens must be a whole number or None, not {given!r}.")
    number: int = given.__index__()
    if number < 1:
        raise InvalidRequest(
            f"{type(value).__name__}: tokens must be at least 1, not {number}. Leave it out for all tokens.",
            reason="INVALID_FIELD",
        )
    object.__setattr__(value, "tokens", number)
    return min(number, 1 << 31)


def _check(name: str, proto: probe_pb2.Smoothing) -> None:
    if problem := problem_of(proto):
        raise InvalidRequest(f"{name}: {problem}.", reason="INVALID_FIELD")
