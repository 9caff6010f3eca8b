"""Starting both services as their own processes, on free ports, and stopping them whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None

    def wait_until_serving(
        self, timeout_seconds: float, tls: TLS | None = None, *, waiting: Callable[[str, float], None] | None = None
    ) -> None:
        """Wait until its health says SERVING; with TLS, as it is reached. Health takes no token.

        Args:
            timeout_seconds: For how long.
            tls: How it is reached.
            waiting: Is called meanwhile, with its name and the seconds that have passed.

        Raises:
            ServiceFailedError: It ended before that, or took too long.
        """
        started = time.monotonic()
        while not self._is_serving(tls):
            passed = time.monotonic() - started
            if not self.is_running:
                raise ServiceFailedError(f"{self.name} ended with code {self.process.returncode}\n{self.log_end()}")
            if passed > timeout_seconds:
                raise ServiceFailedError(f"{self.name} was not ready in {timeout_seconds:.0f} s\n{self.log_end()}")
            if waiting is not None:
                waiting(self.name, passed)
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
        self.kill_group()

    def kill_group(self) -> None:
        """End all that is left of it by force: vLLM's own processes must not outlive it, however it ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_end(self) -> str:
        """Return the last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

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


def start_store(folder: Path, arguments: Sequence[str] = (), *, port: int = 0, module: str = "store_svc") -> Service:
    """Start the store service, or a module that takes its flags; its data lie in `folder`/data."""
    flags = ["--path", str(folder / "data"), *arguments, f"--listen=127.0.0.1:{port}"]
    return _start("store", folder, module, flags)


def start_inference(
    folder: Path,
    model: str,
    store: str,
    arguments: Sequence[str] = (),
    *,
    port: int = 0,
    module: str = "inference_svc",
    cwd: Path = ROOT,
) -> Service:
    """Start the inference service, or a module that takes its flags.

    Args:
        folder: Where its log and its port file are written.
        model: The model's folder or name.
        store: Its store, or stores between commas; "" for none.
        arguments: Further flags.
        port: The one it listens on; 0 takes any free one.
        module: The module.
        cwd: The folder from which relative paths in the flags are meant.
    """
    flags = ["--model", model, *(["--store", store] if store else []), *arguments, f"--listen=127.0.0.1:{port}"]
    return _start("inference", folder, module, flags, cwd)


def _start(name: str, folder: Path, module: str, arguments: Sequence[str], cwd: Path = ROOT) -> Service:
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / f"{name}.port"
    port_file.unlink(missing_ok=True)
    # In a folder of somebody else's, its files are no modules of ours.
    safe = ["-P"] if cwd != ROOT and sys.version_info >= (3, 11) else []
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *safe, "-m", module, *arguments, "--port-file", str(port_file)],
            cwd=cwd,
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
    folder: Path | None = None,
    cwd: Path = ROOT,
    inference_module: str = "inference_svc",
    waiting: Callable[[str, float], None] | None = None,
    up: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Service, Service]]:
    """Run both services for as long as the context lasts; yields (store, inference), both SERVING.

    SIGTERM ends the context as Ctrl-C does, if it is the main thread's.

    Args:
        model: The model's folder or name.
        ports: Those of the store and the inference service; 0 takes any free one.
        inference_arguments: Further flags of the inference service.
        store_arguments: Further flags of the store.
        timeout_seconds: How long each may take to start.
        folder: Where captures and logs are kept; by default they are deleted at the end.
        cwd: The folder from which relative paths in the inference service's flags are meant.
        inference_module: What is started as the inference service.
        waiting: Is called while one starts, with its name and the seconds that have passed.
        up: Is called when that is over, well or not.

    Raises:
        ServiceFailedError: One of them did not come up.
    """
    started: list[Service] = []
    with _terminable(), tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        folder = folder or Path(scratch)
        try:
            try:
                started.append(store := start_store(folder, store_arguments, port=ports[0]))
                store.wait_until_serving(timeout_seconds, waiting=waiting)
                inference = start_inference(
                    folder,
                    model,
                    store.endpoint,
                    inference_arguments,
                    port=ports[1],
                    module=inference_module,
                    cwd=cwd,
                )
                started.append(inference)
                inference.wait_until_serving(timeout_seconds, waiting=waiting)
            finally:
                up()
            yield store, inference
        finally:
            _stop_all(started)


def _stop_all(services: Sequence[Service]) -> None:
    """Stop services in order, the last one first; at once, if whoever waits interrupts it."""
    try:
        for service in reversed(services):  # the inference service has rows and seals to hand to the store
            service.stop()
    except KeyboardInterrupt:
        for service in services:
            service.kill_group()
        raise


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, where that can be had."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
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
