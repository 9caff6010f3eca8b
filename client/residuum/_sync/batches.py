"""Many generations at once, in threads. `residuum._async.batches` runs them as tasks; both are written by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from residuum._sync.streams import Stream
from residuum.exceptions import RequestAborted, ResiduumError
from residuum.transport.batches import BatchItem, check_concurrency, collect
from residuum.transport.progress import progress_bar
from residuum.values.replies import Reply


def run_batch(
    start: Callable[[BatchItem], Stream], items: Sequence[BatchItem], *, max_concurrency: int, progress: bool
) -> list[Reply]:
    """Run one generation for each prompt, some at once; see `Client.generate_many`."""
    batch = _Batch(start)
    replies: list[Reply | None] = [None] * len(items)
    errors: dict[int, ResiduumError] = {}
    workers = min(check_concurrency(max_concurrency), max(len(items), 1))
    with ThreadPoolExecutor(workers) as pool, progress_bar("generating", len(items), enabled=progress) as advance:
        numbers: dict[Future[Reply], int] = {pool.submit(batch.run, item): at for at, item in enumerate(items)}
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

    def __init__(self, start: Callable[[BatchItem], Stream]) -> None:
        self._start = start
        self._running: set[Stream] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, item: BatchItem) -> Reply:
        """Run one."""
        if self._stopped.is_set():
            raise RequestAborted("The batch was stopped before this prompt.")
        with self._start(item) as stream:
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
