"""Starts both services as processes on free ports, and always stops them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residuum.rpc.credentials import TLS

ROOT = Path(__file__).resolve().parent.parent
"""The folder that contains this package. Started services run from here."""

OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
"""Arguments of `subprocess.Popen` that start a process in its own process group. One signal reaches the process and all
its children, and Ctrl-C on the terminal does not reach them.

From Python 3.11 on this is a group and not a session. Linux divides processor time among sessions first (autogroup,
sched(7)), and a session that computes all the time has kept others waiting for seconds.
"""

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0


class ServiceFailedError(RuntimeError):
    """A service exited or did not become ready. The message ends with the last lines of its log."""


@dataclass
class Service:
    """A service that runs as its own process."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    """The folder of its log (`NAME.log`) and its port file."""

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder / f"{self.name}.log"

    @property
    def endpoint(self) -> str:
        """Its address, host:port; valid once `wait_until_serving` has returned."""
        return f"127.0.0.1:{(self.folder / f'{self.name}.port').read_text().strip()}"

    def wait_until_serving(self, timeout_seconds: float, tls: TLS | None = None) -> None:
        """Wait until its health check answers SERVING.

        Args:
            timeout_seconds: How long to wait.
            tls: How to connect, if the service uses TLS. Health checks need no token.

        Raises:
            ServiceFailedError: The service exited, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._is_serving(tls):
            if self.process.poll() is not None:
                message = f"The {self.name} service exited with code {self.process.returncode}. Its log ends:"
                raise ServiceFailedError(f"{message}\n{self._log_end()}")
            if time.monotonic() > deadline:
                message = f"The {self.name} service was not ready within {timeout_seconds:.0f} s. Its log ends:"
                raise ServiceFailedError(f"{message}\n{self._log_end()}")
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """Kill it, as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask it to stop and wait; kill it if it does not stop in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Kill the whole group: vLLM's processes must not outlive the service, however it ended.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _is_serving(self, tls: TLS | None) -> bool:
        if not (self.folder / f"{self.name}.port").exists():
            return False
        endpoint = self.endpoint
        with (
            grpc.secure_channel(endpoint, tls.channel_credentials()) if tls else grpc.insecure_channel(endpoint)
        ) as channel:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)  # Any, because its type stubs lack the methods
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def start_store(folder: Path, arguments: Sequence[str] = (), *, port: int = 0, module: str = "store_svc") -> Service:
    """Start the store service, or another module that takes its flags. Its data is in `folder`/data."""
    return _start(
        "store", folder, ["-m", module, "--path", str(folder / "data"), *arguments, f"--listen=127.0.0.1:{port}"]
    )


def start_inference(folder: Path, model: str, store: str, arguments: Sequence[str] = (), *, port: int = 0) -> Service:
    """Start the inference service with a model and its stores, separated by commas ("" for none)."""
    flags = ["--model", model, *(["--store", store] if store else []), *arguments]
    return _start("inference", folder, ["-m", "inference_svc", *flags, f"--listen=127.0.0.1:{port}"])


def _start(name: str, folder: Path, arguments: Sequence[str]) -> Service:
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / f"{name}.port"
    port_file.unlink(missing_ok=True)
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments, "--port-file", str(port_file)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **OWN_GROUP,  # Ctrl-C reaches only this program, which stops the services in order
        )
    return Service(name, process, folder)


@contextmanager
def running_services(
    model: str,
    *,
    ports: tuple[int, int] = (0, 0),
    inference_arguments: Sequence[str] = (),
    store_arguments: Sequence[str] = (),
    timeout_seconds: float = 300.0,
) -> Iterator[tuple[Service, Service]]:
    """Run both services for as long as the context lasts. Yields (store, inference), both serving.

    SIGTERM ends the context as Ctrl-C does. All captures are deleted at the end.

    Args:
        model: The model to serve.
        ports: The ports of the store and of the inference service; 0 picks a free one.
        inference_arguments: Further flags of the inference service.
        store_arguments: Further flags of the store.
        timeout_seconds: How long each service may take to become ready.

    Raises:
        ServiceFailedError: A service did not become ready.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    started: list[Service] = []
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        folder = Path(scratch)
        try:
            store = start_store(folder, store_arguments, port=ports[0])
            started.append(store)
            store.wait_until_serving(timeout_seconds)
            inference = start_inference(folder, model, store.endpoint, inference_arguments, port=ports[1])
            started.append(inference)
            inference.wait_until_serving(timeout_seconds)
            yield store, inference
        finally:
            # Stop the inference service first: it still sends rows and seals to the store.
            for service in reversed(started):
                service.stop()
            signal.signal(signal.SIGTERM, previous)


def is_free(port: int) -> bool:
    """Tell whether no process listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt
