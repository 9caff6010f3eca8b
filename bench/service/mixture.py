"""Requests of every kind in rotation: plain, with captures, with steering, and with every kind of end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np

import residuum

_WORDS = ("the", "sun", "river", "stone", "a", "quiet", "light", "falls", "over", "seven", "hills", "and", "sleeps")
_KNOWN_VECTORS = 8
_LENGTHS = (8, 48)
_REPLY = (2, 8)
_IDS = (3, 1000)
"""A range of token IDs that all models here have."""


class Mixture:
    """Makes requests of each kind in rotation. The same seed gives the same requests."""

    def __init__(self, client: residuum.AsyncClient, info: residuum.ModelInfo, *, texts: bool, seed: int = 0) -> None:
        """Make requests through a client.

        Args:
            client: The client.
            info: The model that it serves.
            texts: Whether the model has a tokenizer; otherwise prompts are token IDs.
            seed: The seed for prompts, vectors and lengths.
        """
        self._client = client
        self._info = info
        self._texts = texts
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._vectors = np.random.default_rng(seed)
        self._known = [self._vector() for _ in range(_KNOWN_VECTORS)]
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "plain": self._plain,
            "captured": self._captured,
            "steered": self._steered,
            "captured, steered": self._captured_and_steered,
            "encoded": self._encoded,
            "registered, new vector": self._registered,
            "two sequences": self._two_sequences,
            "changed, broken off": self._broken_off,
            "refused": self._refused,
        }
        self.made: Counter[str] = Counter()
        """The number of requests of each kind."""

    async def run(self, number: int) -> None:
        """Make a request, and wait until it is done, including reads and deletes."""
        kind = list(self._kinds)[number % len(self._kinds)]
        await self._kinds[kind]()
        self.made[kind] += 1

    async def _plain(self) -> None:
        await self._client.generate(self._prompt(), max_tokens=self._length(), ignore_eos=True)

    async def _captured(self) -> None:
        await self._captures(residuum.Capture())

    async def _steered(self) -> None:
        await self._client.generate(self._prompt(), max_tokens=self._length(), steer=self._push(self._some_known()))

    async def _captured_and_steered(self) -> None:
        await self._captures(residuum.Capture(layers=[0, self._last_layer]), self._push(self._some_known()))

    async def _encoded(self) -> None:
        await self._captures(residuum.Capture(encoding="rp8", dimensions=64, reduction="mean"))

    async def _registered(self) -> None:
        """Register a request with a new vector. Over time, new vectors evict others."""
        registration = await self._client.register(
            capture=residuum.Capture(layers=[self._last_layer]), steer=self._push(self._vector())
        )
        reply = await self._client.generate(self._prompt(), registration=registration, max_tokens=self._length())
        await self._read_and_delete(reply.request_id)

    async def _two_sequences(self) -> None:
        await self._client.generate(self._prompt(), max_tokens=self._length(), n=2, temperature=0.9, seed=1)

    async def _broken_off(self) -> None:
        """Change the steering of a request, then disconnect before it ends."""
        options = {"max_tokens": 400, "ignore_eos": True, "capture": residuum.Capture(), "updatable": True}
        async with self._client.stream(self._prompt(), **options) as stream:  # type: ignore[arg-type] # of many types
            await anext(stream)
            with suppress(residuum.UnknownRequest):  # a small model may already have generated all tokens
                await stream.update_steering(self._push(self._some_known()))
        await self._client.manifest(stream.request_id, wait=True)
        await self._client.delete(stream.request_id)

    async def _refused(self) -> None:
        try:
            await self._client.generate(self._prompt(), capture=residuum.Capture(layers=[self._last_layer + 1]))
        except residuum.UnknownLayer:
            return
        raise AssertionError("the server accepted a layer that the model does not have")

    async def _captures(self, capture: residuum.Capture, steer: residuum.Add | None = None) -> None:
        reply = await self._client.generate(
            self._prompt(), max_tokens=self._length(), ignore_eos=True, capture=capture, steer=steer
        )
        await self._read_and_delete(reply.request_id)

    async def _read_and_delete(self, request_id: str) -> None:
        """Read all rows, then delete the capture, because captures stay in the store until they are deleted."""
        await self._client.activations(request_id)
        await self._client.delete(request_id)

    def _prompt(self) -> str | list[int]:
        length = self._random.randint(*_LENGTHS)
        if self._texts:
            return " ".join(self._random.choices(_WORDS, k=length))
        return [self._random.randrange(*_IDS) for _ in range(length)]

    def _length(self) -> int:
        return self._random.randint(*_REPLY)

    def _vector(self) -> residuum.Vector:
        return residuum.Vector(self._vectors.standard_normal(self._info.hidden_size).astype(np.float32))

    def _some_known(self) -> residuum.Vector:
        return self._random.choice(self._known)

    def _push(self, vector: residuum.Vector) -> residuum.Add:
        return residuum.Add(vector, layers="all", scale=0.1)

    @property
    def _last_layer(self) -> int:
        return self._info.num_layers - 1
