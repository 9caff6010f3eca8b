"""Real stores, shippers and rings for fault tests, and rows whose bytes are known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from inference_svc.shipping.ring import Extent
from inference_svc.shipping.supervisor import ShipperSupervisor
from inference_svc.shipping.worker.producer import Filled, RingProducer
from residuum.rpc.channels import open_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from svc_common.launcher import OWN_GROUP
from tests import ports

DEADLINE = 60.0
"""A generous timeout for expected events, so that a busy machine does not fail tests."""

LAYERS = (0, 1, 2, 3)
BLOCK = 32
"""Positions that are published together, as by the worker."""

POST = capture_pb2.SITE_RESID_POST
COMPLETE, INCOMPLETE = capture_pb2.CAPTURE_STATE_COMPLETE, capture_pb2.CAPTURE_STATE_INCOMPLETE

_ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'client'}"}

Row = tuple[int, int]
"""Layer and position."""


@dataclass(frozen=True)
class Capture:
    """A capture of a prompt. Each row's bytes are a function of its capture and cell, and no two rows are equal."""

    name: str
    length: int
    """Number of expected positions."""
    width: int = 64
    """Number of float32 elements of a row."""

    def values(self, layers: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Return rows, [layers, positions, width], as four bytes per element."""
        layer, position, element = np.ix_(layers, positions, range(self.width))
        mixed = (layer * 1_000_003 + position * 7919 + element) * 2_654_435_761 + zlib.crc32(self.name.encode())
        return mixed.astype(np.uint32)

    def header(self, positions: Sequence[int], layers: Sequence[int] = LAYERS) -> capture_pb2.ChunkHeader:
        """Return the header of some of its rows."""
        return capture_pb2.ChunkHeader(
            site=POST,
            layers=layers,
            positions=positions,
            dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            width=self.width,
            encoding=capture_pb2.ENCODING_RAW,
        )

    def blocks(self) -> Iterator[range]:
        """Yield its positions, one block at a time."""
        for start in range(0, self.length, BLOCK):
            yield range(start, min(start + BLOCK, self.length))

    def rows(self) -> set[Row]:
        """Return all its rows."""
        return {(layer, position) for layer in LAYERS for position in range(self.length)}


@dataclass
class Found:
    """A store's rows of a capture."""

    manifest: capture_pb2.CaptureManifest
    times: Counter[Row] = field(default_factory=Counter)
    """How often a read returned each row."""
    wrong: int = 0
    """Rows whose bytes differ from the published ones."""

    @property
    def doubled(self) -> int:
        """Rows that a read returned more than once."""
        return sum(times > 1 for times in self.times.values())


class Store:
    """A store service in its own process. It can be killed, and restarted on the same port."""

    def __init__(self, folder: Path, *flags: str, before: Sequence[str] = ()) -> None:
        self.folder = folder
        self.flags = flags
        self.port = ports.reserve()
        self.process: subprocess.Popen[bytes] | None = None
        self._port_file, self.log = folder / "store.port", folder / "store.log"
        self.channel: grpc.Channel | None = None
        self.start(before=before)
        self.channel = open_channel(self.endpoint)
        self.stub = store_pb2_grpc.StoreServiceStub(self.channel)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True, before: Sequence[str] = ()) -> None:
        """Start the process, always on the same port. `before` is a command prefix."""
        self._port_file.unlink(missing_ok=True)
        command = [*before, sys.executable, "-m", "store_svc", "--listen", self.endpoint]
        command += ["--path", str(self.folder / "data"), "--port-file", str(self._port_file), *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=ENVIRONMENT, **OWN_GROUP)
        if wait:
            self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Wait until the store is serving, which writes the port file."""
        process = self.process
        assert process is not None
        end = time.monotonic() + DEADLINE
        while not self._port_file.exists():
            assert time.monotonic() < end, "the store did not start in time"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
            assert process.returncode is None, f"the store ended with {process.returncode}\n{self.log.read_text()}"

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Suspend it for a while, as on a machine that swaps. Its connections stay open."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """Stop it with SIGTERM. Return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.kill()

    def call(self, method: str, request: object) -> Any:
        """Retry a call until it is answered, even if the store restarts several times."""
        end = time.monotonic() + DEADLINE
        while True:
            try:
                return getattr(self.stub, method)(request, timeout=DEADLINE, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise

    def open(self, capture: Capture) -> None:
        description = capture_pb2.CaptureDescription(
            capture_id=capture.name,
            model="tiny",
            hidden_size=capture.width,
            num_layers=len(LAYERS),
            dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            spec=capture_pb2.CaptureSpec(sites=[POST], encoding=capture_pb2.ENCODING_RAW),
            prompt_token_ids=range(capture.length),
            num_sequences=1,
        )
        description.spec.layers.list.layers.extend(LAYERS)
        self.call("OpenCapture", store_pb2.OpenCaptureRequest(description=description))

    def seal(self, capture: Capture) -> None:
        """Seal as COMPLETE with one generated token, so that exactly the prompt's rows are expected."""
        outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1], finish_reason="length")
        request = store_pb2.SealCaptureRequest(capture_id=capture.name, sequences=[outcome], outcome=COMPLETE)
        self.call("SealCapture", request)

    def manifest(self, capture: Capture, *, wait: bool = False) -> capture_pb2.CaptureManifest:
        request = store_pb2.GetCaptureRequest(capture_id=capture.name)
        if wait:
            request.wait.FromSeconds(int(DEADLINE))
        return self.call("GetCapture", request).manifest

    def delete(self, capture: Capture) -> None:
        """Delete a capture. After a lost answer, the retry may find that it no longer exists."""
        try:
            self.call("DeleteCapture", store_pb2.DeleteCaptureRequest(capture_id=capture.name))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise

    def read(self, capture: Capture) -> Found:
        """Read everything. Start over if the store disconnects during the read."""
        end = time.monotonic() + DEADLINE
        request = store_pb2.ReadChunksRequest(capture_id=capture.name)
        while True:
            try:
                return collect(capture, self.stub.ReadChunks(request, timeout=DEADLINE, wait_for_ready=True))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise

    def seal_and_check(self, capture: Capture) -> None:
        """Seal. The capture must end COMPLETE and have every row exactly once, as published."""
        self.seal(capture)
        manifest = self.manifest(capture, wait=True)
        assert manifest.state == COMPLETE, manifest
        found = self.read(capture)
        assert (found.doubled, found.wrong) == (0, 0)
        assert set(found.times) == capture.rows()
        assert manifest.num_rows == len(capture.rows())


