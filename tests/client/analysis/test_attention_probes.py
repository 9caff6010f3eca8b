"""Attention probes: their arithmetic against torch, their files, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import residuum

RNG = np.random.default_rng(7)
WIDTH, ROWS = 12, RNG.normal(size=(30, 12)).astype(np.float32)


def eleuther(torch, heads, outputs, hidden=0, slopes=False):
    """A module with the parameters of EleutherAI's AttentionProbe, in float64."""
    module = torch.nn.Module()
    module.q = torch.nn.Linear(WIDTH, heads, bias=False)
    module.v = torch.nn.Linear(WIDTH, heads * (hidden or outputs))
    module.position_weight = torch.nn.Parameter(torch.randn(heads) / 3 if slopes else torch.zeros(heads))
    if hidden:
        module.o = torch.nn.Linear(hidden, outputs)
    return module.double()


def reference(torch, module, rows):
    """The outputs at every position, in float64: each position attends to those up to it."""
    x = torch.tensor(rows, dtype=torch.float64)
    logits = module.q(x) + torch.arange(len(rows))[:, None] * module.position_weight
    values = module.v(x).unflatten(-1, (logits.shape[1], -1))
    found = []
    for end in range(1, len(rows) + 1):
        pooled = (logits[:end].softmax(0)[..., None] * values[:end]).sum((0, 1))
        found.append(module.o(pooled.relu()) if hasattr(module, "o") else pooled)
    return torch.stack(found).detach().numpy()


@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize(("heads", "outputs"), [(1, 1), (4, 1), (3, 2), (16, 3)])
def test_a_probe_of_torch(heads, outputs, hidden):
    torch = pytest.importorskip("torch")
    torch.manual_seed(heads)
    module = eleuther(torch, heads, outputs, hidden, slopes=True)
    expected = reference(torch, module, ROWS)
    for source in (module, module.state_dict()):
        probe = residuum.Probe.from_torch(source, layer=3, name="lie")
        assert probe.num_outputs == outputs
        found = probe.score(ROWS).reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_queries_and_values():
    queries, values = RNG.normal(size=(2, WIDTH)), RNG.normal(size=(2, 3, WIDTH))
    slopes, bias = np.array([0.1, -0.2]), np.array([1.0, 2.0, 3.0])
    probe = residuum.Probe.from_attention(
        queries, values, bias, layer=1, activation="softmax", position_weights=slopes, output_names=["a", "b", "c"]
    )
    logits = ROWS @ queries.T + np.arange(len(ROWS))[:, None] * slopes
    weights = np.exp(logits - logits.max(axis=0))
    outputs = np.einsum("th,how,tw->to", weights / weights.sum(axis=0), values, ROWS).sum(axis=0) + bias
    powers = np.exp(outputs - outputs.max())
    np.testing.assert_allclose(probe.score(ROWS)[-1], powers / powers.sum(), atol=1e-6)
    assert (probe.num_outputs, probe.width, "attention with 2 heads" in repr(probe)) == (3, WIDTH, True)


def test_one_head_whose_query_is_zero_is_the_mean_of_a_linear_probe():
    direction = RNG.normal(size=WIDTH)
    linear = residuum.Probe(direction, 0.5, layer=1)
    probe = residuum.Probe.from_attention(np.zeros(WIDTH), direction, 0.5, layer=1)
    np.testing.assert_allclose(probe.score(ROWS), residuum.RollingMean().apply(linear.score(ROWS)), atol=1e-6)
    assert probe.score(ROWS[0]) == pytest.approx(linear.score(ROWS[0]))


@pytest.mark.parametrize("slopes", [None, [0.5, 0.25]])
def test_files(tmp_path, slopes):
    probe = residuum.Probe.from_attention(
        RNG.normal(size=(2, WIDTH)), RNG.normal(size=(2, WIDTH)), layer=1, position_weights=slopes,
        smooth=residuum.EMA(0.5), mlp=[residuum.ProbeLayer([[2.0]], 1.0)], name="x",
    )  # fmt: skip
    probe.save(tmp_path / "x.safetensors")
    assert residuum.Probe.load(tmp_path / "x.safetensors") == probe
    assert {probe, dataclasses.replace(probe)} == {probe}
    assert probe != dataclasses.replace(probe, attention=residuum.ProbeAttention(2, [1.0, 2.0]))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: residuum.ProbeAttention(0), residuum.InvalidRequest, "from 1 to 16, not 0"),
        (lambda: residuum.ProbeAttention(17), residuum.InvalidRequest, "not 17"),
        (lambda: residuum.ProbeAttention(1.5), TypeError, "whole number"),
        (lambda: residuum.ProbeAttention(2, [1.0]), residuum.InvalidRequest, "2 finite numbers"),
        (lambda: residuum.ProbeAttention(1, [np.nan]), residuum.ResiduumError, "finite"),
        (
            lambda: residuum.Probe(np.ones((3, 4)), layer=1, attention=residuum.ProbeAttention(2)),
            residuum.InvalidRequest, "2 rows for the logits.*not 3 rows",
        ),
        (lambda: residuum.Probe(np.ones(4), layer=1, attention=1), TypeError, "ProbeAttention, not 1"),
        (
            lambda: residuum.Probe.from_attention(np.ones((2, 4)), np.ones((3, 4)), layer=1),
            residuum.BadVector, r"not \[2, 4\] and \[3, 4\]",
        ),
        (
            lambda: residuum.Probe.from_attention(np.full((1, 4), np.nan), np.ones((1, 4)), layer=1),
            residuum.BadVector, "finite",
        ),
        (
            lambda: residuum.Probe.from_attention(np.ones(4), np.ones(4), layer=1, activation="softmax"),
            residuum.InvalidRequest, "softmax of one output",
        ),
        (
            lambda: residuum.Probe.from_attention(np.ones(4), np.ones(4), layer=1).score(np.ones((2, 3, 4))),
            residuum.BadVector, "one sequence",
        ),
        (lambda: residuum.Probe.from_torch({"q.weight": np.ones((1, 4))}, layer=1), TypeError, "'v.weight' is missing"),
        (
            lambda: residuum.Probe.from_torch(
                {"q.weight": np.ones((1, 4)), "v.weight": np.ones((1, 4)), "k.weight": 0}, layer=1
            ),
            TypeError, "'k.weight' is not one",
        ),
        (
            lambda: residuum.Probe.from_torch({"q.weight": np.ones((2, 4)), "v.weight": np.ones((2, 5))}, layer=1),
            residuum.InvalidRequest, "shapes",
        ),
        (
            lambda: residuum.Probe.from_torch({"q.weight": np.ones((2, 4)), "v.weight": np.ones((3, 4))}, layer=1),
            residuum.InvalidRequest, "2 heads",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_probe_of_torch_with_tanh_is_refused():
    torch = pytest.importorskip("torch")
    module = eleuther(torch, 1, 1)
    module.use_tanh = True
    with pytest.raises(residuum.InvalidRequest, match="use_tanh"):
        residuum.Probe.from_torch(module, layer=1)
