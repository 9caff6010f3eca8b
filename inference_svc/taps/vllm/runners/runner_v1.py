"""The adapter to vLLM's first model runner: it reads which rows of a batch belong to which request.

It relies on behaviour of vLLM 0.24 and 0.32. In each step that computes tokens, the runner calls
`GPUModelRunner._prepare_inputs(scheduler_output, num_scheduled_tokens)` once, before the forward pass. By then
`_update_states` has updated `input_batch`, including the order of the rows. The CPU's runner inherits this.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.vllm.missing_names import refuse_missing

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def attach(runner: Any, place: Callable[[Callable[[], StepRows]], None], vllm_version: str) -> None:
    """Make the runner call `place` in each step before the forward pass, with a function that returns the batch's rows.

    Raises:
        IncompatibleEngineError: The runner lacks a name that this adapter uses.
    """
    _check(runner, vllm_version)
    prepare = runner._prepare_inputs  # noqa: SLF001 - no public name gives the order of rows

    def prepare_and_place(scheduler_output: Any, num_scheduled_tokens: Any, *arguments: Any, **options: Any) -> Any:
        result = prepare(scheduler_output, num_scheduled_tokens, *arguments, **options)
        place(lambda: _rows(runner, num_scheduled_tokens))
        return result

    runner._prepare_inputs = prepare_and_place  # noqa: SLF001 - see above


def _rows(runner: Any, num_scheduled_tokens: Any) -> StepRows:
    batch = runner.input_batch
    request_ids = list(batch.req_ids)
    return StepRows(
        request_ids=request_ids,
        firsts=batch.num_computed_tokens_cpu[: len(request_ids)],
        counts=num_scheduled_tokens,
    )


def _check(runner: Any, vllm_version: str) -> None:
    prepare = getattr(runner, "_prepare_inputs", None)
    missing = []
    parameters = list(inspect.signature(prepare).parameters) if prepare else []
    if parameters[:2] != ["scheduler_output", "num_scheduled_tokens"]:
        missing.append("_prepare_inputs(scheduler_output, num_scheduled_tokens, ...)")
    missing += [
        f"input_batch.{name}"
        for name in ("req_ids", "num_computed_tokens_cpu")
        if not hasattr(getattr(runner, "input_batch", None), name)
    ]
    refuse_missing(runner, vllm_version, missing)
