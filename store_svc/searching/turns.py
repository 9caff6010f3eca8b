"""The threads of all searches. They take turns: a long search does not make a short one wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

_TURN_SECONDS = 0.05
"""After this time, a lane goes to the end of the queue."""

Work = Generator[None, None, None]
"""Work in steps. It yields after each of them."""


class Lanes:
    """The running work of one search. Its lanes run at the same time if there are threads for them."""

    def __init__(self, pool: ThreadPoolExecutor, work: Sequence[Work]) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._running = len(work)
        self._error: BaseException | None = None
        self._cancelled = False
        for lane in work:
            pool.submit(self._turn, lane)

    def wait(self, seconds: float) -> bool:
        """Wait until the work is done, or for some seconds. Return whether it is done.

        Raises:
            BaseException: What a lane raised. Raised once.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._running, seconds)
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: break the reference cycle
        return done

    def cancel(self) -> None:
        """End the work after the steps that are running, and wait for these."""
        self._cancelled = True
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            self._error = None  # nobody will ask for it; its traceback refers to this object

    def _turn(self, lane: Work) -> None:
        until = time.monotonic() + _TURN_SECONDS
        try:
            while not self._cancelled and time.monotonic() < until:
                next(lane)
            if not self._cancelled:
                self._pool.submit(self._turn, lane)
                return
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001 - wait() raises it in the caller's thread
            with self._changed:
                self._error, self._cancelled = error, True
        lane.close()
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


class Turns:
    """A pool of threads that works on several searches in turn."""

    def __init__(self, threads: int) -> None:
        """Create the pool. Its threads start when they are needed."""
        self.threads = threads
        """The most threads."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")

    @contextmanager
    def working(self, make: Callable[[], Work]) -> Iterator[Lanes]:
        """Run work in as many lanes as there are threads. It is cancelled when the context ends."""
        lanes = Lanes(self._pool, [make() for _ in range(self.threads)])
        try:
            yield lanes
        finally:
            lanes.cancel()

    def close(self) -> None:
        """End the threads, once no search runs."""
        self._pool.shutdown()
