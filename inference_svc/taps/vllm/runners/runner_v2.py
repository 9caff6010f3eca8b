"""The adapter to vLLM's second model runner: it reads which rows of a batch belong to which request.

It relies on behaviour of vLLM 0.24 and 0.32. In each step that computes tokens, the runner calls
`GPUModelRunner.prepare_inputs(scheduler_output, batch_desc)` once, before the forward pass. That returns an
`InputBatch` in the order of the rows.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.vllm.missing_names import refuse_missing

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NAMES = ("req_ids", "num_scheduled_tokens", "num_computed_tokens_np")


def attach(runner: Any, place: Callable[[Callable[[], StepRows]], None], vllm_version: str) -> None:
    """Make the runner call `place` in each step before the forward pass, with a function that returns the batch's rows.

    Raises:
        IncompatibleEngineError: The runner lacks a name that this adapter uses.
    """
    _check(runner, vllm_version)
    prepare = runner.prepare_inputs

    def prepare_and_place(*arguments: Any, **options: Any) -> Any:
        batch = prepare(*arguments, **options)
        place(lambda: _rows(batch))
        return batch

    runner.prepare_inputs = prepare_and_place


def _rows(batch: Any) -> StepRows:
    return StepRows(
        request_ids=batch.req_ids,
        firsts=batch.num_computed_tokens_np,
        counts=batch.num_scheduled_tokens,
    )


def _check(runner: Any, vllm_version: str) -> None:
    prepare = getattr(runner, "prepare_inputs", None)
    missing = []
    if prepare is None or "scheduler_output" not in inspect.signature(prepare).parameters:
        missing.append("prepare_inputs(scheduler_output, ...)")
    else:
        batch = inspect.getmodule(type(runner)).__dict__.get("InputBatch")
        fields = getattr(batch, "__dataclass_fields__", {})
        missing += [f"InputBatch.{name}" for name in _NAMES if name not in fields]
    refuse_missing(runner, vllm_version, missing)
