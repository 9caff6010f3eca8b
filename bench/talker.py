"""A process that is asked, and answers, in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from bench.children import RunFailedError
from bench.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_STOP_SECONDS = 20.0
_LOG_LINES = 30


class Talker:
    """A process that answers lines on its standard input, and ends with that."""

    def __init__(
        self, name: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start `python -m ARGUMENTS`, and wait for its first line."""
        self._name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        self.pid = self._process.pid
        try:
            self.first = self.read()
        except BaseException:
            self.stop()
            raise

    def ask(self, request: dict[str, Any]) -> None:
        """Send a line."""
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except OSError as error:
            raise RunFailedError(f"{self._name} has ended\n{_end_of(self._log)}") from error

    def read(self) -> Any:
        """Return the next answer.

        Raises:
            RunFailedError: There is none, or it is an error.
        """
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RunFailedError(f"{self._name} has ended\n{_end_of(self._log)}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RunFailedError(f"{self._name}: {answer['error']}\n{_end_of(self._log)}")
        return answer

    def stop(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                self._pipe(pipe).close()
        reap(self._process)

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None  # noqa: S101 - both are pipes
        return pipe


def reap(process: subprocess.Popen[Any]) -> None:
    """Wait for a process that was told to end; end it by force if it does not."""
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
