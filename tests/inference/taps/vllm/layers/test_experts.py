"""The chosen experts of a mixture of experts are found in vLLM's runner, and tapped as rows of weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from inference_svc.taps import op
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.model.hooked_runs import CannotTapError
from inference_svc.taps.plan import Capture, RequestPlan
from inference_svc.taps.points import RowShape
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from inference_svc.taps.vllm.capture_path import points_of
from inference_svc.taps.vllm.layers.experts import find_experts
from residuum.v1 import capture_pb2
from tests.inference.taps_support import CPU, select

WEIGHTS = capture_pb2.SITE_ROUTING_WEIGHTS
EXPERTS, CHOSEN, TOKENS = 5, 2, 3


class Router:
    """Chooses the experts with the highest logits, as vLLM's routers do."""

    global_num_experts = EXPERTS
    eplb_state = None

    def select_experts(self, hidden_states, router_logits, topk_indices_dtype=None):
        weights, experts = router_logits.softmax(-1).topk(CHOSEN)
        return weights, experts.to(topk_indices_dtype or torch.int32)


class Runner(MoERunner):
    """vLLM's runner without its experts: the output is the weighted sum of constants."""

    def __init__(self, scale=1.0, times=1, asks=True):
        nn.Module.__init__(self)
        self.router, self.routed_scaling_factor, self.times, self.asks = Router(), scale, times, asks
        self.routed_experts = SimpleNamespace(quant_method=self)

    def forward(self, hidden, logits):
        if not self.asks:
            return hidden
        weights, experts = self.router.select_experts(
            hidden_states=hidden.repeat(self.times, 1), router_logits=logits.repeat(self.times, 1)
        )
        return hidden + self.routed_scaling_factor * (weights * experts).sum(-1, keepdim=True)[: len(hidden)]


class Layer(nn.Module):
    def __init__(self, *runners):
        super().__init__()
        self.gate, self.runners = nn.Linear(4, EXPERTS), nn.ModuleList(runners)

    def forward(self, hidden):
        for runner in self.runners:
            hidden = runner(hidden, self.gate(hidden))
        return hidden


def found(*layers):
    model, hidden = nn.Sequential(*layers), torch.randn(TOKENS, 4)
    return find_experts(dict(enumerate(layers)), lambda: model(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_experts_are_captured_and_stay_as_they_were(monkeypatch, dtype):
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    layers = [Layer(), Layer(Runner(scale=1.5))]
    entries = found(*layers)
    assert [(index, entry.width) for index, entry in entries.items()] == [(1, EXPERTS)]
    points = points_of(0, 2, {WEIGHTS: RowShape(EXPERTS)})
    pool = BlockPool(32, EXPERTS, dtype, CPU, 0)
    tap = CpuTap(VectorBank(1, EXPERTS, CPU), pool, points.groups[1])
    op.install([None, tap], points.firsts)
    hidden = torch.randn(TOKENS, 4)
    with torch.no_grad():
        expected = layers[1](hidden)
        entries[1].tap(points.of(WEIGHTS, 1))
        assert torch.equal(layers[1](hidden), expected), "no request captures"
        assert not pool.memory.any()
        runtime = TapRuntime(points.groups[1], tap, pool, None)
        plan = RequestPlan(TOKENS, Capture("r", 0, (1,), select(), (WEIGHTS,)))
        runtime.begin_step([], [("r", plan)])
        runtime.place(lambda: StepRows(["r"], [0], [TOKENS]))
        assert torch.equal(layers[1](hidden), expected)
        chosen = 1.5 * layers[1].gate(hidden).softmax(-1)
    lowest = chosen.topk(CHOSEN).values[:, -1:]
    torch.testing.assert_close(pool.memory[:TOKENS], torch.where(chosen >= lowest, chosen, 0.0).to(dtype))


@pytest.mark.parametrize("numbers", [torch.int32, torch.int64, torch.uint32])
def test_rows_of_experts_have_their_weights_and_zeros(numbers):
    weights = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 3.0]])
    experts = torch.tensor([[3, 0, 1], [2, 4, 5]]).to(numbers)  # there is no expert 5
    rows = op.expert_rows(weights, experts, EXPERTS, 2.0)
    np.testing.assert_array_equal(rows, [[0.5, 0.5, 0, 1, 0], [0, 0, 2, 0, 0]])
    padding = op.expert_rows(weights, torch.full((2, 3), -1), EXPERTS, 1.0)
    assert padding.shape == (2, EXPERTS)
    assert not padding.any()


def test_a_choice_that_no_router_returns_is_refused_by_name():
    for layers, told in (
        ([Layer(), Layer()], r"looked in Layer for one mixture of experts in a layer, found none\. Leave the site out"),
        ([Layer(Runner(), Runner())], "looked in Layer for one mixture of experts"),
        ([Layer(Runner()), Layer(Runner(asks=False))], r"in layer 1, a kernel of Runner chooses the experts itself"),
        ([Layer(Runner(times=2))], r"layer 0 chooses for 6 tokens where this rank has 3: .* \(data_parallel_size\)"),
    ):
        with pytest.raises(CannotTapError, match=f"^routing_weights cannot be captured: .*{told}"):
            found(*layers)
    moving = Runner()
    moving.router.eplb_state = object()
    with pytest.raises(CannotTapError, match="enable_eplb"):
        found(Layer(moving))
    assert "select_experts" not in vars(moving.router), "the search leaves the router as it was"
