"""Starts the processes of benchmarks: children that measure and return a result, helpers that answer lines, stores."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from bench.machine import ROOT
from bench.memory import descendants
from svc_common.launcher import OWN_GROUP, Service, ServiceFailedError, start_store

_RUN_SECONDS = 1800.0
_STORE_SECONDS = 60.0
_STOP_SECONDS = 20.0
_GROUP_SECONDS = 3.0
_POLL_SECONDS = 0.05
_LOG_LINES = 40
_LOG_ERRORS = 5
_ERROR = re.compile(r"\b\w+(Error|Exception): ")
_TRACKER = b"multiprocessing.resource_tracker"
"""Python's process that removes leaked shared memory."""


class RunFailedError(RuntimeError):
    """A run failed. The message ends with the last lines of its log."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """The full log of the run."""


@contextmanager
def measuring() -> Iterator[None]:
    """Make SIGTERM act like Ctrl-C, and exit with the reason if a run fails."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (RunFailedError, ServiceFailedError) as error:
        sys.exit(f"BENCH FAILED: {error}")
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_child(
    module: str,
    job: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    what: str,
    seconds: float = _RUN_SECONDS,
) -> Any:
    """Run a module's `main` with JOB.json RESULT.json as arguments, and return its result.

    Args:
        module: The module.
        job: The content of JOB.json.
        folder: The folder of its files and its log.
        environment: Its complete environment.
        what: A description of the run, for the error message.
        seconds: The timeout.

    Raises:
        RunFailedError: The process failed, wrote no result, or took too long.
    """
    job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "run.log"))
    result_file.unlink(missing_ok=True)
    job_file.write_text(json.dumps(job))
    process = start_child([module, str(job_file), str(result_file)], log_file, environment)
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        # Kill what is left, also after an interrupt: a run has no state worth a graceful end. Shippers have their own
        # groups, and end when their parent has ended.
        try:
            if process.returncode == 0:
                _wait_for_group(process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or not result_file.exists():
        how = "took too long" if status is None else f"ended with code {status}"
        raise RunFailedError(f"{what}: {how}\n{end_of(log_file)}", log_file.read_text(errors="replace"))
    return json.loads(result_file.read_text())


def start_child(arguments: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `bench.child` in a process group of its own, so that it and vLLM's processes can be killed together."""
    with log_file.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.child", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **OWN_GROUP,
        )


def hand_over(file: Path, result: Any) -> NoReturn:
    """Write a result as JSON, then kill this process and all its descendants. `run_child` waits for the result.

    A graceful end is slow, because three processes with vLLM's modules free every object one after the other, and it
    saves nothing. Only the tracker of shared memory survives until it has removed leaked segments.
    """
    file.write_text(json.dumps(result))
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has ended
            if _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Helper:
    """A process `python -m MODULE ARGUMENTS` that answers lines of JSON and ends when its standard input ends."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, and wait for its first line. Its log goes to a file, or to this process's stderr."""
        self._name = module.rpartition(".")[2]
        self._log = log
        with (log or Path(os.devnull)).open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file if log else None,
                env=environment,
                text=True,
            )
        try:
            self.first = self.read()
        except BaseException:
            self.stop()
            raise

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a line."""
        pipe = self._pipe(self.process.stdin)
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except OSError as error:
            raise self._failed("has ended") from error

    def read(self) -> Any:
        """Return the next answer."""
        line = self._pipe(self.process.stdout).readline()
        if not line:
            raise self._failed("has ended")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise self._failed(f"failed: {answer['error']}")
        return answer

    def call(self, request: Mapping[str, Any]) -> Any:
        """Send a line, and return the answer."""
        self.ask(request)
        return self.read()

    def stop(self) -> None:
        """Stop the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                self._pipe(pipe).close()
        reap(self.process)

    def _failed(self, how: str) -> RunFailedError:
        return RunFailedError(f"{self._name} {how}\n{end_of(self._log) if self._log else 'The log above says why.'}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None  # noqa: S101 - both are pipes
        return pipe


def answer_lines(first: Any, answer: Any) -> None:
    """Run as a `Helper`: print a first line, then answer each line of standard input until it ends."""
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


@contextmanager
def running_store(folder: Path, arguments: Sequence[str] = (), module: str = "store_svc") -> Iterator[Service]:
    """Run a store with its data in a folder. The context begins when it serves."""
    store = start_store(folder, arguments, module=module)
    try:
        store.wait_until_serving(_STORE_SECONDS)
        yield store
    finally:
        store.stop()


def reap(process: subprocess.Popen[Any]) -> None:
    """Wait for a process that was told to end, and kill it if it does not."""
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_of(log: Path) -> str:
    """Return the first errors of a log, which name the cause, and its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    errors = dict.fromkeys(line.strip() for line in lines if _ERROR.search(line))
    return "\n".join([*list(errors)[:_LOG_ERRORS], "...", *lines[-_LOG_LINES:]])


def _wait_for_group(group: int) -> None:
    """Wait, up to a timeout, until the last process of a group has ended. It removes the others' shared memory."""
    deadline = time.monotonic() + _GROUP_SECONDS
    while _has_members(group) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _has_members(group: int) -> bool:
    """Return whether a process of a group still runs. Zombies do not count."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
