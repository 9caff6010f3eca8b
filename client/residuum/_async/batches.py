"""Runs many generations at once, as tasks. `residuum._sync.batches` uses threads; both are written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from residuum._async.io import Stop, resumable
from residuum._async.streams import AsyncStream
from residuum.exceptions import RequestAborted, ResiduumError, unfinished, unpickled
from residuum.rpc import tracing
from residuum.transport.batches import BatchResults, Outage, check_concurrency
from residuum.transport.progress import progress_bar
from residuum.values.replies.generation import Reply


class BatchCancelled(Exception):  # noqa: N818 - it is not an error
    """The task of `AsyncClient.generate_many` was cancelled. It has stopped the prompts that were running.

    It is never raised. It is the `__cause__` of the asyncio.CancelledError that `generate_many` raises. With
    asyncio.timeout, that one is in turn the `__cause__` of the TimeoutError.

    Attributes:
        replies: One entry for each prompt, in order; None for a prompt that failed or had not ended.
        errors: The exception of each failed prompt, by the prompt's index.
    """

    def __init__(
        self, replies: Sequence[Reply | None], errors: Mapping[int, ResiduumError], *, can_skip: bool = False
    ) -> None:
        super().__init__(unfinished(replies, can_skip=can_skip))
        self.replies = list(replies)
        self.errors = dict(errors)

    def __reduce__(self) -> tuple[Callable[..., BatchCancelled], tuple[object, ...]]:
        return unpickled, (type(self), self.args, self.__dict__.copy())  # as for ResiduumError


async def run_batch(
    start: Callable[[int, Stop], AsyncStream],
    results: BatchResults,
    outage: Outage,
    *,
    max_concurrency: int,
    progress: bool,
) -> list[Reply]:
    """Return the replies of all prompts; see `AsyncClient.generate_many`."""
    try:
        async with aclosing(_run(start, results, outage, max_concurrency=max_concurrency, progress=progress)) as ends:
            async for _ in ends:
                pass
    except asyncio.CancelledError as cancelled:  # asyncio.timeout and TaskGroup do not expect a subclass of it
        raise cancelled from BatchCancelled(results.replies, results.errors, can_skip=results.can_skip)
    return results.all_replies()


def run_as_completed(
    start: Callable[[int, Stop], AsyncStream],
    results: BatchResults,
    outage: Outage,
    *,
    max_concurrency: int,
    progress: bool,
) -> AsyncGenerator[tuple[int, Reply], None]:
    """Yield each reply when its generation ends; see `AsyncClient.generate_as_completed`."""
    left = set(range(len(results.replies)))
    runs = [_run(start, results, outage, max_concurrency=max_concurrency, progress=progress)]

    async def begin(_: float | None) -> AsyncGenerator[tuple[int, Reply], None]:
        async with aclosing(runs.pop() if runs else _stopped(results, left)) as ends:
            async for index in ends:
                left.discard(index)
                reply = results.replies[index]
                if reply is not None:
                    yield index, reply
        results.check()

    return resumable(begin, None)


_STOPPED = (
    "The wait for a reply was cancelled, as asyncio.wait_for does after its timeout, and that stopped all prompts that "
    "were running. To wait for a limited time, give asyncio.wait a task that waits for the reply: it does not cancel "
    "the task."
)


async def _stopped(results: BatchResults, left: set[int]) -> AsyncGenerator[int, None]:
    """Yield the prompts of a batch that a cancelled wait has stopped. Those without a reply have failed."""
    for index in sorted(left):
        if results.replies[index] is None and index not in results.errors:
            results.add(index, RequestAborted(_STOPPED))
        yield index


async def _run(
    start: Callable[[int, Stop], AsyncStream],
    results: BatchResults,
    outage: Outage,
    *,
    max_concurrency: int,
    progress: bool,
) -> AsyncGenerator[int, None]:
    """Run the generations, record their outcomes, and yield the index of each when it ends."""
    room = asyncio.Semaphore(check_concurrency(max_concurrency))
    ended: asyncio.Queue[int | Exception] = asyncio.Queue()
    batch = _Batch(start, outage)
    is_over = False

    async def run_one(index: int) -> None:
        try:
            async with room:
                results.add(index, await batch.reply(index))
        except ResiduumError as error:
            results.add(index, error)
        except asyncio.CancelledError:
            if is_over:
                raise
            results.add(index, RequestAborted("Something other than this batch cancelled the request."))
        except Exception as error:  # noqa: BLE001 - an error in the arguments, which the caller must see
            ended.put_nowait(error)
        ended.put_nowait(index)

    count = len(results.replies)
    tasks = [asyncio.ensure_future(run_one(index)) for index in range(count)]
    try:
        with progress_bar("generating", count, enabled=progress) as advance:
            for _ in range(count):
                item = await ended.get()
                if isinstance(item, Exception):
                    raise item
                results.check_common()
                advance(1)
                yield item
    finally:  # stop the running generations if this generator is closed or cancelled, or raises
        is_over = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Batch:
    """The running generations."""

    def __init__(self, start: Callable[[int, Stop], AsyncStream], outage: Outage) -> None:
        self._start = start
        self._outage = outage
        self._turn = asyncio.Lock()

    async def reply(self, index: int) -> Reply:
        """Run one and return its reply. If a service is away, wait for it."""
        with tracing.span("client.generate"):
            while True:
                stream = await self._accepted(index)
                try:
                    async with stream:
                        async for _ in stream:
                            pass
                except ResiduumError as failure:
                    self._outage.note(index, failure, was_accepted=True)
                else:
                    tracing.set_attributes(request_id=stream.reply.request_id)
                    return stream.reply

    async def _accepted(self, index: int) -> AsyncStream:
        """Return the stream of a prompt once the service has accepted it."""
        while True:
            stream = self._start(index, Stop())
            if not self._outage.is_on:
                try:
                    await stream.open()
                except ResiduumError as failure:
                    self._outage.note(index, failure)
                else:
                    return stream
            async with self._turn:  # during an outage, one attempt at a time
                await asyncio.sleep(self._outage.seconds())
                if not self._outage.is_on:
                    continue
                try:
                    await stream.open()
                except ResiduumError as failure:
                    self._outage.note(index, failure, is_attempt=True)
                else:
                    self._outage.end()
                    return stream
