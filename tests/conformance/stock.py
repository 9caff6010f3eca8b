"""Stock vLLM without residuum's code: `python -m tests.conformance.stock JOB.json RESULT.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

PROMPT = list(range(100, 190))
"""Longer than what one step computes."""

NEW_TOKENS = 24
_SECONDS = 250.0
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no part of the key of compiled graphs, and saves an import of vLLM
}


@dataclass(frozen=True)
class Run:
    """The results of stock vLLM."""

    token_ids: tuple[int, ...]
    """The greedy reply to `PROMPT`."""
    compiled: frozenset[Path]
    """The compiled graphs in the cache afterwards."""


def run(cache_root: Path, arguments: dict[str, Any]) -> Run:
    """Generate with stock vLLM, started with these arguments in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps(arguments))
        done = subprocess.run(
            [sys.executable, "-m", "tests.conformance.stock", str(job), str(result)],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, "VLLM_CACHE_ROOT": str(cache_root)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return Run(tuple(json.loads(result.read_text())), compiled_graphs(cache_root))


def compiled_graphs(cache_root: Path) -> frozenset[Path]:
    """Return the folders of compiled graphs in vLLM's cache, one for each cache key."""
    return frozenset(cache_root.glob("torch_compile_cache/torch_aot_compile/*"))


def main() -> None:
    """Generate, and write the token IDs."""
    from vllm import LLM, SamplingParams

    job, result = map(Path, sys.argv[1:])
    llm = LLM(**json.loads(job.read_text()))
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
    result.write_text(json.dumps(list(output.outputs[0].token_ids)))


if __name__ == "__main__":
    main()
