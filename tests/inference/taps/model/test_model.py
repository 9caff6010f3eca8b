"""Finding decoder layers by structure, putting taps into them, and the op in a compiled graph."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

from inference_svc.taps import op
from inference_svc.taps.model.hooked_runs import CannotTapError
from inference_svc.taps.model.insertion import (
    check_final_norm,
    check_middle,
    check_middles,
    check_parts,
    check_sum,
    find_decoder_layers,
    is_middle,
    layers_of_sites,
    put_taps,
)
from inference_svc.taps.model.parts_check import middle_error, sum_error
from inference_svc.taps.model.structure import Structure, observe
from inference_svc.taps.points import FINAL_NORM, TapPoints
from residuum.v1 import capture_pb2

POST, PRE = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE
ATTN, MLP = capture_pb2.SITE_ATTN_OUT, capture_pb2.SITE_MLP_OUT
ATTN_IN, MID, MLP_IN = capture_pb2.SITE_ATTN_IN, capture_pb2.SITE_RESID_MID, capture_pb2.SITE_MLP_IN


class PPMissingLayer(nn.Identity):
    """Has the name of vLLM's class."""


class Layer(nn.Module):
    """A decoder layer that passes on (hidden, residual), as vLLM's layers do."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden, residual):
        total = hidden + residual
        return self.linear(total), total


class Decoder(nn.Module):
    def __init__(self, layers, **others):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for name, module in others.items():
            self.add_module(name, module)

    def forward(self, hidden):
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


class RMSNorm(nn.Module):
    """Like vLLM's norm: with a residual, it adds first and returns both."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, total)


class Attention(nn.Module):
    """Like vLLM's attention on a CPU: in a run without requests it returns uninitialised memory."""

    found = float("nan")

    def __init__(self, width=4):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, positions, hidden):
        return self.out(hidden) + self.found


