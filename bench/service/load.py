"""Many streams at once, each one request after another, and when their tokens came."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from bench.capture.subjects import WrongTokenCountError

Start = Callable[[str, Sequence[int], int], AsyncGenerator[int, None]]
"""Starts a request: its name, its prompt, the tokens of its reply; yields how many tokens came together."""


@dataclass(frozen=True)
class Load:
    """What is asked for."""

    name: str
    """Begins the names of the requests: they must be new to the engine."""
    streams: int
    """Requests that run at a time."""
    requests: int
    """Requests in all."""
    prefill: int
    decode: int
    vocab_size: int

    def shortened(self) -> Load:
        """Return the same load with replies of one token: what is left is what a request costs by itself."""
        return replace(self, name=f"{self.name}-short", decode=1)

    def prompts(self) -> list[list[int]]:
        """Return the prompts: random, and others for each load, so that no prefix cache knows them."""
        source = random.Random(self.name)  # noqa: S311 - repeatable, not secret
        return [[source.randrange(self.vocab_size) for _ in range(self.prefill)] for _ in range(self.requests)]


@dataclass(frozen=True)
class Measured:
    """What a load took."""

    seconds: float
    tokens: int
    first_token_ms: list[float]
    """Of each request: until its first token came."""
    token_ms: list[float]
    """Of each request: from its first token to its last, for each of the others."""
    request_ms: list[float]
    """Of each request: until its end was known."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all streams together."""
        return self.tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests of all streams together."""
        return len(self.request_ms) / self.seconds

    def summary(self) -> dict[str, float]:
        """Return the figures of the load: rates, and medians over its requests."""
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "requests_per_second": round(self.requests_per_second, 3),
            "first_token_ms": round(statistics.median(self.first_token_ms), 4),
            "token_ms": round(statistics.median(self.token_ms), 4),
            "request_ms": round(statistics.median(self.request_ms), 4),
        }


async def run_load(load: Load, start: Start) -> Measured:
    """Run a load."""
    waiting = list(enumerate(load.prompts()))[::-1]
    times: list[tuple[float, float, float]] = []

    async def stream() -> None:
        while waiting:
            index, prompt = waiting.pop()
            times.append(await _run_one(start(f"{load.name}-{index}", prompt, load.decode), load.decode))

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(load.streams)))
    seconds = time.perf_counter() - began
    first, each, whole = (list(column) for column in zip(*times, strict=True))
    return Measured(seconds, load.requests * load.decode, first, each, whole)


async def _run_one(arrivals: AsyncGenerator[int, None], decode: int) -> tuple[float, float, float]:
    """Return the times of a request in ms: its first token, each further one, its end."""
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
