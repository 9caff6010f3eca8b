"""Waits in an event loop. `residuum._sync.io` has the same functions for threads; both are written by hand."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc.aio

from residuum.exceptions import ResiduumError
from residuum.protocol.deadlines import Deadline
from residuum.rpc.channels import open_aio_channel
from residuum.v1 import inference_pb2

if TYPE_CHECKING:
    from residuum._async.client import AsyncClient
    from residuum.exports.job import Export, ExportJob
    from residuum.exports.target import Workplace
    from residuum.extraction.inputs.prompts import Source
    from residuum.extraction.results.reader import Extracted
    from residuum.rpc.credentials import Credentials
    from residuum.values.captures.activations import Activations

    Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Lock = asyncio.Lock
_WORK_SECONDS = 0.001
"""The time that tasks may work in a turn of the event loop before others have to wait. Waits cost time, too."""
_TASK_SECONDS = 0.0002
"""About the time that a task needs to build the message of a request."""
_SAME_TURN_SECONDS = 0.0001
"""A task that comes this soon after another one has worked is taken to come in the same turn."""

sleep = asyncio.sleep


def open_channel(endpoint: str, *, credentials: Credentials) -> grpc.aio.Channel:
    """Open a channel that stops its calls when it is closed."""
    return cast("grpc.aio.Channel", _Channel(open_aio_channel(endpoint, credentials=credentials)))


class _Channel:
    """A channel that knows its running calls, because grpc.aio's own `close` finds only some of them.

    It also knows its event loop. In another one, grpc.aio raises errors that do not say what is wrong.

    When `close` stops a call, waiting for it raises an error, as with a synchronous channel. grpc.aio would raise
    CancelledError, as if the task had been cancelled.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._calls: weakref.WeakSet[grpc.aio.Call] = weakref.WeakSet()
        self._closed = False

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        return self._answered(self._channel.unary_unary(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        return self._answered(self._channel.stream_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Callable[..., _StreamCall]:
        method: Callable[..., Any] = self._channel.unary_stream(*arguments, **options)
        return lambda *request, **settings: _StreamCall(self, self._begin(method, *request, **settings))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """Needed to make stubs. Clients make no such call."""
        return self._channel.stream_stream(*arguments, **options)

    async def close(self) -> None:
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        await self._channel.close()

    async def wait(self, answer: Awaitable[_Result]) -> _Result:
        """Wait for something that a call gives.

        Raises:
            grpc.RpcError: The call failed, or `close` stopped it.
        """
        try:
            return await answer
        except asyncio.CancelledError:
            if not self._closed or is_cancelled():
                raise
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, "Channel closed!") from None

    def _answered(self, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def answer(*request: Any, **settings: Any) -> Any:
            return await self.wait(self._begin(method, *request, **settings))

        return answer

    def _begin(self, method: Callable[..., Any], *request: Any, **settings: Any) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "This AsyncClient was used in another event loop before. Its connections belong to that loop, so it "
                "cannot be used in this one. Each asyncio.run() makes a loop: create the client inside of the "
                "coroutine that uses it, once for each loop; or use residuum.Client, which needs no loop."
            )
        call = method(*request, **settings)
        self._calls.add(call)
        return call


class _StreamCall:
    """The answers of a call, one by one."""

    def __init__(self, channel: _Channel, call: Any) -> None:
        self._channel = channel
        self._call = call

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    async def read(self) -> Any:
        return await self._channel.wait(self._call.read())

    def __aiter__(self) -> _StreamCall:
        return self

    async def __anext__(self) -> Any:
        return await self._channel.wait(self._call.__aiter__().__anext__())


def is_cancelled() -> bool:
    """Tell whether the running task was cancelled. Python 3.10 does not know it, so there this is false."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0


class Turns:
    """A context that spreads the work of tasks that start at the same time over several turns of the event loop.

    Between them, the loop does what else is waiting. In each turn, it lets in as many tasks as could have worked during
    the turn before. So they share its time with everything else, however long its turns are.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turn_began = 0.0
        self._work_ended = -math.inf

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._waiting:
            if now - self._work_ended > _SAME_TURN_SECONDS:
                self._turn_began = now
            if now - self._turn_began < _WORK_SECONDS:
                return
            self._turn_began = now
            loop.call_soon(self._let_in, loop)
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    async def __aexit__(self, *error: object) -> None:
        self._work_ended = asyncio.get_running_loop().time()

    def _let_in(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        count = max(1, int((now - self._turn_began) / _TASK_SECONDS))
        self._turn_began = now
        while self._waiting and count:
            waiter = self._waiting.popleft()
            if not waiter.done():  # it is if its task was cancelled
                waiter.set_result(None)
                count -= 1
        if self._waiting:
            loop.call_soon(self._let_in, loop)


class Stop:
    """Asks jobs in other threads to stop. Tasks are cancelled instead, so here it never does."""

    is_requested = False

    def watch(self, call: object) -> None:
        """Do nothing: a job's call ends with its task."""


async def run_all(jobs: Sequence[Callable[[int, Stop], Coroutine[Any, Any, None]]]) -> None:
    """Run jobs at the same time, each with its index. If one fails, stop the others and raise its exception."""
    tasks = [asyncio.ensure_future(job(index, Stop())) for index, job in enumerate(jobs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def call_each(
    function: Callable[[_Item], Coroutine[Any, Any, _Result]], items: Sequence[_Item], at_once: int
) -> list[_Result | ResiduumError]:
    """Return what a function returns for each item, or the ResiduumError that it raises, with `at_once` calls at once.

    After another exception, stop.
    """
    room = asyncio.Semaphore(at_once)

    async def call(item: _Item) -> _Result | ResiduumError:
        async with room:
            try:
                return await function(item)
            except ResiduumError as error:
                return error

    tasks = [asyncio.ensure_future(call(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def run_in_thread(
    function: Callable[..., _Result], *arguments: object, unwanted: Callable[[_Result], object]
) -> _Result:
    """Return what a function returns that may wait for a moment.

    If the task is cancelled meanwhile, `unwanted` gets the result, in this thread or in the function's.
    """
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - raised again below
            done.set_exception(error)

    try:
        await asyncio.to_thread(run)
    except asyncio.CancelledError:
        done.add_done_callback(lambda _: None if done.exception() else unwanted(done.result()))
        raise
    return done.result()


class resumable(AsyncGenerator[_Item, None]):  # noqa: N801 - a function in `residuum._sync.io`
    """Yields what a generator yields. If a wait for an item is cancelled, the next one begins the generator again.

    A generator itself ends when a wait is cancelled, and then looks like one that has yielded everything.
    """

    def __init__(self, begin: Callable[[float | None], AsyncGenerator[_Item, None]], timeout: float | None) -> None:
        """`begin` takes the seconds that are left of `timeout`, which counts from the first wait."""
        self._begin = begin
        self._timeout = timeout
        self._deadline: Deadline | None = None
        self._items: AsyncGenerator[_Item, None] | None = None

    def __anext__(self) -> Coroutine[Any, Any, _Item]:
        return self.asend(None)

    async def asend(self, value: None) -> _Item:
        try:
            return await self._generator().asend(value)
        except asyncio.CancelledError:
            self._items = None
            raise

    async def athrow(self, *error: Any) -> _Item:
        return await self._generator().athrow(*error)

    async def aclose(self) -> None:
        await self._generator().aclose()

    def _generator(self) -> AsyncGenerator[_Item, None]:
        if self._items is None:
            self._deadline = self._deadline or Deadline(self._timeout)
            self._items = self._begin(self._deadline.remaining())
        return self._items


async def read_event(call: Call) -> inference_pb2.GenerateResponse | None:
    """Return the next event of a generation; None at its end.

    Raises:
        grpc.RpcError: The call failed.
    """
    response = await call.read()
    return response if isinstance(response, inference_pb2.GenerateResponse) else None


async def extract(
    client: AsyncClient,
    source: Source,
    folder: str | os.PathLike[str],
    spec: Mapping[str, Any],
    endpoints: Iterable[str],
    **options: Any,
) -> Extracted:
    """Run an extraction in this event loop; see `AsyncClient.extract`."""
    from residuum.extraction.job import job_of, run_job

    return await run_job(*job_of(client, source, folder, spec, endpoints, **options))


async def write_export(job: ExportJob, acts: Activations, place: Workplace, touch: Callable[[int], None]) -> Export:
    """Write an export in a thread. If the task is cancelled, stop the thread and wait until it has stopped."""
    # Not a task: the end of an event loop cancels all tasks, and would not wait for the thread.
    writing = asyncio.get_running_loop().run_in_executor(None, job.write, acts, place, touch)
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        job.stop()
        while not writing.done():  # because the caller removes the folder that the thread writes to
            with contextlib.suppress(asyncio.CancelledError):  # the task may be cancelled again
                await asyncio.wait([writing])
        writing.exception()  # otherwise, asyncio logs that nobody asked for it
        raise
