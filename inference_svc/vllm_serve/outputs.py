"""The outputs of a captured request's sequences, as the caller asked for them.

Each sequence is a request of its own in vLLM, with a plan of its own, and is asked for step by step: so the tokens are
known whenever it ends. Callers get what vLLM would have given them: steps, all so far, or the end alone.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind

from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from vllm.outputs import RequestOutput

_GIVEN_UP = ("abort", "error")


async def in_turn(streams: Sequence[AsyncGenerator[Any]]) -> AsyncGenerator[tuple[int, Any]]:
    """Yield what comes of several generators, with the index of each. The end of this one closes them all."""
    # With few places: what is not taken of a generator of vLLM's, because its caller reads slowly, it merges into one.
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(len(streams))

    async def read(index: int, stream: AsyncGenerator[Any]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item, None))
        except Exception as error:  # noqa: BLE001 - raised below
            await queue.put((index, None, error))
        else:
            await queue.put((index, None, None))

    tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Sequences:
    """What has come of each sequence of a request."""

    def __init__(self, count: int, kind: RequestOutputKind) -> None:
        """Begin.

        Args:
            count: How many sequences.
            kind: What the caller asked for.
        """
        self._kind = kind
        self._token_ids: list[list[int]] = [[] for _ in range(count)]
        self._finish_reasons: list[str] = [""] * count
        self._wholes: list[RequestOutput | None] = [None] * count

    @property
    def have_ended(self) -> bool:
        """Whether each sequence has ended, by itself or not."""
        return all(self._finish_reasons)

    @property
    def have_generated(self) -> bool:
        """Whether each sequence has ended by itself."""
        return self.have_ended and not set(_GIVEN_UP) & set(self._finish_reasons)

    @property
    def have_failed(self) -> bool:
        """Whether vLLM gave a sequence up for an error."""
        return "error" in self._finish_reasons

    def outcomes(self) -> list[capture_pb2.SequenceOutcome]:
        """Return how the sequences ended, as a seal tells it; those that have not ended were aborted."""
        return [
            capture_pb2.SequenceOutcome(generated_token_ids=token_ids, finish_reason=reason or "abort")
            for token_ids, reason in zip(self._token_ids, self._finish_reasons, strict=True)
        ]

    def add(self, index: int, step: RequestOutput) -> RequestOutput | None:
        """Take what a step adds to a sequence; return what the caller gets now, or None."""
        for completion in step.outputs:  # one
            completion.index = index
            self._token_ids[index].extend(completion.token_ids)
            self._finish_reasons[index] = completion.finish_reason or ""
        step.finished = self.have_ended
        if self._kind == RequestOutputKind.DELTA:
            return step
        whole = self._merge(index, step)
        if self._kind == RequestOutputKind.CUMULATIVE:
            return _snapshot(whole)
        return self._final() if self.have_ended else None

    def _merge(self, index: int, step: RequestOutput) -> RequestOutput:
        whole = self._wholes[index]
        if whole is None:
            self._wholes[index] = step
            return step
        whole.add(step, aggregate=True)
        for name in ("metrics", "num_cached_tokens", "num_cache_creation_tokens"):
            if hasattr(step, name):
                setattr(whole, name, getattr(step, name))
        return whole

    def _final(self) -> RequestOutput:
        wholes = [whole for whole in self._wholes if whole is not None]
        final = wholes[0]
        final.outputs = [completion for whole in wholes for completion in whole.outputs]
        final.finished = True
        return final


def _snapshot(whole: RequestOutput) -> RequestOutput:
    """Return an output that later steps do not change."""
    now = copy(whole)
    now.outputs = [copy(completion) for completion in whole.outputs]
    for completion in now.outputs:
        completion.token_ids = list(completion.token_ids)
        completion.logprobs = copy(completion.logprobs)
    return now
