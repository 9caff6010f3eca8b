"""Is the second tensor of a layer part of the stream? The answer must not depend on uninitialised memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from inference_svc.taps.model.hooked_runs import CannotTapError
from inference_svc.taps.model.structure import observe

WIDTH = 16
GARBAGE = (1e31, -1e31, float("nan"), float("inf"), 3.0, 0.0)


class RMSNorm(nn.Module):
    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed if residual is None else (normed, total)


class Attention(nn.Module):
    """Returns uninitialised memory: other garbage in each call."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def forward(self, hidden):
        return torch.full_like(hidden, self.found())


class Untouched(nn.Module):
    """Attention that writes into an argument, but not in a run without requests."""

    def forward(self, hidden, output):
        return None


class WritingAttention(Attention):
    """Passes uninitialised memory to a module that should write into it."""

    def __init__(self, found):
        super().__init__(found)
        self.inner = Untouched()

    def forward(self, hidden):
        output = torch.full_like(hidden, self.found())
        self.inner(hidden, output=output)
        return output


class SumLayer(nn.Module):
    """Passes on the stream as a sum, like Llama."""

    scale = 1.0

    def __init__(self, attention):
        super().__init__()
        self.attention, self.mlp = attention, nn.Linear(WIDTH, WIDTH)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()

    def forward(self, hidden, residual):
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(self.scale * hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.attention(hidden), residual)
        return self.mlp(hidden), residual


class LeftoverLayer(nn.Module):
    """Passes on the whole stream and a tensor that nothing reads, like Exaone 4."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.mlp = attention, nn.Linear(WIDTH, WIDTH)
        self.post_attention_layernorm, self.post_feedforward_layernorm = RMSNorm(), RMSNorm()

    def forward(self, hidden, residual):
        residual = hidden + self.post_attention_layernorm(self.attention(hidden))
        return residual + self.post_feedforward_layernorm(self.mlp(residual)), residual


class Model(nn.Module):
    def __init__(self, layers, *, sums):
        super().__init__()
        self.layers, self.norm, self.sums = nn.ModuleList(layers), RMSNorm(), sums

    def forward(self, hidden):
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.norm(hidden, residual)[0] if self.sums else self.norm(hidden)


def model_of(make, seed, count=3, *, writing=False):
    torch.manual_seed(seed)
    found = random.Random(seed)

    attention = WritingAttention if writing else Attention
    layers = [make(attention(lambda: found.choice(GARBAGE))) for _ in range(count)]
    return Model(layers, sums=issubclass(make, SumLayer))


def adds_residual(model):
    tokens = torch.randn(4, WIDTH)

    def run():
        with torch.no_grad():
            model(tokens.clone())

    def is_attention(module):
        return type(module) in {Attention, Untouched}

    return observe(model, dict(enumerate(model.layers)), is_attention, run).adds_residual


@pytest.mark.parametrize("writing", [False, True], ids=["returns", "writes"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [SumLayer, LeftoverLayer])
def test_uninitialised_memory_does_not_affect_the_result(make, count, writing):
    for seed in range(40):
        assert adds_residual(model_of(make, seed, count, writing=writing)) == (make is SumLayer), seed


def test_a_stream_that_is_neither_sum_nor_first_tensor_is_refused():
    class Scaled(SumLayer):
        scale = 0.5

    with pytest.raises(
        CannotTapError, match=r" cannot be tapped.* After layers\.0 \(Scaled\) .*change, .* by 0\.\d+ if the sum"
    ):
        adds_residual(model_of(Scaled, 0))


def test_layers_that_differ_are_refused():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            of_sum, leftover = model_of(SumLayer, 0), model_of(LeftoverLayer, 0)
            self.layers = nn.ModuleList([of_sum.layers[1], of_sum.layers[2], leftover.layers[0], leftover.layers[1]])

        def forward(self, hidden):
            residual = None
            for layer in self.layers:
                hidden, residual = layer(hidden, residual)
            return hidden

    with pytest.raises(CannotTapError, match="after every layer alike"):
        adds_residual(Mixed())


def test_a_stage_that_computes_nothing_after_its_layer_is_refused():
    class Stage(Model):
        def forward(self, hidden):
            super().forward(hidden)
            return {"hidden_states": hidden}  # for the next stage

    model = model_of(SumLayer, 0, 1)
    stage = Stage(model.layers, sums=True)
    with pytest.raises(CannotTapError, match=r"computes nothing after its only layer.* Use fewer pipeline stages"):
        adds_residual(stage)


def test_a_model_whose_values_differ_from_run_to_run_is_refused():
    class Careless(LeftoverLayer):
        """All its outputs are garbage."""

        def forward(self, hidden, residual):
            hidden, residual = super().forward(hidden, residual)
            return hidden + torch.randn(4, WIDTH), residual + torch.randn(4, WIDTH)

    class CarelessModel(Model):
        def forward(self, hidden):
            return super().forward(hidden) + torch.randn(4, WIDTH)

    model = model_of(LeftoverLayer, 0)
    careless = CarelessModel([Careless(layer.attention) for layer in model.layers], sums=False)
    with pytest.raises(
        CannotTapError, match=r"After layers\.0 \(Careless\) the model's values differ between equal runs"
    ):
        adds_residual(careless)
