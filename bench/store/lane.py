"""Runs the path from a ring to a store, each part in a separate process. All processes end with the context."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import residuum
from bench.machine import ROOT
from bench.processes import Helper, RunFailedError, reap, running_store
from bench.store.captures import Shape
from residuum.rpc.channels import open_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from svc_common.launcher import Service

_FLAGS: dict[bool, list[str]] = {True: [], False: ["--shared-memory", "off"]}

_PURGE_SECONDS = 120.0
_POLL_SECONDS = 0.02


_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Fed:
    """The times at which rows were under way, on the monotonic clock."""

    started: float
    ended: float
    offsets: tuple[int, ...]
    """The offsets in the ring of the first capture's blocks."""


class Lane:
    """A store, a feeder with its ring, and the shippers between them."""

    def __init__(self, store: Service, feeder: Helper, *, shared_memory: bool) -> None:
        self.endpoint = store.endpoint
        self.store_pid = store.process.pid
        self._feeder = feeder
        self._channel = open_channel(self.endpoint)
        self.stub = store_pb2_grpc.StoreServiceStub(self._channel)
        self.client = residuum.Client(self.endpoint, store=self.endpoint, shared_memory=shared_memory)

    def open(self, captures: Sequence[str], shape: Shape) -> None:
        """Open captures."""
        for capture_id in captures:
            self.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=shape.description(capture_id)))

    def start_feeding(self, captures: Sequence[str], shape: Shape) -> None:
        """Start to pass the rows of captures to the shippers."""
        self._feeder.ask({"captures": list(captures), "shape": asdict(shape)})

    def fed(self) -> Fed:
        """Wait until all these rows are acknowledged."""
        answer = self._feeder.read()
        return Fed(answer["started"], answer["ended"], tuple(answer["offsets"]))

    def feed(self, captures: Sequence[str], shape: Shape) -> Fed:
        """Pass the rows of captures to the shippers, and wait until all are acknowledged."""
        self.start_feeding(captures, shape)
        return self.fed()

    def seal(self, captures: Sequence[str], shape: Shape) -> None:
        """Seal captures, and fail if a row is missing."""
        for capture_id in captures:
            manifest = self.stub.SealCapture(shape.seal(capture_id)).manifest
            if manifest.state != capture_pb2.CAPTURE_STATE_COMPLETE or manifest.num_rows != shape.num_rows:
                state = capture_pb2.CaptureState.Name(manifest.state)
                raise RunFailedError(f"{capture_id} is {state} with {manifest.num_rows} of {shape.num_rows} rows")

    def delete(self, captures: Sequence[str]) -> None:
        """Delete captures, and wait until their space is free."""
        for capture_id in captures:
            self.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=capture_id))
        end = time.monotonic() + _PURGE_SECONDS
        while self.stub.GetStats(store_pb2.GetStatsRequest()).num_chunks:
            if time.monotonic() > end:
                raise RunFailedError("the store did not free the space of deleted captures in time")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self._channel.close()


@contextmanager
def running_lane(
    folder: Path,
    *,
    shippers: int,
    ring_mib: int,
    max_gib: int,
    store_module: str = "store_svc",
    shared_memory: bool = True,
    shards: int | None = None,
) -> Iterator[Lane]:
    """Run a store in an empty folder, a ring and its shippers.

    Without `shared_memory`, rows travel in messages. Without `shards`, the store has its default.
    """
    folder.mkdir(parents=True)
    control = folder / "worker"
    with ExitStack() as stack:
        flags = ["--max-bytes", f"{max_gib}GiB", *_FLAGS[shared_memory]]
        flags += ["--shards", str(shards)] if shards is not None else []
        store = stack.enter_context(running_store(folder, flags, store_module))
        feeder = Helper("bench.store.feeder", [str(control), str(ring_mib)], folder / "feeder.log")
        stack.callback(feeder.stop)
        for number in range(shippers):
            stack.enter_context(_running_shipper(folder, number, str(control), store))
        feeder.call({"shippers": shippers})
        lane = Lane(store, feeder, shared_memory=shared_memory)
        stack.callback(lane.close)
        yield lane


@contextmanager
def _running_shipper(folder: Path, number: int, control: str, store: Service) -> Iterator[None]:
    with (folder / f"shipper-{number}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "inference_svc.shipping", "--control", control, "--store", store.endpoint),
                *("--parent-pid", str(os.getpid())),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        reap(process)


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def running_peer(kind: str, folder: Path) -> Iterator[int]:
    """Run a peer of `bench.store.peers`; yield its port."""
    peer = Helper("bench.store.peers", [kind], folder / f"{kind}.log")
    try:
        yield int(peer.first)
    finally:
        peer.stop()
