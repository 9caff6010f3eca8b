"""Many generations at once, in threads or as tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from residuum.exceptions import BatchFailed, InvalidRequest, RequestAborted, ResiduumError
from residuum.protocol.requests import Prompt, short
from residuum.transport.progress import progress_bar
from residuum.transport.streams import Stream
from residuum.values.replies import Reply


def check_prompts(prompts: Iterable[Prompt], sampling: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a batch as a list.

    Raises:
        TypeError: They are one prompt, or an argument is given that belongs to one request.
    """
    if "updatable" in sampling:
        raise TypeError(
            "generate_many() takes no updatable: it belongs to one request, whose stream updates it. Open a "
            "stream(updatable=True) for each prompt."
        )
    for name in ("request_id", "registration"):
        if name in sampling:
            raise TypeError(
                f"generate_many() takes no {name}: it belongs to one request, and here are many. Take the ids from the "
                f"replies, or call generate({name}=...) for each prompt."
            )
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"generate_many() takes a list of prompts, not {short(prompts)}; write [prompt] for one.")
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer, Mapping)) for item in items):
        raise TypeError(
            "generate_many() takes a list of prompts, and this is one prompt, of token ids or the turns of one "
            "conversation; write [prompt]."
        )
    return items


def check_concurrency(max_concurrency: int) -> int:
    """Return how many may run at once.

    Raises:
        InvalidRequest: It is below 1.
    """
    if max_concurrency < 1:
        raise InvalidRequest(f"max_concurrency must be at least 1, not {max_concurrency}.", reason="INVALID_FIELD")
    return max_concurrency


def collect(replies: Sequence[Reply | None], errors: dict[int, ResiduumError]) -> list[Reply]:
    """Return the replies if there is one for each prompt.

    Raises:
        BatchFailed: There is not.
    """
    if errors:
        raise BatchFailed(replies, errors)
    return [reply for reply in replies if reply is not None]


def run_batch(
    start: Callable[[Prompt], Stream], prompts: Sequence[Prompt], *, max_concurrency: int, progress: bool
) -> list[Reply]:
    """Run one generation for each prompt, some at once; see `Client.generate_many`."""
    batch = _Batch(start)
    replies: list[Reply | None] = [None] * len(prompts)
    errors: dict[int, ResiduumError] = {}
    workers = min(check_concurrency(max_concurrency), max(len(prompts), 1))
    with ThreadPoolExecutor(workers) as pool, progress_bar("generating", len(prompts), enabled=progress) as advance:
        numbers: dict[Future[Reply], int] = {pool.submit(batch.run, prompt): at for at, prompt in enumerate(prompts)}
        try:
            for future in as_completed(numbers):
                try:
                    replies[numbers[future]] = future.result()
                except ResiduumError as error:
                    errors[numbers[future]] = error
                advance(1)
        except BaseException:  # an interrupt, or a mistake in the call: stop what runs, start nothing more
            pool.shutdown(wait=False, cancel_futures=True)
            batch.stop()
            raise
    return collect(replies, errors)


class _Batch:
    """The generations that run."""

    def __init__(self, start: Callable[[Prompt], Stream]) -> None:
        self._start = start
        self._running: set[Stream] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, prompt: Prompt) -> Reply:
        """Run one."""
        if self._stopped.is_set():
            raise RequestAborted("The batch was stopped before this prompt.")
        with self._start(prompt) as stream:
            with self._lock:
                self._running.add(stream)
                if self._stopped.is_set():
                    stream.close()
            for _ in stream:
                pass
            with self._lock:
                self._running.discard(stream)
        return stream.reply

    def stop(self) -> None:
        """Stop them all."""
        with self._lock:
            self._stopped.set()
            for stream in self._running:
                stream.close()


async def run_async_batch(
    run: Callable[[Prompt], Awaitable[Reply]], prompts: Sequence[Prompt], *, max_concurrency: int, progress: bool
) -> list[Reply]:
    """Run one generation for each prompt, some at once; see `AsyncClient.generate_many`."""
    room = asyncio.Semaphore(check_concurrency(max_concurrency))
    replies: list[Reply | None] = [None] * len(prompts)
    errors: dict[int, ResiduumError] = {}
    with progress_bar("generating", len(prompts), enabled=progress) as advance:

        async def run_one(at: int, prompt: Prompt) -> None:
            try:
                async with room:
                    replies[at] = await run(prompt)
            except ResiduumError as error:
                errors[at] = error
            advance(1)

        tasks = [asyncio.ensure_future(run_one(at, prompt)) for at, prompt in enumerate(prompts)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:  # cancelled, or a mistake in the call: stop what runs
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
    return collect(replies, errors)
