"""The actor that runs an inference service, and a store unless one is given, on its node."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import ray
from ray import get_runtime_context
from ray.util import get_node_ip_address

_PROGRAM = """
import os
if os.fork():
    os._exit(0)
os.setsid()
import sys
try:
    from residuum.serving import installed_server
    server = installed_server()
except (ImportError, RuntimeError) as error:
    sys.exit(str(error))
sys.exit(server.serve_for_actor())
"""
"""Runs the services. It leaves the processes of the actor, because Ray kills those before they can stop the services.
It ends the services when its input ends."""

_ERROR_BYTES = 4000
"""The most bytes of the program's errors that are shown."""

_STOP_SECONDS = 60.0
_RESTART_SECONDS = 5.0
"""The pause before an actor whose services did not start again is started once more."""


@dataclass(frozen=True)
class ServicePlan:
    """What the actor runs."""

    model: str
    """The model to serve, a folder on the node or a name."""
    store: str
    """The stores of the service, separated by commas; "" for one on the actor's node."""
    token: str = field(repr=False)
    """The token that the services require."""
    python: str | None
    """The Python that has residuum-server; None for that of the actor."""
    flags: tuple[str, ...]
    """Further flags of the inference service."""


class Start(NamedTuple):
    """How a start ended."""

    address: str
    """host:port of the inference service; "" if it did not start."""
    failure: str
    """Why it did not start."""
    node: str
    """The node's address."""


class ServiceActor:
    """An inference service, and a store unless one is given. If either ends, so does the actor, and Ray restarts it."""

    def __init__(self, plan: ServicePlan) -> None:
        self._host: str = get_node_ip_address()
        self._is_restart = get_runtime_context().was_current_actor_reconstructed
        self._start = Start("", "", self._host)
        self._has_started = threading.Event()
        self._is_stopping = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the actor
        self._process: subprocess.Popen[bytes] | None = None
        self._work = threading.Thread(target=self._run, args=(plan,), daemon=True)
        self._work.start()

    def node(self) -> str:
        """Return the node's address. It answers once the actor has a place in the cluster."""
        return self._host

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator] # Ray has no types
    def started(self) -> Start:
        """Wait until the service serves or has failed."""
        self._has_started.wait()
        return self._start

    def address(self) -> str:
        """Return the service's address; "" if it does not serve yet, or no longer."""
        return self._start.address

    def stop(self) -> None:
        """Stop the services, and wait until they have ended."""
        self._is_stopping = True
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.write(b"stop\n")
        self._work.join(_STOP_SECONDS)

    def _run(self, plan: ServicePlan) -> None:
        """Serve, and end the actor when the services have ended."""
        python = plan.python or sys.executable
        try:
            failure = self._serve(python, plan)
        except OSError as error:
            failure = f"{python} cannot be started: {error}. Give the path of a Python that has residuum-server."
        except Exception as error:  # noqa: BLE001 - whoever waits for the start must learn of it
            failure = f"{type(error).__name__}: {error}"
        if self._is_stopping:
            return
        has_served = self._has_started.is_set()
        if self._is_restart or has_served:
            # Ray shows this in the actor's log, and in the program's output.
            print(f"The services on {self._host} have ended: {failure}", file=sys.stderr, flush=True)  # noqa: T201
            if not has_served:
                time.sleep(_RESTART_SECONDS)
            os._exit(1)  # only an actor that crashes is restarted
        self._start = self._start._replace(failure=failure)
        self._has_started.set()

    def _serve(self, python: str, plan: ServicePlan) -> str:
        """Run the program until it has ended, and return why it has."""
        request = {
            "model": plan.model, "host": f"[{self._host}]" if ":" in self._host else self._host, "token": plan.token,
            "store": plan.store, "flags": plan.flags,
        }  # fmt: skip
        with subprocess.Popen(
            [python, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        ) as self._process:
            stdin, stdout = self._process.stdin, self._process.stdout
            if stdin is None or stdout is None:
                raise RuntimeError("the program has no pipes")
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its errors say why
                stdin.write(json.dumps(request).encode() + b"\n")
            for line in stdout:
                answer = json.loads(line)
                if "failed" in answer:
                    return str(answer["failed"])
                self._start = self._start._replace(address=answer["inference"])
                self._has_started.set()
        return f"{python} has ended: {self._last_errors()}"

    def _last_errors(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _ERROR_BYTES))
        return self._errors.read().decode(errors="replace").strip()
