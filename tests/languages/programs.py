"""Builds and runs the examples in other languages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "languages"
GO_ENVIRONMENT = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": ""}
GO_PACKAGES = [
    "google.golang.org/genproto/googleapis/rpc/errdetails",
    "google.golang.org/grpc",
    "google.golang.org/protobuf/proto",
]
RUN_SECONDS = 120
BUILD_SECONDS = 560


class MissingToolchainError(Exception):
    """A toolchain is missing. The message says what to install and how."""


class BuildError(Exception):
    """An example cannot be built. The message says why."""


@dataclass(frozen=True)
class Language:
    """An example."""

    name: str
    folder: str
    """The folder below examples/languages."""
    tools: tuple[str, ...]
    """Commands that must be installed."""
    prepare: tuple[tuple[str, ...], ...]
    """Commands that fail if libraries are missing."""
    build: tuple[tuple[str, ...], ...]
    """Commands that fail only if the example is wrong."""
    command: tuple[str, ...]
    """The command that runs it, in its folder."""

    def make(self) -> None:
        """Build it.

        Raises:
            MissingToolchainError: A tool or a library is missing.
            BuildError: The build fails although the toolchain is installed.
        """
        absent = [tool for tool in self.tools if shutil.which(tool) is None]
        if absent:
            raise MissingToolchainError(self._missing(f"there is no {', '.join(absent)}"))
        for command in self.prepare:
            done = self._run(command, BUILD_SECONDS)
            if done.returncode != 0:
                raise MissingToolchainError(self._missing(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}"))
        for command in self.build:
            done = self._run(command, BUILD_SECONDS)
            if done.returncode != 0:
                raise BuildError(f"{self.name}: `{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")

    def round(self, vector: Path, out: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run it with these variables, and without any other variables of residuum."""
        return self._run((*self.command, str(vector), str(out), *more), RUN_SECONDS, **environment)

    def _run(self, command: tuple[str, ...], seconds: int, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RESIDUUM_")}
        # The example must work without the residuum package.
        kept = {name: value for name, value in kept.items() if name != "PYTHONPATH"} | GO_ENVIRONMENT | environment
        return subprocess.run(
            command,
            cwd=EXAMPLES / self.folder,
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def _missing(self, what: str) -> str:
        return f"{self.name}: {what.strip()}\nInstall its toolchain with examples/languages/install_toolchains.sh"


LANGUAGES = {
    language.name: language
    for language in (
        Language(
            "Node.js",
            "node",
            tools=("node", "npm", "protoc"),
            # Fail immediately without a network.
            prepare=(("npm", "ci", "--prefer-offline", "--no-audit", "--no-fund", "--fetch-retries=0"),),
            build=(("npm", "run", "build"),),
            command=("node", "build/src/main.js"),
        ),
        Language(
            "Go",
            "go",
            tools=("go", "make", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
            prepare=(("go", "list", *GO_PACKAGES),),
            build=(("make", "vet"),),
            command=("build/round",),
        ),
        Language(
            "C++",
            "cpp",
            tools=("cmake", "c++", "protoc", "grpc_cpp_plugin"),
            prepare=(("cmake", "-B", "build"),),
            build=(("cmake", "--build", "build", "--parallel", "2"),),
            command=("build/round",),
        ),
        Language(
            "reflection",
            "reflection",
            tools=(),
            prepare=((sys.executable, "-c", "import crc32c, grpc_reflection, grpc_status, numpy"),),
            build=(),
            command=(sys.executable, "round.py"),
        ),
    )
}


@dataclass(frozen=True)
class Outcome:
    """The files that a run wrote."""

    summary: dict
    rows: bytes
    followed: bytes

    @classmethod
    def of(cls, done: subprocess.CompletedProcess[str], out: Path) -> Outcome:
        """Return the output of a successful run."""
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((out / "capture.json").read_text())
        return cls(summary, (out / "rows.f32").read_bytes(), (out / "followed.f32").read_bytes())

    @property
    def array(self) -> np.ndarray:
        """The rows, float32 [layers, positions, width]."""
        shape = [len(self.summary[name]) for name in ("layers", "positions")]
        return np.frombuffer(self.rows, "<f4").reshape(*shape, self.summary["width"])

    @property
    def num_rows(self) -> int:
        """The number of rows in all layers."""
        return self.array.shape[0] * self.array.shape[1]
