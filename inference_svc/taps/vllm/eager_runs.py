"""Runs of a worker's model without compilation and without requests: to find its structure and to check its rows."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from inference_svc.taps.model import insertion
from inference_svc.taps.model.logits_check import Explanation, LogitsCheck
from inference_svc.taps.model.parts_check import middle_error, other_projections, sum_error
from inference_svc.taps.model.structure import Structure, observe
from inference_svc.taps.model.wide_places import PROJECTED
from inference_svc.taps.vllm.layers.experts import find_experts
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

_TOKENS = 16
"""How many tokens such a run computes, if the engine computes as many in a step."""


class EagerRuns:
    """Runs one worker's model outside the engine's steps."""

    def __init__(self, worker: Any, layers: dict[int, nn.Module]) -> None:
        """Prepare the runs. `layers` are this rank's decoder layers by index."""
        self._worker = worker
        self._model: nn.Module = worker.model_runner.get_model()
        self._layers = layers
        self._num_tokens = min(_TOKENS, worker.vllm_config.scheduler_config.max_num_batched_tokens)
        self._logits: LogitsCheck | None = None
        if get_pp_group().is_last_rank:
            self._logits = LogitsCheck(self._model, [layers[index] for index in sorted(layers)])

    def observe(self, sites: Sequence[int]) -> Structure:
        """Run the model as vLLM's profile run does, return its structure, and check that the sites can be captured.

        Raises:
            CannotTapError: The taps do not fit the model.
        """
        options = {"skip_attn": True} if self._worker.use_v2_model_runner else {}

        def run() -> None:
            self._worker.model_runner._dummy_run(self._num_tokens, is_profile=True, **options)  # noqa: SLF001 - as the profile run does

        with self._uncompiled():
            if self._logits is not None:
                self._logits.remember(run)
            num_experts = self._worker.vllm_config.model_config.get_num_experts()
            structure = observe(self._model, self._layers, _is_attention, run, num_experts)
            experiment = (self._model, self._layers, _is_attention, structure, run)
            if set(insertion.PARTS) & set(sites):
                insertion.check_parts(self._layers, structure)
                insertion.check_sum(sum_error(*experiment))
            if set(PROJECTED) & set(sites):
                for index in other_projections(self._model, _is_attention, structure, run):
                    for site in PROJECTED:
                        del structure.wide[site][index]
            if capture_pb2.SITE_ROUTING_WEIGHTS in sites:
                structure.wide[capture_pb2.SITE_ROUTING_WEIGHTS] = find_experts(self._layers, run)
            if capture_pb2.SITE_FINAL_NORM in sites and get_pp_group().is_last_rank:
                insertion.check_final_norm(self._model, structure)
            if capture_pb2.SITE_RESID_MID in sites:
                insertion.check_middles(self._layers, structure)
                insertion.check_middle(middle_error(*experiment))
                structure.middle_moves = insertion.is_middle(middle_error(*experiment, changed=True))
            return structure

    def listen(self) -> None:
        """Record the inputs of the unembedding from now on; see `LogitsCheck`."""
        if self._logits is not None:
            self._logits.listen()

    def explain(self, rows: torch.Tensor, tokens: Sequence[int]) -> Explanation | None:
        """Return how well rows explain the tokens served since `listen`; None on a rank that computes no logits."""
        if self._logits is None:
            return None

        with self._uncompiled():
            return self._logits.explain(rows, tokens, self._run)

    def logits(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of rows; see `LogitsCheck.logits`."""
        if self._logits is None:
            return None
        with self._uncompiled():
            return self._logits.logits(rows, self._run)

    def _run(self, call_model: Callable[[], object]) -> None:
        # Otherwise vLLM asks the other replicas for their numbers of tokens, which do not take part in this run.
        replicas = self._worker.vllm_config.parallel_config.data_parallel_size
        count = self._num_tokens
        tokens = torch.full((replicas,), count, dtype=torch.int32)
        with set_forward_context(None, self._worker.vllm_config, num_tokens=count, num_tokens_across_dp=tokens):
            call_model()

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        compiled = [module for module in self._model.modules() if getattr(module, "do_not_compile", True) is False]
        for module in compiled:
            module.do_not_compile = True
        try:
            with set_current_vllm_config(self._worker.vllm_config), torch.inference_mode():
                yield
        finally:
            for module in compiled:
                module.do_not_compile = False


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, AttentionLayerBase)
