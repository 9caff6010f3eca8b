import math

import pytest
import torch

from bench.steering import ways
from bench.steering.kernel import LAYERS, plan_of
from bench.steering.ways import Batch, expect, expect_norm, expect_sum, worst
from inference_svc.taps.plan import STEERING_KINDS, Gate, Kind

REQUESTS, ROWS_EACH, HIDDEN = 6, 5, 40


def batch_of(kind, unique):
    torch.manual_seed(unique)
    return Batch(kind, REQUESTS, ROWS_EACH, torch.randn(unique, HIDDEN))


def states():
    torch.manual_seed(7)
    return torch.randn(REQUESTS * ROWS_EACH, HIDDEN).bfloat16()


def test_requests_use_the_operations_in_rotation():
    batch = batch_of(Kind.ADD, 4)
    assert batch.operation_of_row.tolist() == [row // ROWS_EACH % 4 for row in range(REQUESTS * ROWS_EACH)]
    assert [plan_of(batch, index).operations[0].row for index in range(REQUESTS)] == [0, 1, 2, 3, 0, 1]


def test_a_plan_steers_after_every_layer():
    (operation,) = plan_of(batch_of(Kind.CAP, 2), 1).operations
    assert operation.layers == tuple(range(LAYERS))
    assert (operation.low, operation.high) == (ways.CAP_LOW, ways.CAP_HIGH)


def test_the_reference_follows_the_definitions_of_the_operations():
    vectors = torch.tensor([[2.0, 0.0], [0.0, -3.0]])
    stream = torch.tensor([[1.0, 5.0], [4.0, -0.25]]).double()

    def after(kind):
        return ways.steered(Batch(kind, 2, 1, vectors), stream)[0].tolist()

    assert after(Kind.ADD) == [[2.0, 5.0], [4.0, -1.75]]
    assert after(Kind.ABLATE) == [[0.0, 5.0], [4.0, 0.0]]
    assert after(Kind.CAP) == [[0.5, 5.0], [4.0, -0.25]]


def test_the_reference_of_a_gated_operation_changes_rows_in_part():
    gates = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    batch = Batch(Kind.ADD, 2, 1, torch.tensor([[2.0, 0.0], [0.0, -3.0]]), gates)
    after, _ = ways.steered(batch, torch.tensor([[1.0, 5.0], [-4.0, 2.0]]).double())
    opened = [1 / (1 + math.exp(-ways.GATE_SHARPNESS * projection)) for projection in (5.0, -4.0)]
    assert after.flatten().tolist() == pytest.approx([1 + opened[0], 5.0, -4.0, 2 - 1.5 * opened[1]])
    assert plan_of(batch, 1).operations[0].gate == Gate(3, 0.0, ways.GATE_SHARPNESS)


def test_steering_applies_to_the_sum_and_changes_only_hidden():
    batch = batch_of(Kind.ABLATE, 3)
    hidden, residual = states(), states().flip(0)
    total = ways.steered(batch, hidden.double() + residual.double())[0]
    assert torch.allclose(expect(batch, hidden, residual).value + residual.double(), total)
    assert torch.allclose(expect_sum(batch, hidden, residual).value, total)
    assert torch.equal(expect_sum(None, hidden, residual).value, hidden.double() + residual.double())


@pytest.mark.parametrize("kind", STEERING_KINDS)
@pytest.mark.parametrize("unique", [1, 3, 6])
def test_the_alternatives_agree_with_the_reference(kind, unique):
    batch = batch_of(kind, unique)
    expected = expect(batch, states())
    looped, gathered = states(), states()
    vectors = [ways.vector_for(kind, batch.vectors[index % unique], torch.bfloat16) for index in range(REQUESTS)]
    ways.loop(kind, ROWS_EACH)(looped, vectors)
    ways.gather_scatter(kind)(gathered, ways.groups_of(batch, torch.bfloat16))
    assert worst(looped, expected, exact=False) <= 1
    assert worst(gathered, expected, exact=False) <= 1


@pytest.mark.parametrize("kind", STEERING_KINDS)
def test_float32_arithmetic_is_allowed_one_rounding(kind):
    batch = batch_of(kind, 3)
    expected = expect(batch, states())
    assert worst(expected.value.bfloat16(), expected, exact=True) <= 1
    off = expected.value * (1 + 2.5 * ways.ROUNDING)
    assert worst(off.bfloat16(), expected, exact=True) > 1


@pytest.mark.parametrize("kind", STEERING_KINDS)
def test_a_wrong_vector_is_detected(kind):
    batch = batch_of(kind, 3)
    other = Batch(kind, REQUESTS, ROWS_EACH, batch.vectors.roll(1, 0))
    got = expect(other, states()).value.bfloat16()
    assert worst(got, expect(batch, states()), exact=False) > 1
    assert worst(torch.full_like(got, float("nan")), expect(batch, states()), exact=False) == float("inf")


def test_the_norm_equals_vllms():
    weight = torch.rand(HIDDEN).bfloat16()
    stream = states().double()
    expected = torch.nn.functional.rms_norm(stream, (HIDDEN,), weight.double(), 1e-6)
    assert torch.allclose(expect_norm(stream, weight, 1e-6).value, expected)