def collect(capture: Capture, answers: Iterator[store_pb2.ReadChunksResponse]) -> Found:
    """Compare the rows of a read with the published ones."""
    found = Found(capture_pb2.CaptureManifest())
    for answer in answers:
        if answer.HasField("manifest"):
            found.manifest = answer.manifest
            continue
        header = answer.chunk.header
        values = np.frombuffer(answer.chunk.payload, "<u4").reshape(len(header.layers), len(header.positions), -1)
        same = (values == capture.values(header.layers, header.positions)).all(axis=2)
        found.wrong += int((~same).sum())
        found.times.update((layer, position) for layer in header.layers for position in header.positions)
    return found


def present_rows(manifest: capture_pb2.CaptureManifest) -> set[Row]:
    """Return the rows that a manifest lists as present."""
    return named_rows(manifest.present)


def named_rows(row_sets: Sequence[capture_pb2.RowSet]) -> set[Row]:
    return {
        (layer, position)
        for item in row_sets
        for layer in item.layers
        for run in item.positions
        for position in range(run.first, run.last + 1)
    }


class Ring(RingProducer):
    """A worker's ring that remembers returned extents, whose rows the store has acknowledged."""

    def __init__(self, control_path: Path, *, ring_bytes: int, stores: Sequence[str] = ("",)) -> None:
        super().__init__(control_path, ring_bytes=ring_bytes, stores=stores)
        self._acked: dict[str, set[Row]] = {}
        self._published_rows: dict[Extent, tuple[str, set[Row]]] = {}
        self._acks = threading.Condition()
        self.num_acked = 0
        """Number of returned extents."""

    def publish_rows(self, capture: Capture, positions: Sequence[int]) -> None:
        """Publish a block, waiting for room as the policy WAIT does."""
        header = capture.header(positions)
        payload = capture.values(LAYERS, positions).tobytes()
        extent = self.acquire(len(payload), block=True, capture_id=capture.name)
        assert extent is not None
        self.view(extent)[:] = np.frombuffer(payload, np.uint8)
        self.publish(extent, capture.name, [header])

    def acked(self, capture: Capture) -> set[Row]:
        """Return the acknowledged rows of a capture."""
        with self._acks:
            return set(self._acked.get(capture.name, ()))

    def forget(self, capture: Capture) -> None:
        """Forget a capture."""
        with self._acks:
            self._acked.pop(capture.name, None)

    def wait_for_acks(self, more: int) -> bool:
        """Wait until this many more extents are returned. Return False on a timeout."""
        with self._acks:
            enough = self.num_acked + more
            return self._acks.wait_for(lambda: self.num_acked >= enough, DEADLINE)

    def publish_all(self, filled: Sequence[Filled]) -> None:
        for extent, capture_id, serialised, _ in filled:
            headers = [capture_pb2.ChunkHeader.FromString(header) for header in serialised]
            rows = {(layer, at) for header in headers for layer in header.layers for at in header.positions}
            self._published_rows[extent] = capture_id, rows
        super().publish_all(filled)

    def _take_back(self, tickets: Sequence[int]) -> None:
        with self._acks:
            for ticket in tickets:
                if extent := self._handed_over.get(ticket):  # otherwise it is a loss report
                    capture_id, rows = self._published_rows.pop(extent)
                    self._acked.setdefault(capture_id, set()).update(rows)
                    self.num_acked += 1
            self._acks.notify_all()
        super()._take_back(tickets)


class Shippers:
    """Shippers under the inference service's supervisor, which runs in a thread with its own event loop.

    They inherit this process's environment, whose PYTHONPATH must be that of ENVIRONMENT.
    """

    def __init__(self, control_path: Path, stores: str | Sequence[str], count: int = 1, *arguments: str) -> None:
        self._supervisor = ShipperSupervisor([control_path], stores, count, arguments=arguments)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="supervisor")
        self._thread.start()
        self._run(self._supervisor.start())

    def pids(self) -> list[int]:
        """Return the running shippers."""
        return [status.pid for status in self._supervisor.status() if status.pid is not None]

    @property
    def restarts(self) -> int:
        return sum(status.restarts for status in self._supervisor.status())

    def kill(self, pid: int) -> bool:
        """Kill a shipper. Return False if it had already ended."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def stop(self, grace_seconds: float = DEADLINE) -> None:
        if self._thread.is_alive():
            self._run(self._supervisor.stop(grace_seconds))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * DEADLINE)
