"""Waits in a thread. `residuum._async.io` has the same functions for event loops; both are written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from residuum.v1 import inference_pb2

if TYPE_CHECKING:
    from residuum.exports.job import Export, ExportJob
    from residuum.exports.target import Workplace
    from residuum.values.activations import Activations

    class Call(Iterator[inference_pb2.GenerateResponse], Protocol):
        """What grpc returns for a stream: an iterator that can be cancelled."""

        def cancel(self) -> bool:
            """Stop the call."""
            ...


_Result = TypeVar("_Result")

sleep = time.sleep


def run_in_thread(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Return what a function returns that may wait for a moment."""
    return function(*arguments)


def read_event(call: Call) -> inference_pb2.GenerateResponse | None:
    """Return the next event of a generation; None at its end.

    Raises:
        grpc.RpcError: The call failed.
    """
    return next(call, None)


def write_export(job: ExportJob, acts: Activations, place: Workplace, touch: Callable[[int], None]) -> Export:
    """Write an export. If it is interrupted, stop the writing thread and wait until it has stopped."""
    return job.run(acts, place, touch)
