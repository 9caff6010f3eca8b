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

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from vllm.outputs import RequestOutput

    from inference_svc.session.sequences import GeneratedSequence


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


class CallerOutputs:
    """The outputs of a request's sequences in the form that its caller asked for."""

    def __init__(self, sequences: Sequence[GeneratedSequence], kind: RequestOutputKind) -> None:
        """Begin.

        Args:
            sequences: Where the tokens of each sequence are noted.
            kind: The form.
        """
        self._sequences = sequences
        self._kind = kind
        self._wholes: list[RequestOutput | None] = [None] * len(sequences)

    def add(self, index: int, step: RequestOutput) -> RequestOutput | None:
        """Take what a step adds to a sequence; return what the caller gets now, or None."""
        for completion in step.outputs:  # one
            completion.index = index
            self._sequences[index].add(completion.token_ids, completion.finish_reason)
        step.finished = have_ended = all(sequence.finish_reason for sequence in self._sequences)
        if self._kind == RequestOutputKind.DELTA:
            return step
        whole = self._merge(index, step)
        if self._kind == RequestOutputKind.CUMULATIVE:
            return _snapshot(whole)
        return self._final() if have_ended else None

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
