"""Starts both services as processes on free ports, and always stops them. If this process is killed, they end, too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.early_end import STARTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from residuum.rpc.credentials import TLS

ROOT = Path(__file__).resolve().parent.parent
"""The folder that contains this package. Started services run from here."""

LOOPBACK = "127.0.0.1"
"""The host that services listen on unless a caller chooses another one."""

NO_FILE = ("--config=",)
"""For the store: a settings file is the inference service's, also that of RESIDUUM_CONFIG."""

OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
"""Arguments of `subprocess.Popen` that start a process in its own process group. One signal reaches the process and all
its children, and Ctrl-C on the terminal does not reach them.

From Python 3.11 on this is a group and not a session. Linux divides processor time among sessions first (autogroup,
sched(7)), and a session that computes all the time has kept others waiting for seconds.
"""

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0
_SHOWN_LINES = 30


class ServiceFailedError(RuntimeError):
    """A service cannot start, has ended or did not become ready. If it ran, the message ends with lines of its log."""


class Process(Protocol):
    """The part of `subprocess.Popen` that a service's process needs."""

    @property
    def pid(self) -> int:
        """Its process ID, which is also that of its process group."""

    @property
    def returncode(self) -> int | None:
        """The exit code; None as long as no call has noticed its end."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return the exit code; raise `subprocess.TimeoutExpired` after `timeout`."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""

    def kill(self) -> None:
        """Kill it."""


class Launch(Protocol):
    """A way to start a service's process."""

    def __call__(self, module: str, arguments: Sequence[str], cwd: Path, log: Path, /) -> Process:
        """Start a module in a process group of its own.

        Args:
            module: The module to run.
            arguments: Its arguments.
            cwd: The folder to run in.
            log: An existing file, to which the process appends its output.
        """


@dataclass
class Service:
    """A service that runs as its own process."""

    name: str
    process: Process
    folder: Path
    """The folder of its log (`NAME.log`) and its port file."""
    host: str = LOOPBACK
    """The host that it listens on."""
    log_start: int = 0
    """The size of its log when it was started. Earlier services may have written to the same file."""
    stop_seconds: float = _STOP_SECONDS
    """How long it may take to stop before it is killed."""
    requires_token: bool = False
    """Whether its callers need a token, as far as its starter knows."""
    _port: str = field(default="", init=False)

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder / f"{self.name}.log"

    @property
    def endpoint(self) -> str:
        """Its address, host:port; valid once `wait_until_serving` has returned."""
        # Read once: a second start in the same folder deletes the file, before it finds that the database is in use.
        self._port = self._port or (self.folder / f"{self.name}.port").read_text().strip()
        return f"{self.host}:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    @property
    def ending(self) -> str:
        """How the process has ended, to follow its name."""
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def wait_until_serving(
        self,
        timeout_seconds: float,
        tls: TLS | None = None,
        *,
        others: Sequence[Service] = (),
        waiting: Callable[[str, float], None] | None = None,
    ) -> None:
        """Wait until the service's health check answers SERVING.

        Args:
            timeout_seconds: How long to wait.
            tls: How to connect, if the service uses TLS. Health checks need no token.
            others: Services that must run meanwhile.
            waiting: Called while it waits, with the service's name and the seconds that have passed.

        Raises:
            ServiceFailedError: The service or one of the others exited, or it was not ready in time.
        """
        started = time.monotonic()
        while not self._is_serving(tls):
            passed = time.monotonic() - started
            for service in (self, *others):
                if not service.is_running:
                    message = f"The {service.name} service {service.ending}. Its log ends:"
                    raise ServiceFailedError(f"{message}\n{service.log_end()}")
            if passed > timeout_seconds:
                message = f"The {self.name} service was not ready within {timeout_seconds:.0f} s. Its log ends:"
                raise ServiceFailedError(f"{message}\n{self.log_end()}")
            if waiting is not None:
                waiting(self.name, passed)
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
            self.process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.kill_group()

    def kill_group(self) -> None:
        """Kill the whole process group: vLLM's processes must not outlive the service, however it ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_end(self) -> str:
        """Return the last lines that it printed."""
        return self._last_lines(lambda _: True)

    def log_warnings(self) -> str:
        """Return the last lines that it printed, except log records below the level warning."""
        return self._last_lines(_is_worth_showing)

    def _last_lines(self, is_shown: Callable[[str], bool]) -> str:
        with self.log.open(errors="replace") as log:
            log.seek(self.log_start)
            return "".join(deque(filter(is_shown, log), _SHOWN_LINES)).rstrip("\n")

    def _is_serving(self, tls: TLS | None) -> bool:
        try:
            endpoint = self.endpoint
        except FileNotFoundError:
            return False
        with (
            grpc.secure_channel(endpoint, tls.channel_credentials()) if tls else grpc.insecure_channel(endpoint)
        ) as channel:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)  # Any, because its type stubs lack the methods
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def launch_module(module: str, arguments: Sequence[str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` as a process; see `Launch`."""
    # -P keeps Python from importing modules from a folder that is not ours.
    safe = ["-P"] if cwd != ROOT and sys.version_info >= (3, 11) else []
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *safe, "-m", module, *arguments],
            cwd=cwd,
            env={**os.environ, STARTER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **OWN_GROUP,  # Ctrl-C reaches only this program, which stops the services in order
        )


