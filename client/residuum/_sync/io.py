"""Waits in a thread. `residuum._async.io` has the same functions for event loops; both are written by hand."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from residuum.exceptions import ResiduumError
from residuum.rpc import channels
from residuum.v1 import inference_pb2

if TYPE_CHECKING:
    from residuum._sync.client import Client
    from residuum.exports.job import Export, ExportJob
    from residuum.exports.target import Workplace
    from residuum.extraction.inputs.prompts import Source
    from residuum.extraction.results.reader import Extracted
    from residuum.values.captures.activations import Activations

    class Call(Iterator[inference_pb2.GenerateResponse], Protocol):
        """What grpc returns for a stream: an iterator that can be cancelled."""

        def cancel(self) -> bool:
            """Stop the call."""
            ...


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

open_channel = channels.open_channel
sleep = time.sleep
Lock = threading.Lock
Turns = nullcontext
"""Threads need no turns: each sends its request when it has built the message."""


class Stop:
    """Asks jobs in other threads to stop, and cancels their calls, for which they may wait without a limit."""

    def __init__(self) -> None:
        """Begin without a request to stop."""
        self._requested = threading.Event()
        self._calls: dict[int, Any] = {}  # by thread; each makes one call at a time
        self._lock = threading.Lock()

    @property
    def is_requested(self) -> bool:
        """Whether the jobs are to stop."""
        return self._requested.is_set()

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the jobs are to stop."""
        self._requested.wait(seconds)

    def watch(self, call: Any) -> None:
        """Note the call for which this thread waits from now on."""
        with self._lock:
            self._calls[threading.get_ident()] = call
        if self.is_requested:
            call.cancel()

    def request(self) -> None:
        """Ask all jobs to stop."""
        self._requested.set()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()


def run_all(jobs: Sequence[Callable[[int, Stop], None]]) -> None:
    """Run jobs at the same time, each with its index. If one fails, ask the others to stop and raise its exception.

    The last job runs in this thread. The others have daemon threads, so that Ctrl-C ends the program at once.
    """
    stop = Stop()
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            jobs[index](index, stop)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            stop.request()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs) - 1)]
    for thread in threads:
        thread.start()
    try:
        jobs[-1](len(jobs) - 1, stop)
        for thread in threads:
            thread.join()
    except Exception as error:  # noqa: BLE001 - raised again below, after the error for which it was stopped
        errors.append(error)
    finally:
        stop.request()
    if errors:
        raise errors[0]


def call_each(
    function: Callable[[_Item], _Result], items: Sequence[_Item], at_once: int
) -> list[_Result | ResiduumError]:
    """Return what a function returns for each item, or the ResiduumError that it raises, with `at_once` calls at once.

    After another exception, or Ctrl-C, stop.
    """

    def call(item: _Item) -> _Result | ResiduumError:
        try:
            return function(item)
        except ResiduumError as error:
            return error

    with ThreadPoolExecutor(at_once) as pool:
        try:
            return list(pool.map(call, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_in_thread(
    function: Callable[..., _Result],
    *arguments: object,
    unwanted: Callable[[_Result], object],  # noqa: ARG001 - for tasks that are cancelled
) -> _Result:
    """Return what a function returns that may wait for a moment."""
    return function(*arguments)


def resumable(begin: Callable[[float | None], Generator[_Item, None]], timeout: float | None) -> Generator[_Item, None]:
    """Return what `begin` returns: no other thread can cancel a wait for an item."""
    return begin(timeout)


def read_event(call: Call) -> inference_pb2.GenerateResponse | None:
    """Return the next event of a generation; None at its end.

    Raises:
        grpc.RpcError: The call failed.
    """
    return next(call, None)


def extract(
    client: Client,
    source: Source,
    folder: str | os.PathLike[str],
    spec: Mapping[str, Any],
    endpoints: Iterable[str],
    **options: Any,
) -> Extracted:
    """Run an extraction, in an event loop of its own; see `Client.extract`."""
    from residuum.extraction.job import job_of, run_in_thread

    return run_in_thread(*job_of(client, source, folder, spec, endpoints, **options))


def write_export(job: ExportJob, acts: Activations, place: Workplace, touch: Callable[[int], None]) -> Export:
    """Write an export. If it is interrupted, stop the writing thread and wait until it has stopped."""
    return job.run(acts, place, touch)
