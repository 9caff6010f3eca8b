"""Measuring in a process of its own: a job goes in and a result comes out, both as JSON; nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import ROOT
from svc_common.launcher import OWN_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping

_RUN_SECONDS = 1800.0
_LOG_LINES = 40
_GROUP_SECONDS = 3.0
_POLL_SECONDS = 0.05


class RunFailedError(RuntimeError):
    """A run failed. The message ends with the end of its log."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """All that it printed."""


def _wait_for_group(group: int) -> None:
    """Wait until the last process of a group has gone, if that is soon: it removes the others' shared memory."""
    deadline = time.monotonic() + _GROUP_SECONDS
    while _has_members(group) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _has_members(group: int) -> bool:
    """Tell whether any process of a group has not ended. Ended ones may stay, if nobody waits for them."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has gone meanwhile
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def run_child(
    module: str,
    job: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    what: str,
    seconds: float = _RUN_SECONDS,
) -> Any:
    """Run a module's `main` with JOB.json RESULT.json as arguments, and return what it wrote.

    Args:
        module: The program.
        job: What it is told.
        folder: Where its files and its log go.
        environment: Its environment, all of it.
        what: What it measures, for the message if it fails.
        seconds: What it may take.

    Raises:
        RunFailedError: It failed, or took too long.
    """
    job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "run.log"))
    result_file.unlink(missing_ok=True)
    job_file.write_text(json.dumps(job))
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.child", module, str(job_file), str(result_file)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **OWN_GROUP,  # so that it and vLLM's processes can be ended together
        )
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        # Whatever is left, at whatever point this was interrupted: a run has nothing worth a graceful end. Shippers
        # have groups of their own, and go when their parent has gone.
        try:
            if process.returncode == 0:
                _wait_for_group(process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or not result_file.exists():
        text = log_file.read_text(errors="replace")
        end = "\n".join(text.splitlines()[-_LOG_LINES:])
        how = "took too long" if status is None else f"ended with code {status}"
        raise RunFailedError(f"{what}: {how}\n{end}", text)
    return json.loads(result_file.read_text())