class LlamaLayer(nn.Module):
    """A layer whose norms add. It passes on hidden and residual."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.self_attn, self.mlp = Attention(), nn.Linear(4, 4)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.scale = scale

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(positions, hidden) * self.scale, residual)
        return self.mlp(hidden) * self.scale, residual


class GemmaLayer(LlamaLayer):
    """A layer with norms also after attention and MLP, whose outputs are added to the stream."""

    def __init__(self):
        super().__init__()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(), RMSNorm()

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(positions=positions, hidden=hidden))
        hidden, residual = self.pre_feedforward_layernorm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class GPTLayer(nn.Module):
    """Adds to the stream itself, and passes on one tensor."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(4), Attention(), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, hidden):
        hidden = hidden + self.attn(None, self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class WritingAttention(Attention):
    """Returns nothing, and writes into an argument."""

    def forward(self, hidden, output):
        output.copy_(super().forward(None, hidden))


class LFMLayer(LlamaLayer):
    """A layer whose attention writes into an argument."""

    def __init__(self):
        super().__init__()
        self.self_attn = WritingAttention()

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        output = torch.empty_like(hidden)
        self.self_attn(hidden, output=output)
        hidden, residual = self.post_attention_layernorm(output, residual)
        return self.mlp(hidden), residual


class MambaLayer(nn.Module):
    """A layer with a norm that adds and a mixer that combines tokens, but no MLP."""

    def __init__(self):
        super().__init__()
        self.mixer, self.norm = Attention(), RMSNorm()

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual, hidden = hidden, self.norm(hidden)
        else:
            hidden, residual = self.norm(hidden, residual)
        return self.mixer(positions, hidden), residual


class LlamaModel(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), RMSNorm()

    def forward(self, hidden):
        residual = None
        for layer in self.layers:
            hidden, residual = layer(None, hidden, residual)
        return self.norm(hidden, residual)[0]


def is_attention(module):
    return isinstance(module, Attention)


def watch(model, dtype=torch.float32):
    tokens = torch.randn(3, 4, dtype=dtype)

    def run():
        with torch.no_grad():
            return model(tokens.clone())

    numbered = dict(enumerate(getattr(model, "layers", model)))
    return observe(model, numbered, is_attention, run), numbered, run


def check_sums(model):
    structure, numbered, run = watch(model)
    check_sum(sum_error(model, numbered, is_attention, structure, run))


class Recorder:
    """A tap that records what it sees, and adds `push` to it."""

    def __init__(self, push=0.0):
        self.seen = []
        self.push = push

    def tap(self, hidden, residual, point):
        self.seen.append((point, hidden.clone(), None if residual is None else residual.clone()))
        hidden += self.push

    def points(self):
        return [point for point, _, _ in self.seen]


@pytest.fixture
def tap(monkeypatch):
    """Install a recorder as the process's tap for one test."""
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    recorder = Recorder()
    op.install([recorder])
    return recorder


def hook_layers(numbered, structure=None, sites=(POST,), fold=lambda norm, point: False):
    points = TapPoints(min(numbered), len(numbered))
    return put_taps(numbered, points, structure or Structure(), sites, fold)


def layers(count):
    return [Layer() for _ in range(count)]


def test_the_one_list_of_the_right_length_is_found():
    model = Decoder(layers(3), heads=nn.ModuleList(layers(2)))
    found = find_decoder_layers(nn.ModuleDict({"model": model}), 3)
    assert list(found) == [0, 1, 2]
    assert [found[index] for index in found] == list(model.layers)


def test_two_lists_of_the_same_layers_are_one():
    model = Decoder(layers(2))
    model.first_half = nn.ModuleDict({"layers": nn.ModuleList(model.layers)})
    assert list(find_decoder_layers(model, 2).values()) == list(model.layers)


def test_lists_inside_the_layers_do_not_count():
    model = Decoder([nn.ModuleDict({"experts": nn.ModuleList(layers(2))}) for _ in range(2)])
    assert list(find_decoder_layers(model, 2).values()) == list(model.layers)


def test_two_lists_of_the_right_length_are_refused_by_name():
    model = Decoder(layers(2), encoder=nn.ModuleList(layers(2)))
    with pytest.raises(CannotTapError, match=r"Decoder cannot be tapped.* 2 .*\['encoder', 'layers'\]"):
        find_decoder_layers(model, 2)


def test_a_model_without_such_a_list_is_refused():
    with pytest.raises(CannotTapError, match=r"of 7 decoder layers, found none; .* layers \(2\)\. .*report it"):
        find_decoder_layers(Decoder(layers(2)), 7)


def test_layers_of_other_stages_are_left_out_and_keep_their_numbers():
    model = Decoder([PPMissingLayer(), *layers(2), PPMissingLayer()])
    assert list(find_decoder_layers(model, 4)) == [1, 2]


def test_hooks_pass_hidden_and_residual_of_each_layer(tap):
    model = Decoder(layers(2))
    hook_layers(dict(enumerate(model.layers)))
    model(torch.ones(3, 4))
    assert tap.points() == [1, 2]
    hidden = model.layers[0].linear(torch.ones(3, 4))
    assert torch.equal(tap.seen[0][1], hidden)
    assert torch.equal(tap.seen[0][2], torch.ones(3, 4))


def test_hooks_take_layers_that_return_one_tensor(tap):
    layer = nn.Linear(4, 4)
    hook_layers({5: layer})
    output = layer(torch.ones(2, 4))
    ((index, hidden, residual),) = tap.seen
    assert (index, residual) == (1, None)
    assert torch.equal(hidden, output)


def test_the_next_layer_sees_the_taps_changes(tap):
    model = Decoder(layers(2))
    hook_layers({0: model.layers[0]})
    with torch.no_grad():
        before = model(torch.ones(1, 4))
        tap.push = 10.0
        assert not torch.allclose(model(torch.ones(1, 4)), before)


def test_a_layer_that_returns_a_tuple_of_one_is_tapped(tap):
    class Single(nn.Linear):
        def forward(self, hidden):
            return (super().forward(hidden),)

    layer = Single(4, 4)
    hook_layers({0: layer})
    layer(torch.ones(2, 4))
    assert [(point, residual) for point, _, residual in tap.seen] == [(1, None)]


def test_the_norm_that_takes_what_a_layer_returns_is_found():
    model = LlamaModel([LlamaLayer() for _ in range(3)])
    structure, _, _ = watch(model)
    assert structure.norms == {0: model.layers[1].input_layernorm, 1: model.layers[2].input_layernorm, 2: model.norm}


def test_a_norm_is_not_taken_if_something_else_looks_first():
    class Nosy(LlamaModel):
        def __init__(self, layers):
            super().__init__(layers)
            self.probe = nn.Linear(4, 4)

        def forward(self, hidden):
            residual = None
            for layer in self.layers:
                hidden, residual = layer(None, hidden, residual)
                self.probe(hidden)
            return self.norm(hidden, residual)[0]

    assert watch(Nosy([LlamaLayer(), LlamaLayer()]))[0].norms == {}


def test_a_norm_that_is_used_twice_is_not_taken():
    layers = [LlamaLayer() for _ in range(3)]
    layers[2].input_layernorm = layers[1].input_layernorm
    model = LlamaModel(layers)
    assert watch(model)[0].norms == {2: model.norm}


def test_taps_are_folded_where_they_can_be_and_hooked_where_not(tap):
    model = LlamaModel([LlamaLayer() for _ in range(3)])
    structure, numbered, run = watch(model)
    folded = []

    def fold(norm, point):
        folded.append((norm, point))
        return norm is not model.norm

    assert hook_layers(numbered, structure, fold=fold) == 2
    assert folded == [(model.layers[1].input_layernorm, 1), (model.layers[2].input_layernorm, 2), (model.norm, 3)]
    run()
    assert tap.points() == [3]


class GPTModel(nn.Sequential):
    """Adds in its layers. Its rows are behind a batch dimension until it returns them, as with transformers' code."""

    def forward(self, hidden):
        return super().forward(hidden[None])[0]


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("make", [LlamaModel, GPTModel])
def test_the_final_norm_is_tapped_after_it(tap, make, fold, monkeypatch):
    monkeypatch.setattr(Attention, "found", 0.0)
    layers = [LlamaLayer(), LlamaLayer()] if make is LlamaModel else [GPTLayer(), GPTLayer()]
    model = LlamaModel(layers) if make is LlamaModel else GPTModel(*layers, nn.LayerNorm(4))
    norm = model.norm if make is LlamaModel else model[2]
    tokens = torch.randn(3, 4)

    def run():
        with torch.no_grad():
            return model(tokens.clone())

    structure = observe(model, dict(enumerate(layers)), is_attention, run)
    assert structure.final_norm is norm
    check_final_norm(model, structure)
    assert layers_of_sites(dict(enumerate(layers)), structure, [POST, FINAL_NORM]) == [[0, 1], [1]]
    expected = run()
    hook_layers(dict(enumerate(layers)), structure, [POST, FINAL_NORM], fold=lambda norm, point: fold)
    run()
    point, rows, residual = tap.seen[-1]
    assert (point, residual) == (TapPoints(0, 2).of(FINAL_NORM, 1), None)
    torch.testing.assert_close(rows, expected)


class ScaledModel(LlamaModel):
    """Returns other rows than its final norm."""

    def forward(self, hidden):
        return super().forward(hidden) / 2


@pytest.mark.parametrize("make", [ScaledModel, nn.Sequential])
def test_a_model_without_a_final_norm_is_refused_by_name(make):
    model = ScaledModel([LlamaLayer(), LlamaLayer()]) if make is ScaledModel else nn.Sequential(GPTLayer(), GPTLayer())
    structure, numbered, _ = watch(model)
    assert layers_of_sites(numbered, structure, [FINAL_NORM, POST]) == [[], [0, 1]]
    with pytest.raises(CannotTapError, match=rf"^final_norm cannot be captured: looked in {make.__name__} for a norm"):
        check_final_norm(model, structure)


@pytest.mark.parametrize("make", [LlamaLayer, GemmaLayer, GPTLayer, LFMLayer])
def test_the_parts_of_a_layer_are_found_and_add_up(tap, make, monkeypatch):
    layers = [make() for _ in range(3)]
    model = nn.Sequential(*layers) if make is GPTLayer else LlamaModel(layers)
    structure, numbered, run = watch(model)
    check_sum(sum_error(model, numbered, is_attention, structure, run))
    hook_layers(numbered, structure, sites=(POST, PRE, ATTN, MLP))
    monkeypatch.setattr(Attention, "found", 0.0)  # as in the service
    with torch.no_grad():
        run()
    seen = {point: hidden if residual is None else hidden + residual for point, hidden, residual in tap.seen}
    assert sorted(seen) == list(range(10))
    for index in range(3):
        torch.testing.assert_close(seen[index] + seen[4 + index] + seen[7 + index], seen[index + 1])


class CohereLayer(nn.Module):
    """A layer that passes on a second tensor that nothing reads. The next layer starts a new one."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp = RMSNorm(), Attention(), nn.Linear(4, 4)

    def forward(self, positions, hidden, residual):
        residual = hidden
        normed = self.input_layernorm(hidden)
        return residual + self.self_attn(positions, normed) + self.mlp(normed), residual


class CohereModel(LlamaModel):
    def forward(self, hidden):
        residual = None
        for layer in self.layers:
            hidden, residual = layer(None, hidden, residual)
        return self.norm(hidden)


@pytest.mark.parametrize("count", [1, 3])
def test_a_residual_that_nothing_reads_is_not_added(tap, count):
    model = CohereModel([CohereLayer() for _ in range(count)])
    structure, numbered, run = watch(model)
    assert not structure.adds_residual
    assert structure.norms == {}
    hook_layers(numbered, structure)
    run()
    assert [residual for _, _, residual in tap.seen] == [None] * count


@pytest.mark.parametrize("count", [1, 3])
def test_a_residual_that_is_read_is_added(count):
    assert watch(LlamaModel([LlamaLayer() for _ in range(count)]))[0].adds_residual


@pytest.mark.parametrize("make", [CohereLayer, LlamaLayer])
def test_uninitialised_memory_does_not_affect_the_residual_check(make):
    class Careless(make):
        def forward(self, positions, hidden, residual):
            hidden, residual = super().forward(positions, hidden, residual)
            return hidden + torch.randn(3, 4), residual

    model = (CohereModel if make is CohereLayer else LlamaModel)([Careless() for _ in range(3)])
    assert watch(model)[0].adds_residual == (make is LlamaLayer)


def test_rows_behind_a_batch_dimension_are_tapped(tap):
    model = nn.Sequential(nn.Unflatten(0, (1, 3)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    numbered = dict(enumerate(model[1]))
    with torch.no_grad():
        plain = model(torch.ones(3, 4))
        structure = observe(model, numbered, lambda module: False, lambda: model(torch.ones(3, 4)))
        hook_layers({1: numbered[1]}, structure)
        tap.push = 1.0
        torch.testing.assert_close(model(torch.ones(3, 4)), plain + 1.0)
    assert [hidden.shape for _, hidden, _ in tap.seen] == [(3, 4)]


class OlmoLayer(LlamaLayer):
    """A layer whose attention and MLP take the stream itself."""

    def forward(self, positions, hidden, residual):
        hidden = hidden if residual is None else hidden + residual
        hidden = hidden + self.input_layernorm(self.self_attn(positions, hidden))
        return self.post_attention_layernorm(self.mlp(hidden)), hidden


def inputs_of(model, tap, monkeypatch):
    """What the taps see in each layer: the stream before it, in its middle and after it, and what its parts take."""
    structure, numbered, run = watch(model)
    check_middles(numbered, structure)
    check_middle(middle_error(model, numbered, is_attention, structure, run))
    hook_layers(numbered, structure, sites=(POST, PRE, ATTN, ATTN_IN, MID, MLP_IN))
    monkeypatch.setattr(Attention, "found", 0.0)
    with torch.no_grad():
        run()
    seen = {point: hidden if residual is None else hidden + residual for point, hidden, residual in tap.seen}
    count = len(numbered)
    return [
        [seen[index], seen[index + 1], *(seen[1 + kind * count + index] for kind in (1, 3, 4, 5))]
        for index in range(count)
    ]


@pytest.mark.parametrize("make", [LlamaLayer, GemmaLayer, GPTLayer, LFMLayer, OlmoLayer])
def test_what_the_parts_of_a_layer_take_is_found(tap, make, monkeypatch):
    layers = [make() for _ in range(3)]
    model = nn.Sequential(*layers) if make is GPTLayer else LlamaModel(layers)
    norms = {
        GemmaLayer: ("input_layernorm", "pre_feedforward_layernorm"),
        GPTLayer: ("ln_1", "ln_2"),
        OlmoLayer: (None, None),
    }.get(make, ("input_layernorm", "post_attention_layernorm"))
    with torch.no_grad():
        for layer, (before, after, attention, taken, middle, taken_by_mlp) in zip(
            layers, inputs_of(model, tap, monkeypatch), strict=True
        ):
            torch.testing.assert_close(middle, before + attention)
            for norm, stream, got in zip(norms, (before, middle), (taken, taken_by_mlp), strict=True):
                torch.testing.assert_close(got, getattr(layer, norm).forward(stream) if norm else stream)
            last = {GemmaLayer: "post_feedforward_layernorm", OlmoLayer: "post_attention_layernorm"}.get(make)
            added = layer.mlp.forward(taken_by_mlp)
            torch.testing.assert_close(after, middle + (getattr(layer, last).forward(added) if last else added))


def test_the_middle_is_found_where_the_parts_are_scaled(tap, monkeypatch):
    layers = [LlamaLayer(scale=0.5), LlamaLayer(scale=0.5)]
    for layer, (_, after, _, _, middle, taken) in zip(
        layers, inputs_of(LlamaModel(layers), tap, monkeypatch), strict=True
    ):
        with torch.no_grad():
            torch.testing.assert_close(after, middle + 0.5 * layer.mlp.forward(taken))


class ParallelLayer(GPTLayer):
    """Computes attention and MLP from the stream before the layer, each with a norm of its own."""

    def forward(self, hidden):
        attention = self.attn(None, self.ln_1(hidden))
        return hidden + attention + self.mlp(self.ln_2(hidden))


class OneNormLayer(GPTLayer):
    """Computes attention and MLP from one norm's output."""

    def forward(self, hidden):
        normed = self.ln_1(hidden)
        return hidden + self.attn(None, normed) + self.mlp(normed)


def test_parallel_layers_have_no_middle():
    structure, numbered, run = watch(model := nn.Sequential(ParallelLayer(), ParallelLayer()))
    with pytest.raises(CannotTapError, match=r"resid_mid cannot be captured.* in layers \[0, 1\] no tensor is both"):
        check_middle(middle_error(model, numbered, is_attention, structure, run))
    structure, numbered, run = watch(nn.Sequential(OneNormLayer(), OneNormLayer()))
    with pytest.raises(CannotTapError, match=r"resid_mid cannot be captured.* in OneNormLayer .* none \(layers"):
        check_middles(numbered, structure)
    assert structure.mlp_inputs.keys() == structure.attention_inputs.keys() == {0, 1}


@pytest.mark.parametrize("make", [LlamaLayer, ParallelLayer])
def test_the_checks_hold_in_deep_models_that_round(make):
    """The checks give each layer numbers to add, so that in 100 layers the stream becomes 100 times as long."""
    layers = [make() for _ in range(100)]
    model = (LlamaModel(layers) if make is LlamaLayer else nn.Sequential(*layers)).to(torch.bfloat16)
    structure, numbered, run = watch(model, torch.bfloat16)
    check_sum(sum_error(model, numbered, is_attention, structure, run))
    errors = [middle_error(model, numbered, is_attention, structure, run, changed=changed) for changed in (False, True)]
    if make is LlamaLayer:
        check_middle(errors[0])
        assert is_middle(errors[1])
    else:
        with pytest.raises(CannotTapError, match="no tensor is both"):
            check_middle(errors[0])


def test_modules_that_two_layers_share_have_no_inputs():
    layers = [LlamaLayer(), LlamaLayer(), LlamaLayer()]
    layers[1].mlp = layers[0].mlp
    structure, numbered, _ = watch(LlamaModel(layers))
    assert structure.mlp_inputs.keys() == {2}
    with pytest.raises(CannotTapError, match=r"mlp_in cannot be captured.* found none \(layers \[0, 1\]\)"):
        hook_layers(numbered, structure, sites=(MLP_IN,))


def test_a_state_space_beside_the_attention_is_not_taken_for_the_mlp(tap, monkeypatch):
    layers = [FalconH1Layer(), FalconH1Layer()]
    with torch.no_grad():
        for layer, (_, _, _, _, middle, taken) in zip(
            layers, inputs_of(nn.Sequential(*layers), tap, monkeypatch), strict=True
        ):
            torch.testing.assert_close(taken, layer.ln_2.forward(middle))


def test_layers_that_hand_on_more_than_a_row_a_token_are_refused():
    model = nn.Sequential(nn.Unflatten(0, (3, 1)), nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(CannotTapError, match=r"Sequential cannot be tapped.* 1\.0 \(Linear\) returns \(3, 1, 4\)\."):
        observe(model, {0: model[1][0]}, lambda module: False, lambda: model(torch.ones(3, 4)))


def test_parts_that_the_model_scales_are_refused():
    with pytest.raises(CannotTapError, match=r"attn_out and mlp_out cannot be captured.* layer 1 the sums are off by"):
        check_sums(LlamaModel([LlamaLayer(), LlamaLayer(scale=0.5)]))


class FalconH1Layer(GPTLayer):
    """A layer that adds attention and a state space, side by side."""

    def __init__(self):
        super().__init__()
        self.mamba = Attention()

    def forward(self, hidden):
        normed = self.ln_1(hidden)
        hidden = hidden + self.attn(None, normed) + self.mamba(None, normed)
        return hidden + self.mlp(self.ln_2(hidden))


class LinearThatReturnsItsBias(nn.Linear):
    def forward(self, hidden):
        return hidden @ self.weight.T, self.bias


class FalconLayer(GPTLayer):
    """A layer that adds the bias of its MLP."""

    def __init__(self):
        super().__init__()
        self.mlp = LinearThatReturnsItsBias(4, 4)

    def forward(self, hidden):
        hidden = hidden + self.attn(None, self.ln_1(hidden))
        output, bias = self.mlp(self.ln_2(hidden))
        return hidden + output + bias


@pytest.mark.parametrize("make", [FalconH1Layer, FalconLayer])
def test_what_a_layer_adds_besides_its_parts_is_noticed_however_small(make, monkeypatch):
    monkeypatch.setattr(Attention, "found", 0.0)
    model = nn.Sequential(make(), make())
    for parameter in [*model[0].parameters(), *model[1].parameters()]:
        nn.init.constant_(parameter, 1e-4)
    with pytest.raises(CannotTapError, match="the sums are off by"):
        check_sums(model)


def test_layers_without_an_mlp_have_neither_part():
    structure, numbered, _ = watch(LlamaModel([MambaLayer(), MambaLayer()]))
    with pytest.raises(CannotTapError, match=r"attn_out and mlp_out cannot be captured.* in MambaLayer .*'mixer'"):
        check_parts(numbered, structure)


def test_sites_that_are_not_found_are_refused_by_name():
    model = Decoder(layers(2))
    structure, numbered, _ = watch(model)
    with pytest.raises(CannotTapError, match=r"mlp_out cannot be captured.* in Layer .*\['linear'\]"):
        hook_layers(numbered, structure, sites=(MLP,))
    with pytest.raises(CannotTapError, match="resid_pre cannot be captured"):
        hook_layers({0: Layer()}, sites=(PRE,))


needs_headers = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="inductor needs Python's headers"
)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_headers)])
def test_the_op_stays_in_the_compiled_graph_as_data_changes_behind_it(tap, backend):
    """One compiled function captures in one call, steers in the next, and does nothing in the third."""
    model = Decoder(layers(2))
    hook_layers(dict(enumerate(model.layers)))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.ones(3, 4)
    with torch.no_grad():
        plain = compiled(x)
        assert tap.points() == [1, 2]
        tap.push = 10.0
        steered = compiled(x)
        torch.testing.assert_close(steered, model(x))
        assert not torch.allclose(steered, plain)
        op.install([Recorder()])
        torch.testing.assert_close(compiled(x), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
