"""Starting both services as their own processes, on free ports, and stopping them whatever happens."""

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
"""The folder that this package lies in: services that are started are those that lie beside it."""

OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
"""What makes `subprocess.Popen` start a process that leads a group: it and all that it starts can be signalled at once,
and Ctrl-C on the terminal does not reach them.

Not a session, where Python can do without: Linux deals cores out to sessions before it looks at processes (autogroup,
sched(7)), and one that computes all the time has been seen to keep others waiting for seconds.
"""

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0


class ServiceFailedError(RuntimeError):
    """A service ended, or did not come up. The message ends with the end of its log."""


@dataclass
class Service:
    """A service that runs as a process of its own."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    """Where its log (`NAME.log`) and its port file lie."""

    @property
    def log(self) -> Path:
        """The file that has what it printed."""
        return self.folder / f"{self.name}.log"

    @property
    def endpoint(self) -> str:
        """host:port, once `wait_until_serving` has returned."""
        return f"127.0.0.1:{(self.folder / f'{self.name}.port').read_text().strip()}"

    def wait_until_serving(self, timeout_seconds: float, tls: TLS | None = None) -> None:
        """Wait until its health says SERVING; with TLS, as it is reached. Health takes no token.

        Raises:
            ServiceFailedError: It ended before that, or took too long.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._is_serving(tls):
            if self.process.poll() is not None:
                raise ServiceFailedError(f"{self.name} ended with code {self.process.returncode}\n{self._log_end()}")
            if time.monotonic() > deadline:
                raise ServiceFailedError(f"{self.name} was not ready in {timeout_seconds:.0f} s\n{self._log_end()}")
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask it to stop, and wait; end it by force if it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # The group: vLLM's own processes must not outlive the service, however that ended.
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
                stub: Any = health_pb2_grpc.HealthStub(channel)  # its types name no method
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def start_store(folder: Path, arguments: Sequence[str] = (), *, port: int = 0, module: str = "store_svc") -> Service:
    """Start the store service, or a module that takes its flags; its data lie in `folder`/data."""
    return _start(
        "store", folder, ["-m", module, "--path", str(folder / "data"), *arguments, f"--listen=127.0.0.1:{port}"]
    )


def start_inference(folder: Path, model: str, store: str, arguments: Sequence[str] = (), *, port: int = 0) -> Service:
    """Start the inference service with a model and its store, or stores between commas ("" for none)."""
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
            **OWN_GROUP,  # Ctrl-C reaches this program alone, which stops them in order
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
    """Run both services for as long as the context lasts; yields (store, inference), both SERVING.

    `ports` are those of the store and the inference service; 0 takes any free one. SIGTERM ends the context as Ctrl-C
    does. What was captured is deleted at the end.

    Raises:
        ServiceFailedError: One of them did not come up.
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
            # The inference service first: it has rows and seals to hand to the store.
            for service in reversed(started):
                service.stop()
            signal.signal(signal.SIGTERM, previous)


def is_free(port: int) -> bool:
    """Tell whether nobody listens on a port of this machine."""
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
