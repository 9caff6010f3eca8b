"""Starts `vllm serve` without and with residuum's taps, each with an engine of its own and the same arguments."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from bench.processes import RunFailedError, end_of, reap
from svc_common.launcher import OWN_GROUP

STOCK, TAPS, CAPTURES = "vllm serve", "vllm serve, taps", "vllm serve, captures"
"""The ways through HTTP: stock `vllm serve`; one with taps whose requests ask for nothing; the same whose requests
capture."""

_START_SECONDS = 540.0
_POLL_SECONDS = 0.2
_PLUGIN = "inference_svc.vllm_serve.plugin:register"


@dataclass(frozen=True)
class HttpServer:
    """A `vllm serve` in a process of its own."""

    kind: str
    """`stock` or `taps`, as `bench.service.vllm_server` names them."""
    process: subprocess.Popen[bytes]
    log: Path
    held_port: socket.socket
    """Holds the port until the server is stopped."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.held_port.getsockname()[1]}"

    def wait_until_serving(self) -> None:
        """Wait until it answers.

        Raises:
            RunFailedError: It ended, or took too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RunFailedError(f"vllm serve ({self.kind}) does not serve\n{end_of(self.log)}")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop it, and kill what it leaves."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        reap(self.process)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.held_port.close()

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:  # noqa: S310 - http
            return bool(answer.status == 200)  # noqa: PLR2004 - OK
        return False


@contextmanager
def starting_servers(
    arguments: Mapping[str, Any], folder: Path, environment: Mapping[str, str], store: str
) -> Iterator[dict[str, HttpServer]]:
    """Start both servers, and do not wait: other engines may start meanwhile. The context stops them.

    Args:
        arguments: vLLM's arguments, by the names of AsyncEngineArgs.
        folder: The folder of their logs.
        environment: The environment of both.
        store: The address of the store for captures; "" for none.
    """
    taps = {**environment, **({"RESIDUUM_STORE": store} if store else {}), **plugin_environment(folder, environment)}
    servers = {}
    try:
        for kind, its in (("stock", {**environment, "VLLM_PLUGINS": ""}), ("taps", taps)):
            servers[kind] = _start(kind, arguments, folder / f"vllm-serve-{kind}.log", its)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def _start(kind: str, arguments: Mapping[str, Any], log: Path, environment: Mapping[str, str]) -> HttpServer:
    held_port = _hold_port()
    flags = [*serve_flags(arguments), "--host=127.0.0.1", f"--port={held_port.getsockname()[1]}"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.service.vllm_server", kind, *flags],
            cwd=ROOT,
            env={"VLLM_NO_USAGE_STATS": "1", **environment},
            stdin=subprocess.PIPE,  # ends with this process, and the server with it
            stdout=out,
            stderr=out,
            **OWN_GROUP,
        )
    return HttpServer(kind, process, log, held_port)


def serve_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the flags of `vllm serve` for arguments of AsyncEngineArgs. Neither server logs or counts requests."""
    flags = [str(arguments["model"]), "--served-model-name=bench", "--disable-uvicorn-access-log"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif name != "model":
            flags.append(f"--{flag}={json.dumps(value) if isinstance(value, (dict, list)) else value}")
    return flags


def plugin_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which vLLM finds residuum's plugin, also where residuum runs from its checkout."""
    if any(plugin.value == _PLUGIN for plugin in entry_points(group="vllm.general_plugins")):
        return {}
    metadata = folder / "metadata"
    (info := metadata / "residuum_bench-0.dist-info").mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: residuum-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nresiduum = {_PLUGIN}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(metadata), environment.get("PYTHONPATH")]))}


def _hold_port() -> socket.socket:
    """Return a socket that holds a free port on the loopback interface.

    It does not listen. So a server that sets SO_REUSEADDR, as vLLM's does, can listen on the port. The kernel chooses
    it for nobody else.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
