"""Runs many generations at once, in threads. `residuum._async.batches` uses tasks; both are written by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing

from residuum._sync.streams import Stream
from residuum.exceptions import BatchInterrupted, RequestAborted, ResiduumError
from residuum.transport.batches import BatchResults, check_concurrency
from residuum.transport.progress import progress_bar
from residuum.values.replies import Reply


def run_batch(start: Callable[[int], Stream], count: int, *, max_concurrency: int, progress: bool) -> list[Reply]:
    """Return the replies of all prompts; see `Client.generate_many`."""
    results = BatchResults(count)
    try:
        with closing(_run(start, results, max_concurrency=max_concurrency, progress=progress)) as ends:
            for _ in ends:
                pass
    except KeyboardInterrupt:
        raise BatchInterrupted(results.replies, results.errors) from None
    return results.all_replies()


def run_as_completed(
    start: Callable[[int], Stream], count: int, *, max_concurrency: int, progress: bool
) -> Generator[tuple[int, Reply], None, None]:
    """Yield each reply when its generation ends; see `Client.generate_as_completed`."""
    results = BatchResults(count)
    with closing(_run(start, results, max_concurrency=max_concurrency, progress=progress)) as ends:
        for index in ends:
            reply = results.replies[index]
            if reply is not None:
                yield index, reply
    results.check()


def _run(
    start: Callable[[int], Stream], results: BatchResults, *, max_concurrency: int, progress: bool
) -> Generator[int, None, None]:
    """Run the generations, record their outcomes, and yield the index of each when it ends."""
    count = len(results.replies)
    batch = _Batch(start, results)
    workers = min(check_concurrency(max_concurrency), max(count, 1))
    with ThreadPoolExecutor(workers) as pool, progress_bar("generating", count, enabled=progress) as advance:
        futures = [pool.submit(batch.run, index) for index in range(count)]
        try:
            for future in as_completed(futures):
                index = future.result()
                advance(1)
                yield index
        except BaseException:  # closed, interrupted, or an error in the arguments: stop all, start no more
            batch.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Batch:
    """The running generations."""

    def __init__(self, start: Callable[[int], Stream], results: BatchResults) -> None:
        self._start = start
        self._results = results
        self._running: set[Stream] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, index: int) -> int:
        """Run one, record its outcome, and return its index."""
        try:
            outcome: Reply | ResiduumError = self._reply(index)
        except ResiduumError as error:
            outcome = error
        if isinstance(outcome, Reply) or not self._stopped.is_set():  # a stopped generation has not failed
            self._results.add(index, outcome)
        return index

    def _reply(self, index: int) -> Reply:
        if self._stopped.is_set():
            raise RequestAborted("The batch was stopped before this prompt.")
        with self._start(index) as stream:
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
