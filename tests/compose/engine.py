"""The container engine: the one that `docker` reaches, or one that a program starts.

RESIDUUM_CONTAINER_ENGINE names that program. It is for machines without an engine and without access to a registry. It
is called as follows:

    PROGRAM setup                    install what it needs; only if there is no `docker` command
    PROGRAM start                    start the engine
    PROGRAM socket                   print the path of its socket
    PROGRAM base TAG VERSION         provide the image TAG with Python VERSION, such as python:3.11-slim
    PROGRAM exec COMMAND...          run a command where the ports that the engine publishes can be reached
    PROGRAM stop                     stop it, and remove all that it made

If the socket's engine already runs, it is used and not stopped. Start it by hand to keep built images.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.compose.project import ROOT, DockerError, base_of, docker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE = "RESIDUUM_CONTAINER_ENGINE"


def check() -> None:
    """Check that there is an engine, and Compose.

    Raises:
        DockerError: There is none. The message says what to do.
    """
    if shutil.which("docker") is None:
        raise DockerError(f"there is no `docker` here; install it, or set {VARIABLE} (see tests/compose/engine.py)")
    docker("compose", "version")
    docker("version")


@contextmanager
def brought_up(program: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Run an engine for as long as the context lasts.

    Yields:
        The command prefix that makes published ports reachable, and the environment.
    """
    if shutil.which("docker") is None:
        _call(program, "setup")
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment["DOCKER_HOST"] = f"unix://{_call(program, 'socket')}"
    found = _runs(environment)
    if not found:
        _call(program, "start")
    try:
        for tag, version in _bases():
            if not _answers(environment, "image", "inspect", tag):
                _call(program, "base", tag, version)
        yield [program, "exec"], environment
    finally:
        if not found:
            _call(program, "stop")


def _bases() -> set[tuple[str, str]]:
    """The base images of the Dockerfiles for CPUs, with their Python versions."""
    return {base_of(ROOT / "deploy" / f"{name}.Dockerfile") for name in ("store", "inference")}


def _runs(environment: Mapping[str, str]) -> bool:
    return _answers(environment, "version")


def _answers(environment: Mapping[str, str], *arguments: str) -> bool:
    return subprocess.run(["docker", *arguments], env=environment, capture_output=True, check=False).returncode == 0


def _call(program: str, *arguments: str) -> str:
    # Its background processes must not keep our pipes open, so only the path of the socket is read from a pipe.
    reads = arguments == ("socket",)
    done = subprocess.run(
        [program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if reads else None,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DockerError(f"{program} {' '.join(arguments)} ended with {done.returncode}")
    return done.stdout.strip() if reads else ""
