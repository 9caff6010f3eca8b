"""One run of compose.yaml, with its own project name and ports."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 900
"""Enough for an inference service that compiles on a busy machine."""

_LABEL = "com.docker.compose.project"
_LAST_LINES = 40
_LONGEST_LINE = 1000


class DockerError(RuntimeError):
    """A docker command failed. The message has its last lines."""


def docker(*arguments: str, environment: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """Run `docker`, and return its output.

    Raises:
        DockerError: It failed, or took too long.
    """
    try:
        done = subprocess.run(
            ["docker", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DockerError(f"docker {' '.join(arguments)}: not done after {timeout:.0f} s") from None
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
        raise DockerError(f"docker {' '.join(arguments)} ended with {done.returncode}\n{said}")
    return done.stdout


class Project:
    """A Compose project. Leaving the context removes its containers and volumes.

    Example:
        with Project() as project:
            project.build("store", "inference")
            project.up("inference")
            project.endpoint("inference")
    """

    def __init__(self, files: Sequence[str] = ("compose.yaml",), variables: Mapping[str, str] | None = None) -> None:
        """Prepare a run without starting anything.

        Args:
            files: The compose files; each overrides the previous ones.
            variables: Variables for the files, in addition to free ports.
        """
        self.name = f"residuum-test-{secrets.token_hex(4)}"
        self._files = [word for file in files for word in ("--file", file)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("COMPOSE_", "RESIDUUM_"))}
        self._environment = {**kept, **_free_ports(), **(variables or {})}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:  # the logs are removed with the containers
                self._print_logs()
        finally:
            self.down()

    def compose(self, *arguments: str, timeout: float | None = None) -> str:
        """Run `docker compose` for this project with all its profiles, and return its output."""
        return self._compose("--profile", "*", *arguments, timeout=timeout)

    def build(self, *services: str) -> dict[str, str]:
        """Build the images of services; return the size of each."""
        self.compose("build", *services)
        parsed = self._parsed()["services"]
        files = {parsed[service]["image"]: ROOT / parsed[service]["build"]["dockerfile"] for service in services}
        return {image: _size(image, base_of(file)[0]) for image, file in sorted(files.items())}

    def up(self, *services: str) -> None:
        """Start services and their dependencies, or all without a profile, and wait until they are healthy."""
        self._compose("up", "--detach", "--wait", "--wait-timeout", str(WAIT_SECONDS), *services)

    def endpoint(self, service: str) -> str:
        """Return host:port of a service on this machine."""
        (port,) = self._parsed()["services"][service]["ports"]
        return f"{port['host_ip']}:{port['published']}"

    def container(self, service: str) -> str:
        """Return the ID of a service's container, running or not."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> Any:
        """Return the engine's description of a service's container."""
        return json.loads(docker("inspect", self.container(service)))[0]

    def execute(self, service: str, *command: str) -> str:
        """Run a command in a service's container."""
        return self.compose("exec", "--no-TTY", service, *command)

    def stop(self) -> dict[str, int]:
        """Stop every container; return the exit codes of their processes by service."""
        services = self.compose("ps", "--services").split()
        self.compose("stop")
        return {service: int(self.inspect(service)["State"]["ExitCode"]) for service in services}

    def down(self) -> None:
        """Remove containers, networks and volumes. It is no error if there are none."""
        self.compose("down", "--volumes", "--remove-orphans", timeout=300)

    def leftovers(self) -> list[str]:
        """Return the containers, networks and volumes of this project that are left."""
        label = f"label={_LABEL}={self.name}"
        found = {
            "container": docker("ps", "--all", "--filter", label, "--format", "{{.Names}}"),
            "volume": docker("volume", "ls", "--filter", label, "--format", "{{.Name}}"),
            "network": docker("network", "ls", "--filter", label, "--format", "{{.Name}}"),
        }
        return [f"{what} {name}" for what, names in found.items() for name in names.split()]

    def _print_logs(self) -> None:
        with suppress(DockerError):  # for example, nothing was started; this must not hide the original error
            for line in self.compose("logs", "--no-color", "--tail", str(_LAST_LINES), timeout=60).splitlines():
                print(line[:_LONGEST_LINE], flush=True)

    def _compose(self, *arguments: str, timeout: float | None = None) -> str:
        flags = ["--project-name", self.name, "--env-file", os.devnull, *self._files]
        return docker("compose", *flags, *arguments, environment=self._environment, timeout=timeout)

    def _parsed(self) -> Any:
        return json.loads(self.compose("config", "--format", "json"))


def base_of(dockerfile: Path) -> tuple[str, str]:
    """Return the base image of a Dockerfile, and its Python version."""
    found = re.search(r"^ARG BASE=(python:([\d.]+)\S*)$", dockerfile.read_text(), re.MULTILINE)
    assert found, f"{dockerfile} names no base"
    return found[1], found[2]


def _size(image: str, base: str) -> str:
    """Return the size of an image, and its size without the base image if the base has a local name."""
    total = _bytes(image)
    try:
        own = total - _bytes(base)
    except DockerError:  # the base was pulled only for the build
        return f"{total / 1e6:.0f} MB"
    return f"{total / 1e6:.0f} MB, {own / 1e6:.0f} of them without {base}"


def _bytes(image: str) -> int:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image))


def _free_ports() -> dict[str, str]:
    """Return a free port of this machine for each variable of a port."""
    names = [f"RESIDUUM_{name}_PORT" for name in ("INFERENCE", "STORE", "SHARDED", "STORE_A", "STORE_B")]
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: str(probe.getsockname()[1]) for name, probe in zip(names, probes, strict=True)}
    for probe in probes:
        probe.close()
    return ports
