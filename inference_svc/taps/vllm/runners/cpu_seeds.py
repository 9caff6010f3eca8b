"""A workaround for seeds on a CPU: a step that computes only a part of a prompt must not use the request's generator.

vLLM samples a token for every row of the batch, and discards the tokens of unfinished prompts. Then it rewinds their
generators by setting an offset. CPU generators have no offset: the engine would crash on any request with a seed whose
prompt is computed in chunks. This module hides these generators while vLLM samples, so they are neither used nor
rewound. A seed then gives the same reply for any number of chunks.

It relies on behaviour of vLLM 0.32. `GPUModelRunner.sample_tokens` both samples and rewinds, and rows do not move in
between. The sampler reads the dictionary `input_batch.generators`, by row. `discard_request_mask` marks the discarded
rows. The second model runner keeps no generators.
"""

from __future__ import annotations

from typing import Any

from inference_svc.taps.vllm.missing_names import refuse_missing


def attach(runner: Any, vllm_version: str) -> None:
    """Hide the generators of discarded rows from vLLM's first model runner on a CPU.

    Raises:
        IncompatibleEngineError: The runner lacks a name that this workaround uses.
    """
    _check(runner, vllm_version)
    sample_tokens = runner.sample_tokens

    def sample_without_discarded(*arguments: Any, **options: Any) -> Any:
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np
        hidden = {row: generator for row, generator in generators.items() if discarded[row]}
        for row in hidden:
            del generators[row]
        try:
            return sample_tokens(*arguments, **options)
        finally:
            generators.update(hidden)

    runner.sample_tokens = sample_without_discarded


def _check(runner: Any, vllm_version: str) -> None:
    batch, mask = getattr(runner, "input_batch", None), getattr(runner, "discard_request_mask", None)
    missing = [
        name
        for name, exists in (
            ("sample_tokens()", callable(getattr(runner, "sample_tokens", None))),
            ("input_batch.generators", isinstance(getattr(batch, "generators", None), dict)),
            ("discard_request_mask.np", hasattr(mask, "np")),
        )
        if not exists
    ]
    refuse_missing(runner, vllm_version, missing)
