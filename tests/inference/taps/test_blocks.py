"""The memory of capture blocks, as docs/operations/sizing.md tells operators."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import inference_svc
from inference_svc.settings import InferenceSettings
from inference_svc.tap_settings import SITES
from inference_svc.taps.blocks import Block, BlockPool
from inference_svc.taps.points import FINAL_NORM, WIDE_SITES
from inference_svc.taps.vllm.capture_path import _STEPS_LEAVING
from tests.inference.taps_support import CPU, capture
from tests.waiting import wait_for

PAGE = Path(inference_svc.__file__).parents[1] / "docs" / "operations" / "sizing.md"
LAYERS, HIDDEN, ELEMENT_BYTES = 32, 4096, 2
"""Rows of a model with 8 billion parameters, in bfloat16."""
TOKENS, REQUESTS = (InferenceSettings.model_fields[name].default for name in ("max_num_batched_tokens", "max_num_seqs"))
GIB = 1 << 30

_AS_THE_STREAM = len(set(SITES.values()) - {FINAL_NORM, *WIDE_SITES})
"""How many sites of every layer have rows as wide as the residual stream."""


def pool_bytes(tokens: int, requests: int, sites: int, leaving: int) -> int:
    return BlockPool.rows_needed(tokens, requests, LAYERS * sites, leaving) * HIDDEN * ELEMENT_BYTES


@pytest.mark.parametrize("tokens", [32, 2048, 8192])
@pytest.mark.parametrize("requests", [1, 64, 1024])
def test_the_formula_of_the_page_is_the_codes(tokens: int, requests: int) -> None:
    position = LAYERS * HIDDEN * ELEMENT_BYTES
    assert pool_bytes(tokens, requests, 1, _STEPS_LEAVING) == (2 * tokens + 96 * requests) * position
    assert pool_bytes(tokens, requests, 1, 0) == (tokens + 64 * requests) * position
    told = PAGE.read_text()
    assert "2 × max-num-batched-tokens + 96 × max-num-seqs" in told
    assert "max-num-batched-tokens + 64 × max-num-seqs" in told


def test_the_examples_of_the_page_are_the_codes() -> None:
    told = PAGE.read_text()
    for sites in (1, 4, _AS_THE_STREAM):
        gpu, cpu = (pool_bytes(TOKENS, REQUESTS, sites, leaving) / GIB for leaving in (_STEPS_LEAVING, 0))
        assert f"| {sites} | {gpu:g} GiB | {cpu:g} GiB |" in told
    fewer = pool_bytes(TOKENS, 16, _AS_THE_STREAM, _STEPS_LEAVING) / GIB
    assert f"`--max-num-seqs 16` takes {fewer:g} GiB" in told


def test_a_step_that_waits_for_blocks_frees_its_own_again_whenever_others_came_back() -> None:
    pool = BlockPool(4, 1, torch.float32, CPU, 1)
    small, large, own = (capture(name, layers=range(units)) for name, units in (("s", 1), ("l", 3), ("o", 2)))
    theirs, ours = pool.take(small, 1, min_capacity=1), pool.take(own, 1, min_capacity=1)
    pool.leaving(2)
    calls: list[bool] = []

    def free_own() -> bool:
        calls.append(pool.free_rows >= 2)  # nothing of ours can leave before another thread has given back its block
        if calls[-1]:
            pool.give_back(ours)
        return calls[-1]

    pool.before_waiting = free_own
    found: list[Block] = []
    step = threading.Thread(target=lambda: found.append(pool.take(large, 1, min_capacity=1)), daemon=True)
    step.start()
    wait_for(pool.is_short.is_set, "the step that waits")
    pool.give_back(theirs)
    step.join(30)
    assert found
    assert calls == [False, True]
