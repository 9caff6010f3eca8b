"""The rpc part of the steering benchmark, with the service's servicer in a separate process."""

import numpy as np

import residuum
from bench.steering.rpc import RpcJob, find_bytes, measure, put_bytes, show


def test_a_vector_is_sent_once():
    part = measure(RpcJob(hidden=(32, 64), vectors=(0, 1, 3), repeats=3))
    costs = {(cost["what"], cost["hidden"], cost["vectors"]): cost for cost in part["costs"]}
    assert {key[1] for key in costs} == {32, 64}
    register = {count: costs["RegisterRequest", 64, count] for count in (0, 1, 3)}
    assert register[0]["first_bytes"] == register[0]["later_bytes"]
    for count in (1, 3):
        put = costs["put_vectors, later by another client", 64, count]
        assert put["first_bytes"] > 64 * 4 * count > put["later_bytes"] > 32 * count
        assert costs["put_vectors, later by the same client", 64, count]["later_bytes"] == 0
        assert register[count]["first_bytes"] - register[count]["later_bytes"] > 64 * 4 * count
    assert all(len(cost[name]) == 3 for cost in part["costs"] for name in ("first_samples_us", "later_samples_us"))
    assert all(cost["first_us"] > 0 and cost["later_us"] > 0 for cost in part["costs"])
    (printed,) = show(part)
    assert len(printed.splitlines()) == 1 + len(costs)


def test_bytes_are_those_of_the_messages():
    vectors = [residuum.Vector.from_array(np.full(8, number, dtype=np.float32)) for number in range(2)]
    assert find_bytes(vectors) == 2 * (2 + 32)
    assert put_bytes(vectors) > 2 * (32 + 32)
