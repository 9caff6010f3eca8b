"""vLLM's own norms with a folded tap: the same results as without, and the tap sees the sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from inference_svc.taps import op
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.gpu.tables import MAX_RESIDENT
from inference_svc.taps.plan import Kind
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import NOWHERE, StepLayout
from inference_svc.taps.steps.programs import Program, Step
from inference_svc.taps.vllm.layers.norms import can_fold, fold
from tests.inference.taps_support import CPU

WIDTH, POINT = 64, 1


@pytest.fixture
def tap(monkeypatch):
    """A tap whose bank holds a vector of ones, installed for one test."""
    bank = VectorBank(1, WIDTH, CPU)
    bank.load([(0, torch.ones(WIDTH).numpy().tobytes())])
    made = CpuTap(bank, None, TapPoints(0, 2))
    monkeypatch.setattr(op._Current, "taps", [made], raising=False)
    monkeypatch.setattr(op._Current, "firsts", (0,), raising=False)
    return made


def make_norm(kind, dtype, **options):
    with set_current_vllm_config(VllmConfig()):
        norm = kind(WIDTH, eps=1e-5, **options)
    norm.weight.data = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    return norm


def rows(seed, dtype):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_an_idle_tap_changes_nothing(tap, kind, dtype):
    norm = make_norm(kind, dtype)
    assert can_fold(norm, dtype)
    x, residual = rows(2, dtype), rows(3, dtype)
    alone, pair = norm(x.clone()), norm(x.clone(), residual.clone())
    names = [name for name, _ in norm.named_parameters()]
    fold(norm, POINT)
    assert isinstance(norm, kind)
    assert [name for name, _ in norm.named_parameters()] == names
    torch.testing.assert_close(norm(x.clone()), alone)
    for got, expected in zip(norm(x.clone(), residual.clone()), pair, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@torch.inference_mode()
def test_the_norm_sees_the_steered_sum(tap, kind):
    norm, plain = make_norm(kind, torch.float32), make_norm(kind, torch.float32)
    fold(norm, POINT)
    program = Program.make(steps=[Step(Kind.ADD, 0, (0,), 3.0, 0.0, 0.0)])
    tap.arm(StepLayout([program], np.array([(row, 0, NOWHERE, 0) for row in (1, 4)])))
    x, residual = rows(2, torch.float32), rows(3, torch.float32)
    moved = x.clone()
    moved[[1, 4]] += 3.0
    for got, expected in zip(norm(x, residual.clone()), plain(moved, residual), strict=True):
        torch.testing.assert_close(got, expected)


def test_other_norms_are_not_folded(monkeypatch):
    class OtherNorm(RMSNorm):
        pass

    dtype = torch.float32
    assert not can_fold(make_norm(OtherNorm, dtype), dtype), "a subclass may compute something else"
    assert not can_fold(make_norm(RMSNorm, dtype, var_hidden_size=32), dtype), "the variance of only a part of the row"
    assert not can_fold(make_norm(RMSNorm, dtype, has_weight=False), dtype)
    assert not can_fold(make_norm(RMSNorm, torch.bfloat16), dtype), "the norm's dtype differs from the model's"
    assert not can_fold(torch.nn.LayerNorm(WIDTH), dtype)
    wide = make_norm(RMSNorm, dtype)
    wide.weight = torch.nn.Parameter(torch.ones(MAX_RESIDENT + 1, dtype=dtype))
    assert not can_fold(wide, dtype), "the kernel has no room for such rows"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not can_fold(make_norm(RMSNorm, dtype), dtype), "vLLM's batch-invariant mode has its own norm"
