"""Finding decoder layers by structure, hooking them, and the op in a compiled graph."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

from inference_svc.taps import op
from inference_svc.taps.model import CannotTapError, find_decoder_layers, hook_layers


class PPMissingLayer(nn.Identity):
    """Named as vLLM's."""


class Layer(nn.Module):
    """A decoder layer that hands on (hidden, residual), as vLLM's do."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden, residual):
        return self.linear(hidden), hidden + residual


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


class Recorder:
    """A tap that remembers what it sees, and adds `push` to it."""

    def __init__(self, push=0.0):
        self.seen = []
        self.push = push

    def tap(self, hidden, residual, layer):
        self.seen.append((layer, hidden.clone(), None if residual is None else residual.clone()))
        hidden += self.push


@pytest.fixture
def tap(monkeypatch):
    """Install a recorder as the process's tap, for one test."""
    monkeypatch.setattr(op._Current, "tap", None)
    recorder = Recorder()
    op.install(recorder)
    return recorder


def layers(count):
    return [Layer() for _ in range(count)]


def test_the_one_list_of_the_right_length_is_found():
    model = Decoder(layers(3), heads=nn.ModuleList(layers(2)))
    found = find_decoder_layers(nn.ModuleDict({"model": model}), 3)
    assert list(found) == [0, 1, 2]
    assert [found[index] for index in found] == list(model.layers)


def test_lists_inside_the_layers_do_not_count():
    model = Decoder([nn.ModuleDict({"experts": nn.ModuleList(layers(2))}) for _ in range(2)])
    assert list(find_decoder_layers(model, 2).values()) == list(model.layers)


def test_two_lists_of_the_right_length_are_refused_by_name():
    model = Decoder(layers(2), encoder=nn.ModuleList(layers(2)))
    with pytest.raises(CannotTapError, match=r"Decoder cannot be tapped.* 2 .*\['encoder', 'layers'\]"):
        find_decoder_layers(model, 2)


def test_a_model_without_such_a_list_is_refused():
    with pytest.raises(CannotTapError, match="of 7 decoder layers, found none"):
        find_decoder_layers(Decoder(layers(2)), 7)


def test_layers_of_other_stages_are_left_out_and_keep_their_numbers():
    model = Decoder([PPMissingLayer(), *layers(2), PPMissingLayer()])
    assert list(find_decoder_layers(model, 4)) == [1, 2]


def test_hooks_pass_hidden_and_residual_of_each_layer(tap):
    model = Decoder(layers(2))
    hook_layers(dict(enumerate(model.layers)))
    model(torch.ones(3, 4))
    assert [layer for layer, _, _ in tap.seen] == [0, 1]
    hidden = model.layers[0].linear(torch.ones(3, 4))
    assert torch.equal(tap.seen[0][1], hidden)
    assert torch.equal(tap.seen[0][2], torch.ones(3, 4))


def test_hooks_take_layers_that_return_one_tensor(tap):
    layer = nn.Linear(4, 4)
    hook_layers({5: layer})
    output = layer(torch.ones(2, 4))
    ((index, hidden, residual),) = tap.seen
    assert (index, residual) == (5, None)
    assert torch.equal(hidden, output)


def test_what_the_tap_changes_the_next_layer_sees(tap):
    model = Decoder(layers(2))
    hook_layers({0: model.layers[0]})
    with torch.no_grad():
        before = model(torch.ones(1, 4))
        tap.push = 10.0
        assert not torch.allclose(model(torch.ones(1, 4)), before)


def test_without_a_tap_the_op_does_nothing(monkeypatch):
    monkeypatch.setattr(op._Current, "tap", None)
    hidden = torch.ones(1, 4)
    op.call(hidden, None, 0)
    assert torch.equal(hidden, torch.ones(1, 4))


needs_headers = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="inductor needs Python's headers"
)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_headers)])
def test_the_op_stays_in_the_compiled_graph_as_data_changes_behind_it(tap, backend):
    """One compiled function: it captures in one call, steers in the next, and does nothing in a third."""
    model = Decoder(layers(2))
    hook_layers(dict(enumerate(model.layers)))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.ones(3, 4)
    with torch.no_grad():
        plain = compiled(x)
        assert [layer for layer, _, _ in tap.seen] == [0, 1]
        tap.push = 10.0
        steered = compiled(x)
        torch.testing.assert_close(steered, model(x))
        assert not torch.allclose(steered, plain)
        op.install(Recorder())
        torch.testing.assert_close(compiled(x), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
