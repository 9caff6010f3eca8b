"""Seeds on a CPU: a step that computes a part of a prompt draws nothing from the request's generator.

vLLM samples a token for every row of the batch, and discards those of prompts that are not finished. It then takes back
what was drawn for them, by the generator's offset, which a CPU's generators do not have: the engine would end, by any
request with a seed and a prompt that is computed in chunks. So these generators are put aside while it samples. They
are neither drawn from nor taken back, and a seed gives the same reply in however many chunks its prompt was computed.

Known from vLLM 0.32: `GPUModelRunner.sample_tokens` does both, the drawing and the taking back, and rows do not move
meanwhile; `input_batch.generators` (by row) is the dictionary that the sampler reads; `discard_request_mask` tells the
rows. The second model runner keeps no generators.
"""

from __future__ import annotations

from typing import Any

from inference_svc.taps.vllm.runner_v1 import IncompatibleEngineError


def attach(runner: Any, vllm_version: str) -> None:
    """Keep vLLM's first model runner, on a CPU, from the generators of rows whose token it discards.

    Raises:
        IncompatibleEngineError: The runner lacks a name that is used here.
    """
    _check(runner, vllm_version)
    sample_tokens = runner.sample_tokens

    def sample_without_discarded(*arguments: Any, **options: Any) -> Any:
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np
        aside = {row: generator for row, generator in generators.items() if discarded[row]}
        for row in aside:
            del generators[row]
        try:
            return sample_tokens(*arguments, **options)
        finally:
            generators.update(aside)

    runner.sample_tokens = sample_without_discarded


def _check(runner: Any, vllm_version: str) -> None:
    batch, mask = getattr(runner, "input_batch", None), getattr(runner, "discard_request_mask", None)
    missing = [
        name
        for name, there in (
            ("sample_tokens()", callable(getattr(runner, "sample_tokens", None))),
            ("input_batch.generators", isinstance(getattr(batch, "generators", None), dict)),
            ("discard_request_mask.np", hasattr(mask, "np")),
        )
        if not there
    ]
    if missing:
        raise IncompatibleEngineError(
            f"vLLM {vllm_version}: {type(runner).__name__} has no {' and no '.join(missing)}, which seeds need. "
            "Use a version of vLLM that residuum was tested with (see pyproject.toml)."
        )