def start_store(
    folder: Path,
    arguments: Sequence[str] = (),
    *,
    host: str = LOOPBACK,
    port: int = 0,
    module: str = "store_svc",
) -> Service:
    """Start the store service, or another module that takes its flags. Its data is in `folder`/data."""
    flags = ["--path", str(folder / "data"), *arguments, f"--listen={host}:{port}"]
    return _start("store", folder, module, flags, ROOT, launch_module, host)


def start_inference(
    folder: Path,
    model: str,
    store: str,
    arguments: Sequence[str] = (),
    *,
    host: str = LOOPBACK,
    port: int = 0,
    module: str = "inference_svc",
    cwd: Path = ROOT,
    launch: Launch = launch_module,
) -> Service:
    """Start the inference service, or another module that takes its flags.

    Args:
        folder: The folder for its log and its port file.
        model: The model to serve, a folder or a name.
        store: Its stores, separated by commas; "" for none.
        arguments: Further flags.
        host: The host that it listens on.
        port: The port that it listens on; 0 picks a free one.
        module: The module to run.
        cwd: The folder that relative paths in the flags refer to.
        launch: Starts the process.
    """
    flags = ["--model", model, *(["--store", store] if store else []), *arguments, f"--listen={host}:{port}"]
    return _start("inference", folder, module, flags, cwd, launch, host)


def _start(
    name: str, folder: Path, module: str, arguments: Sequence[str], cwd: Path, launch: Launch, host: str
) -> Service:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ServiceFailedError(
            f"captures and logs cannot be kept in {folder}, because it is a file, or is inside one. Choose another "
            "folder."
        ) from None
    port_file = folder / f"{name}.port"
    port_file.unlink(missing_ok=True)
    log = folder / f"{name}.log"
    log.touch()
    log_start = log.stat().st_size
    process = launch(module, [*arguments, "--port-file", str(port_file)], cwd, log)
    return Service(name, process, folder, host, log_start)


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
    launch: Launch = launch_module,
    waiting: Callable[[str, float], None] | None = None,
    up: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Service, Service]]:
    """Run both services for as long as the context lasts. Yields (store, inference), both serving.

    In the main thread, SIGTERM and SIGHUP end the context as Ctrl-C does.

    Args:
        model: The model to serve, a folder or a name.
        ports: The ports of the store and of the inference service; 0 picks a free one.
        inference_arguments: Further flags of the inference service.
        store_arguments: Further flags of the store.
        timeout_seconds: How long each service may take to become ready.
        folder: Where captures and logs are kept. By default, they are deleted at the end.
        cwd: The folder that relative paths in the inference service's flags refer to.
        inference_module: The module to run as the inference service.
        launch: Starts the inference service's process; see `start_inference`.
        waiting: Called while a service starts, with its name and the seconds that have passed.
        up: Called when the start is over, successful or not.

    Raises:
        ServiceFailedError: A service did not become ready.
    """
    started: list[Service] = []
    with terminable(), tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
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
                    launch=launch,
                )
                started.append(inference)
                inference.wait_until_serving(timeout_seconds, others=[store], waiting=waiting)
            finally:
                up()
            yield store, inference
        finally:
            stop_all(started)


def stop_all(services: Sequence[Service]) -> None:
    """Stop services, the last one first. Ctrl-C kills all that are left."""
    try:
        for service in reversed(services):  # the inference service still sends rows and seals to the store
            service.stop()
    except KeyboardInterrupt:
        for service in services:
            service.kill_group()
        raise


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, the signal of a closed terminal, interrupt as Ctrl-C does. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    if previous[signal.SIGHUP] == signal.SIG_IGN:  # `nohup` has started this program
        del previous[signal.SIGHUP]
    for number in previous:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_free(port: int) -> bool:
    """Tell whether no process listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_worth_showing(line: str) -> bool:
    """Tell whether a line of a log is a warning, an error, or a text that is not a log record."""
    try:
        record = json.loads(line)
    except ValueError:
        return bool(line.strip())
    return not (isinstance(record, dict) and record.get("level") in ("debug", "info"))


def _interrupt(number: int, frame: object) -> None:
    del frame
    if number == signal.SIGHUP:  # the kernel and the shell both send it: the second one would kill the services
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
