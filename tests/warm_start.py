"""Starts inference services as forks of one process that has imported vLLM already.

An import of vLLM takes 9 s of processor time, and a service needs two: its own, and that of the engine that vLLM
spawns. Except where a real start or end is tested, both are forks:

    this process ── starts ─▶ fork server, with vLLM ── forks ─▶ service ── forks ─▶ fork server ── forks ─▶ engine

The engine forks a server for its workers in the same way. All fork servers are multiprocessing's own
(`multiprocessing.forkserver`). A service forks its server before it does anything else, so the engine has nothing of
the service but its imports, as if spawned. Engine and workers are in the service's process group. A fork differs from a
real process in three ways: it has the libraries that the first fork server preloaded (LD_PRELOAD), libraries that read
variables on import have read those of the first fork server, and objects that are frozen stay excluded from garbage
collection. Otherwise vLLM includes them when an engine stops, and looks at a million imported objects twice.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import shlex
import socket
import subprocess
import sys
import threading
from multiprocessing import context, forkserver
from typing import TYPE_CHECKING, Any, NoReturn

import svc_common.launcher
from svc_common.launcher import ROOT
from svc_common.memory import importing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess
    from pathlib import Path


_starting = threading.Lock()

_PROGRAM = """
import sys
from svc_common.logs import quiet_grpc
quiet_grpc()  # before grpc is imported, as a service does
from tests.warm_start import serve
serve(*map(int, sys.argv[1:]))
"""


class Process:
    """A service's process, with the part of `subprocess.Popen` that the launcher and tests use."""

    def __init__(self, process: BaseProcess) -> None:
        """Wrap a process that has started."""
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()


def launch(module: str, arguments: Sequence[str], cwd: Path, log: Path) -> Process:
    """Start a module as `svc_common.launcher.launch_module` does, but as a fork.

    It gets the environment that this process has now.
    """
    with _starting:
        _start_server()
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, name=module, args=(module, list(arguments), cwd, log, dict(os.environ))
    )
    process.start()
    return Process(process)


start_inference = functools.partial(svc_common.launcher.start_inference, launch=launch)
"""`svc_common.launcher.start_inference` with a fork."""


def serve(listener: int, alive: int) -> None:
    """Import what a service and its engine need, then fork on request. The first fork server runs this."""
    with importing():
        import setproctitle
        import uvloop  # noqa: F401
        import vllm.v1.engine.async_llm
        import vllm.v1.engine.core  # noqa: F401
        from vllm.platforms import current_platform

        import inference_svc.server  # noqa: F401

        # Only one of them: vLLM's worker for CPUs replaces the streams of torch.cuda.
        importlib.import_module(f"inference_svc.taps.vllm.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
        _hash_compilers()
    setproctitle.getproctitle()  # it finds the place of a title only as long as the environment is the first one
    _serve_forks(listener, alive)


def _hash_compilers() -> None:
    """Hash the files of PyTorch's and Triton's compilers, half a gigabyte. An engine does so before it compiles."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    codecache.torch_key()
    if triton_compat.HAS_TRITON:
        triton_compat.triton_key()


@functools.cache
def _start_server() -> None:
    def start(*descriptors: int) -> int:
        command = [sys.executable, "-c", _PROGRAM, *map(str, descriptors)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=descriptors).pid

    _use_server(start)


def _use_server(start: Callable[[int, int], int]) -> None:
    """Make multiprocessing use a fork server. It ends when the last process that knows it has ended.

    Args:
        start: Starts one that listens on the first descriptor and reads the second, and returns its process ID.
    """
    server: Any = forkserver._forkserver  # it knows only how to exec one
    alive, server._forkserver_alive_fd = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # an address of the kernel's, without a file
        listener.listen()
        server._forkserver_address = listener.getsockname()
        server._forkserver_pid = start(listener.fileno(), alive)
    os.close(alive)


def _run(module: str, arguments: list[str], cwd: Path, log: Path, environment: dict[str, str]) -> None:
    """Run a module as `python -m` does, in this fork."""
    import setproctitle

    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(cwd)
    _keep_frozen()
    _set_environment(environment)
    _fork_instead_of_spawning()
    _follow_log_settings()
    setproctitle.setproctitle(f"python -m {module} {shlex.join(arguments)}")
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a fork ends without them


def _keep_frozen() -> None:
    """Exclude what the fork server has imported from garbage collection, also when vLLM asks to include it again.

    Objects in reference cycles among them are then never freed. Services that are started as programs free them.
    """
    gc.unfreeze = lambda: None


def _fork_instead_of_spawning() -> None:
    """Let this process fork where it would spawn."""
    _use_server(_fork_server)
    context._concrete_contexts["spawn"] = _Spawn()  # type: ignore[attr-defined]


def _fork_server(listener: int, alive: int) -> int:
    """Fork a server of forks, and return its process ID."""
    server: Any = forkserver._forkserver
    pid = os.fork()
    if not pid:
        os.close(server._forkserver_alive_fd)  # the service's end
        _serve_forks(listener, alive)
    return pid


def _serve_forks(listener: int, alive: int) -> NoReturn:
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)  # at once: what was imported has nothing to tidy up, and would complain of leaks


def _follow_log_settings() -> None:
    """Let vLLM read the settings of its logs when the service has written them. Otherwise it reads them on import."""
    import vllm.logger

    import inference_svc.logs

    configure = inference_svc.logs.configure_service_logs

    def configure_both(folder: str, level: str) -> None:
        configure(folder, level)
        vllm.logger._configure_vllm_root_logger()

    inference_svc.logs.configure_service_logs = configure_both


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:  # it read the fork server's on import
        dynamo.disable = environment.get("TORCH_COMPILE_DISABLE", "0") == "1"


class _SpawnProcess(context.ForkServerProcess):
    """An engine or a worker: a fork, with the environment that it would have if spawned."""

    def start(self) -> None:
        """Start it."""
        self._environment = dict(os.environ)
        super().start()

    def _bootstrap(self, parent_sentinel: int | None = None) -> Any:
        import vllm.logger

        _set_environment(self._environment)
        _fork_instead_of_spawning()
        vllm.logger._configure_vllm_root_logger()
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc]


class _Spawn(context.BaseContext):
    """The context "spawn" of a service or an engine."""

    _name = "spawn"
    Process = _SpawnProcess
