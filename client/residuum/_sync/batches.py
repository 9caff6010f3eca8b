"""Runs many generations at once, in threads. `residuum._async.batches` uses tasks; both are written by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing

from residuum._sync.io import Stop
from residuum._sync.streams import Stream
from residuum.exceptions import BatchInterrupted, RequestAborted, ResiduumError
from residuum.transport.batches import BatchResults, Outage, check_concurrency
from residuum.transport.progress import progress_bar
from residuum.values.replies.generation import Reply


def run_batch(
    start: Callable[[int, Stop], Stream], results: BatchResults, outage: Outage, *, max_concurrency: int, progress: bool
) -> list[Reply]:
    """Return the replies of all prompts; see `Client.generate_many`."""
    try:
        with closing(_run(start, results, outage, max_concurrency=max_concurrency, progress=progress)) as ends:
            for _ in ends:
                pass
    except KeyboardInterrupt:
        raise BatchInterrupted(results.replies, results.errors, can_skip=results.can_skip) from None
    return results.all_replies()


def run_as_completed(
    start: Callable[[int, Stop], Stream], results: BatchResults, outage: Outage, *, max_concurrency: int, progress: bool
) -> Generator[tuple[int, Reply], None, None]:
    """Yield each reply when its generation ends; see `Client.generate_as_completed`."""
    with closing(_run(start, results, outage, max_concurrency=max_concurrency, progress=progress)) as ends:
        for index in ends:
            reply = results.replies[index]
            if reply is not None:
                yield index, reply
    results.check()


def _run(
    start: Callable[[int, Stop], Stream], results: BatchResults, outage: Outage, *, max_concurrency: int, progress: bool
) -> Generator[int, None, None]:
    """Run the generations, record their outcomes, and yield the index of each when it ends."""
    count = len(results.replies)
    batch = _Batch(start, results, outage)
    workers = min(check_concurrency(max_concurrency), max(count, 1))
    with ThreadPoolExecutor(workers) as pool, progress_bar("generating", count, enabled=progress) as advance:
        futures = [pool.submit(batch.run, index) for index in range(count)]
        try:
            for future in as_completed(futures):
                index = future.result()
                results.check_common()
                advance(1)
                yield index
        except BaseException:  # closed, interrupted, or an error in the arguments: stop all, start no more
            batch.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Batch:
    """The running generations."""

    def __init__(self, start: Callable[[int, Stop], Stream], results: BatchResults, outage: Outage) -> None:
        self._start = start
        self._results = results
        self._outage = outage
        self._turn = threading.Lock()
        self._stop = Stop()

    def run(self, index: int) -> int:
        """Run one, record its outcome, and return its index."""
        try:
            outcome: Reply | ResiduumError = self._reply(index)
        except ResiduumError as error:
            outcome = error
        if isinstance(outcome, Reply) or not self._stop.is_requested:  # a stopped generation has not failed
            self._results.add(index, outcome)
        return index

    def _reply(self, index: int) -> Reply:
        """Run one and return its reply. If a service is away, wait for it."""
        while True:
            with self._accepted(index) as stream:
                try:
                    for _ in stream:
                        pass
                except ResiduumError as failure:
                    self._outage.note(index, failure, was_accepted=True)
                else:
                    return stream.reply

    def _accepted(self, index: int) -> Stream:
        """Return the stream of a prompt once the service has accepted it."""
        while True:
            self._check_running()
            if not self._outage.is_on:
                try:
                    return self._start(index, self._stop)
                except ResiduumError as failure:
                    self._outage.note(index, failure)
            with self._turn:  # during an outage, one attempt at a time
                self._stop.wait(self._outage.seconds())
                self._check_running()
                if not self._outage.is_on:
                    continue
                try:
                    stream = self._start(index, self._stop)
                except ResiduumError as failure:
                    self._outage.note(index, failure, is_attempt=True)
                else:
                    self._outage.end()
                    return stream

    def _check_running(self) -> None:
        if self._stop.is_requested:
            raise RequestAborted("The batch was stopped before this prompt.")

    def stop(self) -> None:
        """Stop them all."""
        self._stop.request()
