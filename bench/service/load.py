"""Runs concurrent streams, each with one request after another, and measures when their tokens arrive."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from bench.capture.subjects import WrongTokenCountError

Start = Callable[[str, Sequence[int], int], AsyncGenerator[int, None]]
"""Starts a request with a name, a prompt and the length of the reply; yields the number of tokens in each message."""


@dataclass(frozen=True)
class Load:
    """The load to run."""

    name: str
    """The prefix of the requests' names, which must be new to the engine."""
    streams: int
    """Concurrent requests."""
    requests: int
    """All requests."""
    prefill: int
    decode: int
    vocab_size: int
    shared: int = 0
    """Tokens at the start of every prompt, the same for all loads. They are not counted in `prefill`."""

    def shortened(self) -> Load:
        """Return the same load with replies of one token, to measure the cost of a request without further tokens."""
        return replace(self, name=f"{self.name}-short", decode=1)

    def prompts(self) -> list[list[int]]:
        """Return random prompts that differ for each load, so that the prefix cache has no more than their start."""

        def tokens(source: random.Random, count: int) -> list[int]:
            return [source.randrange(self.vocab_size) for _ in range(count)]

        start = tokens(random.Random(0), self.shared)  # noqa: S311 - repeatable, not secret
        source = random.Random(self.name)  # noqa: S311 - as above
        return [[*start, *tokens(source, self.prefill)] for _ in range(self.requests)]


@dataclass(frozen=True)
class Measured:
    """The measurements of a load."""

    seconds: float
    tokens: int
    first_token_ms: list[float]
    """For each request: from its start to its first token."""
    token_ms: list[float]
    """For each request: the time from its first to its last token, divided by the number of further tokens."""
    request_ms: list[float]
    """For each request: from its start to its end."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all streams together."""
        return self.tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests of all streams together."""
        return len(self.request_ms) / self.seconds

    def summary(self) -> dict[str, float]:
        """Return the figures of the load: its rates, and medians over its requests."""
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "requests_per_second": round(self.requests_per_second, 3),
            "first_token_ms": round(statistics.median(self.first_token_ms), 4),
            "token_ms": round(statistics.median(self.token_ms), 4),
            "request_ms": round(statistics.median(self.request_ms), 4),
        }


async def run_load(load: Load, start: Start) -> Measured:
    """Run a load."""
    # A start may prepare its request when it is called, before its time begins.
    waiting = [start(f"{load.name}-{at}", prompt, load.decode) for at, prompt in enumerate(load.prompts())][::-1]
    times: list[tuple[float, float, float]] = []

    async def stream() -> None:
        while waiting:
            times.append(await _run_one(waiting.pop(), load.decode))

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(load.streams)))
    seconds = time.perf_counter() - began
    first, each, whole = (list(column) for column in zip(*times, strict=True))
    return Measured(seconds, load.requests * load.decode, first, each, whole)


async def _run_one(arrivals: AsyncGenerator[int, None], decode: int) -> tuple[float, float, float]:
    """Return the times of a request in ms: to its first token, for each further token, to its end."""
    began = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async for count in arrivals:
        if count:
            last = time.perf_counter()
            first = first or last
            tokens += count
    ended = time.perf_counter()
    if tokens != decode:
        raise WrongTokenCountError(f"a reply of {tokens} tokens instead of {decode}")
    return (first - began) * 1e3, (last - first) * 1e3 / max(decode - 1, 1), (ended - began) * 1e3
