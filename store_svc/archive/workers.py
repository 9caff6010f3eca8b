"""Threads that wait for the archive. Unlike those of a ThreadPoolExecutor, they do not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Workers:
    """Runs calls in a fixed number of daemon threads, which start when they are needed. Thread-safe."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unfinished = 0
        self._closed = False

    def submit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a call as soon as a thread is free; return its future. After `close`, the future is cancelled."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        result = function(*args, **kwargs)
                    except BaseException as error:  # noqa: BLE001 - the caller gets it
                        future.set_exception(error)
                    else:
                        future.set_result(result)
            finally:
                with self._lock:
                    self._unfinished -= 1

        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._unfinished += 1
            if self._threads < min(self._unfinished, self._count):
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._calls.put(run)
        return future

    def close(self) -> None:
        """End the threads, once each has run what was submitted before."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
