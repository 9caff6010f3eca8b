"""The arithmetic of probes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from residuum.v1 import probe_pb2
from residuum.wire.probes.arithmetic import activate, erf, evaluate, is_valid_probe_name, num_outputs, problem_of_mlp

RELU = probe_pb2.HIDDEN_ACTIVATION_RELU
NONE = probe_pb2.PROBE_ACTIVATION_UNSPECIFIED
SIGMOID = probe_pb2.PROBE_ACTIVATION_SIGMOID
SOFTMAX = probe_pb2.PROBE_ACTIVATION_SOFTMAX

OUTPUTS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def sigmoid(value: float) -> float:
    """Return the logistic function, written in another way than in the code."""
    return 0.5 * (1.0 + math.tanh(0.5 * value))


@given(OUTPUTS)
def test_no_activation_keeps_the_outputs(outputs: np.ndarray) -> None:
    np.testing.assert_array_equal(activate(outputs, NONE), outputs)


@given(OUTPUTS)
def test_the_sigmoid_of_any_output_is_exact_and_from_0_to_1(outputs: np.ndarray) -> None:
    scores = activate(outputs, SIGMOID)
    assert scores.dtype == np.float32
    assert scores.shape == outputs.shape
    assert np.all((scores >= 0) & (scores <= 1))
    expected = np.vectorize(sigmoid)(outputs.astype(np.float64))
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-15)


@given(OUTPUTS)
def test_a_softmax_of_any_outputs_adds_up_to_1(outputs: np.ndarray) -> None:
    scores = activate(outputs, SOFTMAX)
    assert scores.dtype == np.float32
    assert np.all((scores >= 0) & (scores <= 1))
    np.testing.assert_allclose(scores.sum(axis=-1), 1.0, rtol=1e-6)
    strongest = np.take_along_axis(scores, outputs.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    np.testing.assert_array_equal(strongest, scores.max(axis=-1))


@given(st.floats(-60, 60, width=32), st.floats(-60, 60, width=32))
def test_a_softmax_of_two_outputs_is_the_sigmoid_of_their_difference(first: float, second: float) -> None:
    pair = np.array([first, second], np.float32)
    np.testing.assert_allclose(activate(pair, SOFTMAX)[0], sigmoid(first - second), rtol=1e-5, atol=1e-14)


def test_small_probabilities_keep_their_precision() -> None:
    scores = activate(np.array([-50.0, -80.0], np.float32), SIGMOID)
    np.testing.assert_allclose(scores, [math.exp(-50), math.exp(-80)], rtol=1e-6)


@pytest.mark.parametrize("activation", [NONE, SIGMOID, SOFTMAX])
def test_nan_stays_nan(activation: probe_pb2.ProbeActivation.ValueType) -> None:
    assert np.isnan(activate(np.array([np.nan], np.float32), activation)).all()


def test_infinite_outputs_have_a_sigmoid() -> None:
    np.testing.assert_array_equal(activate(np.array([np.inf, -np.inf], np.float32), SIGMOID), [1, 0])


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="99 is not an activation"):
        activate(np.zeros(1, np.float32), 99)  # type: ignore[arg-type]


def test_scores_are_inner_products_plus_biases() -> None:
    rng = np.random.default_rng(0)
    rows, weights = rng.normal(size=(7, 32)).astype(np.float32), rng.normal(size=(3, 32)).astype(np.float32)
    biases = rng.normal(size=3).astype(np.float32)
    found = evaluate(probe_pb2.Probe(), rows @ weights.T + biases)
    assert found.dtype == np.float32
    assert found.shape == (7, 3)
    exact = rows.astype(np.float64) @ weights.astype(np.float64).T + biases
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_rows_beyond_float32_give_infinite_outputs_without_a_warning() -> None:
    huge = np.full((1, 2), np.inf, np.float32)
    layer = probe_pb2.ProbeLayer(weights=np.ones(2, "<f4").tobytes(), biases=[0], activation=RELU)
    assert np.isinf(evaluate(probe_pb2.Probe(mlp=[layer]), huge)).all()


@pytest.mark.parametrize("name", ["probe", "a", "A.b_c-9", "x" * 64, "-", "."])
def test_valid_names(name: str) -> None:
    assert is_valid_probe_name(name)


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "é", "a\n", "a:b"])
def test_invalid_names(name: str) -> None:
    assert not is_valid_probe_name(name)


HIDDEN = {
    probe_pb2.HIDDEN_ACTIVATION_UNSPECIFIED: lambda x: x,
    RELU: lambda x: x if x > 0 else 0.0,
    probe_pb2.HIDDEN_ACTIVATION_TANH: math.tanh,
    probe_pb2.HIDDEN_ACTIVATION_SIGMOID: lambda x: 1 / (1 + math.exp(-x)),
    probe_pb2.HIDDEN_ACTIVATION_GELU: lambda x: x / 2 * math.erfc(-x / math.sqrt(2)),
}


def layer(rng: np.random.Generator, inputs: int, outputs: int, activation: int) -> probe_pb2.ProbeLayer:
    weights = rng.normal(size=(outputs, inputs)).astype("<f4")
    return probe_pb2.ProbeLayer(weights=weights.tobytes(), biases=rng.normal(size=outputs), activation=activation)


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(1, 5), st.sampled_from([*HIDDEN])), max_size=2))
def test_an_mlp_applies_its_layers_in_turn(seed: int, shape: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(seed)
    probe, inputs = probe_pb2.Probe(outputs=[probe_pb2.ProbeOutput()] * 3), 3
    for outputs, activation in shape:
        probe.mlp.append(layer(rng, inputs, outputs, activation))
        inputs = outputs
    assert problem_of_mlp(probe) == ""
    assert num_outputs(probe) == inputs
    first = (rng.normal(size=(4, 3)) * 5).astype(np.float32)
    found = evaluate(probe, first)
    assert found.dtype == np.float32
    for row, scores in zip(first, found, strict=True):
        values = [float(value) for value in row]
        for item in probe.mlp:
            weights = np.frombuffer(item.weights, "<f4").reshape(len(item.biases), -1)
            hidden = [HIDDEN[item.activation](value) for value in values]
            values = [
                math.fsum(float(w) * h for w, h in zip(line, hidden, strict=True)) + bias
                for line, bias in zip(weights, item.biases, strict=True)
            ]
        np.testing.assert_allclose(scores, values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([probe_pb2.ProbeLayer(weights=bytes(8), biases=[0])] * 3, "3 layers after the first; at most 2"),
        ([probe_pb2.ProbeLayer(weights=bytes(8))], "layer 2 has 0 outputs"),
        ([probe_pb2.ProbeLayer(weights=bytes(8), biases=[0] * 65)], "layer 2 has 65 outputs"),
        ([probe_pb2.ProbeLayer(weights=bytes(7), biases=[0])], "layer 2 has weights of 1.75 inputs"),
        ([probe_pb2.ProbeLayer(weights=b"\xff" * 8, biases=[0])], "layer 2 are not all finite"),
        ([probe_pb2.ProbeLayer(weights=bytes(8), biases=[math.inf])], "layer 2 are not all finite"),
        ([probe_pb2.ProbeLayer(weights=bytes(8), biases=[0], activation=9)], "activation 9 of its layer 2"),
        (
            [probe_pb2.ProbeLayer(weights=bytes(8), biases=[0]), probe_pb2.ProbeLayer(weights=bytes(8), biases=[0])],
            "layer 3 has weights of 2 inputs, but the layer before has 1 outputs",
        ),
    ],
)
def test_what_is_wrong_with_an_mlp(layers: list[probe_pb2.ProbeLayer], words: str) -> None:
    probe = probe_pb2.Probe(outputs=[probe_pb2.ProbeOutput()] * 2, mlp=layers)
    assert words in problem_of_mlp(probe)


def test_the_error_function_is_exact_enough_for_float64_sums() -> None:
    values = np.concatenate([np.random.default_rng(0).uniform(-7, 7, 20_000), [0.0, -0.0, 6.0, 1e300, math.inf]])
    np.testing.assert_allclose(erf(values), [math.erf(value) for value in values], rtol=0, atol=1e-12)
    assert np.isnan(erf(np.array([math.nan])))[0]
    assert erf(np.array([-math.inf]))[0] == -1
