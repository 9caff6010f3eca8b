"""Merges the outputs of a request's sequences into the form that the caller asked for.

Each sequence runs as a separate request in vLLM, with its own plan. Its output kind is always DELTA, so that the tokens
are known even if the sequence ends early. Callers get the output kind that they asked for: DELTA, CUMULATIVE or
FINAL_ONLY.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from inference_svc.vllm_serve.requests.xargs import without_residuum_arguments
from residuum.rpc.errors import Failure, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    from vllm import SamplingParams

    from inference_svc.requests.registry import Running
    from inference_svc.session.burst import Burst
    from inference_svc.session.existing_capture import KeptSequence
    from inference_svc.session.sequences import GeneratedSequence


_NOT_SAMPLING = {
    "detokenize",
    "extra_args",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "skip_reading_prefix_cache",
    "stream_interval",
}
"""Fields of vLLM's sampling parameters that do not change a request's tokens. Those about logprobs do not either. Of
`extra_args`, see `_NOT_TOKENS`."""

_NOT_TOKENS = {"ec_transfer_params", "kv_transfer_params", "session_id"}
"""Items of `extra_args` that do not change a request's tokens. Others may: logits processors read them."""


_Queue = asyncio.Queue[tuple[int, Any, BaseException | None]]


async def merge_streams(
    running: Running,
    streams: Sequence[AsyncGenerator[Any]],
    burst: Burst,
    ready: Callable[[], Awaitable[None]],
    *,
    reads_ahead: bool = False,
) -> AsyncGenerator[tuple[int, Any]]:
    """Yield the items of several generators as they come, each with the index of its generator.

    The generators start at once; the first item is yielded when `ready` has returned.

    Closing this generator closes all of them.

    Args:
        running: The request. Its `abort` ends the generators, also if their engine gives no more outputs.
        streams: The generators.
        burst: The requests that arrive at this time. `ready` is called at the burst's end, or with the first item.
        ready: Returns when items may be yielded.
        reads_ahead: Whether the generators run on if the caller reads slowly, or before `ready` returns. Rules need
            it, because the generators judge the tokens.

    Raises:
        Failure: The request was aborted.
    """
    # The queue is short on purpose: if the caller reads slowly, vLLM merges the outputs that were not read yet. With
    # rules it has no limit; `max_tokens` bounds what it holds.
    # `Generation` has an endless queue and merges by itself: a change of the steering needs the number of tokens that
    # the engine has generated, even if the caller reads nothing.
    queue: _Queue = asyncio.Queue(0 if reads_ahead else len(streams))

    due = asyncio.Event()

    async def read(index: int, stream: AsyncGenerator[Any]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item, None))
                    due.set()
        except Exception as error:  # noqa: BLE001 - the consumer below raises it
            await queue.put((index, None, error))
        else:
            await queue.put((index, None, None))
        finally:
            due.set()

    tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        _end_by_abort(running, queue, due)
        burst.call_after(due.set)
        await due.wait()
        await ready()
        open_streams = len(tasks)
        while open_streams:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                open_streams -= 1
            else:
                yield index, item
    finally:
        running.on_abort = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_by_abort(running: Running, queue: _Queue, due: asyncio.Event) -> None:
    """Put an error in front of all items when the request is aborted."""

    def stop() -> None:
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait((0, None, stopped_failure()))
        due.set()

    running.on_abort = stop
    if running.aborted.is_set():
        stop()


def stopped_failure() -> Failure:
    """Return the failure of a request that ends because its server stops."""
    return Failure(Reason.ERROR_REASON_ABORTED, "The server stopped. Send the request to another one.")


def digest_of(sampling: SamplingParams) -> bytes:
    """Return a hash of what determines the tokens of a request in vLLM's sampling parameters."""
    fields = {
        name: repr(getattr(sampling, name))
        for name in sorted(sampling.__struct_fields__)
        if not name.startswith("_") and "logprob" not in name and name not in _NOT_SAMPLING
    }
    others = without_residuum_arguments(sampling.extra_args) or {}
    if of_processors := sorted((name, repr(value)) for name, value in others.items() if name not in _NOT_TOKENS):
        fields["extra_args"] = repr(of_processors)
    return hashlib.sha256(repr(fields).encode()).digest()


def kept_outputs(
    request_id: str, prompt_token_ids: Sequence[int], kept: Sequence[KeptSequence], kind: RequestOutputKind
) -> Iterator[RequestOutput]:
    """Yield what vLLM would answer, from the sequences of a capture that exists already.

    Args:
        request_id: The ID that vLLM gave the request.
        prompt_token_ids: The tokens of its prompt.
        kept: The sequences.
        kind: The form that the caller asked for.
    """
    completions = [
        CompletionOutput(
            index,
            item.text,
            item.token_ids,
            None,
            None,
            finish_reason=item.finish_reason,
            stop_reason=item.stop_reason or item.stop_token_id,
        )
        for index, item in enumerate(kept)
    ]
    # A caller that takes steps gets one sequence at a time, as from the engine.
    parts = [completions] if kind == RequestOutputKind.FINAL_ONLY else [[item] for item in completions]
    for number, part in enumerate(parts, 1):
        yield RequestOutput(request_id, None, list(prompt_token_ids), None, part, number == len(parts))


class CallerOutputs:
    """Collects the outputs of a request's sequences, and returns them in the form that the caller asked for."""

    def __init__(self, sequences: Sequence[GeneratedSequence], kind: RequestOutputKind) -> None:
        """Start without outputs.

        Args:
            sequences: The record of each sequence, to which the tokens are added.
            kind: The form that the caller asked for.
        """
        self._sequences = sequences
        self._kind = kind
        self._merged: list[RequestOutput | None] = [None] * len(sequences)

    def add(self, index: int, step: RequestOutput) -> RequestOutput | None:
        """Add one step of a sequence. Return the output that the caller gets now; None if there is none yet."""
        for completion in step.outputs:  # exactly one: each sequence is a request with n=1
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
        whole = self._merged[index]
        if whole is None:
            self._merged[index] = step
            return step
        whole.add(step, aggregate=True)
        for name in ("metrics", "num_cached_tokens", "num_cache_creation_tokens"):
            if hasattr(step, name):
                setattr(whole, name, getattr(step, name))
        return whole

    def _final(self) -> RequestOutput:
        wholes = [whole for whole in self._merged if whole is not None]
        final = wholes[0]
        final.outputs = [completion for whole in wholes for completion in whole.outputs]
        final.finished = True
        return final


def _snapshot(whole: RequestOutput) -> RequestOutput:
    """Return a copy that later steps do not change."""
    now = copy(whole)
    now.outputs = [copy(completion) for completion in whole.outputs]
    for completion in now.outputs:
        completion.token_ids = list(completion.token_ids)
        completion.logprobs = copy(completion.logprobs)
    return now
