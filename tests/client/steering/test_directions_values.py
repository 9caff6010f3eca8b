"""Directions: their content, and the steering made from them."""

from __future__ import annotations

import numpy as np
import pytest

import residuum
from residuum import directions
from tests.client.support.captured import activations

RANDOM = np.random.default_rng(3)
VECTORS = {layer: RANDOM.standard_normal(6).astype(np.float32) for layer in (4, 2, 9)}


@pytest.fixture
def three():
    return residuum.Directions(VECTORS, origin=directions.Origin(model="tiny"))


def test_a_mapping_of_vectors(three):
    assert list(three) == [2, 4, 9] == list(three.layers)
    assert len(three) == 3
    assert three.hidden_size == 6
    assert 4 in three
    assert 3 not in three
    assert three.get(3) is None
    assert three[4] == residuum.Vector(VECTORS[4])
    assert [vector.values.tolist() for vector in three.values()] == [VECTORS[layer].tolist() for layer in (2, 4, 9)]
    with pytest.raises(KeyError, match=r"layer 3\. Choose among \[2, 4, 9\]"):
        three[3]
    assert repr(three) == "Directions(3 layers × 6, resid_post of 'tiny')"


def test_equality(three):
    same = residuum.Directions(dict(three), origin=directions.Origin(model="tiny"))
    assert same == three
    assert hash(same) == hash(three)
    assert residuum.Directions(three) != three, "of another origin"
    assert residuum.Directions({2: VECTORS[2]}) != three
    assert three != VECTORS


@pytest.mark.parametrize(
    ("vectors", "site", "kind", "message"),
    [
        ({}, "resid_post", residuum.InvalidRequest, "at least one layer"),
        ({-1: [1.0]}, "resid_post", residuum.UnknownLayer, "count from 0"),
        ({"12": [1.0]}, "resid_post", TypeError, "whole number"),
        ({3: [np.nan]}, "resid_post", residuum.BadVector, "layer 3: 1 of 1"),
        ({3: [[1.0]]}, "resid_post", residuum.BadVector, "layer 3: "),
        (
            {3: [1.0], 5: [1.0, 2]},
            "resid_post",
            residuum.BadVector,
            "layer 5 has 2 elements, but that of layer 3 has 1",
        ),
        ({3: [1.0]}, "nowhere", residuum.UnknownSite, "'nowhere' is not a site"),
    ],
)
def test_invalid_directions_are_refused(vectors, site, kind, message):
    with pytest.raises(kind, match=message):
        residuum.Directions(vectors, origin=directions.Origin(site=site))


def test_add_at_each_layer(three):
    assert three.add(0.5, positions="generated") == [residuum.Add(three, scale=0.5, positions="generated")]
    assert three.add(layers=[9, 2]) == [residuum.Add({2: three[2], 9: three[9]})]
    assert three.add(layers="all") == three.add() == [residuum.Add(dict(three), scale=1.0)]


def test_layers_of_one_scale_are_one_operation(three):
    assert three.add({2: 1.0, 4: -2.0, 9: 1.0}) == [
        residuum.Add({2: three[2], 9: three[9]}, scale=1.0),
        residuum.Add({4: three[4]}, scale=-2.0),
    ]
    with pytest.raises(TypeError, match=r"Add: scale must be a number, not \[1\.0\]"):
        three.add([1.0])


def test_other_operations_at_each_layer(three):
    assert three.ablate(layers=4, keep_norm=True) == [residuum.Ablate({4: three[4]}, scale=1.0, keep_norm=True)]
    assert three.replace(3.0, layers=[2]) == [residuum.Replace({2: three[2]}, value=3.0)]
    assert three.replace({2: 1.0, 4: 2.0, 9: 2.0}, positions="prompt") == [
        residuum.Replace({2: three[2]}, value=1.0, positions="prompt"),
        residuum.Replace({4: three[4], 9: three[9]}, value=2.0, positions="prompt"),
    ]
    assert three.cap(max=3.0, layers=[2]) == [residuum.Cap({2: three[2]}, max=3.0)]
    bounds = three.cap(min={2: -1.0, 4: -2.0, 9: -3.0}, max=5.0)
    assert [(one.min, one.max) for one in bounds] == [(-1.0, 5.0), (-2.0, 5.0), (-3.0, 5.0)]
    with pytest.raises(residuum.InvalidRequest, match="min="):
        three.cap()
    with pytest.raises(residuum.InvalidRequest, match=r"max has no entry for layer 4.*layers="):
        three.cap(max={2: 1.0, 9: 1.0})


def test_a_zero_direction_is_reported_with_its_layer():
    with pytest.raises(residuum.BadVector, match="the vector of layer 4 is zero"):
        residuum.Directions({2: [1.0], 4: [0.0]}).ablate()


@pytest.mark.parametrize("operation", ["add", "ablate"])
def test_layers_without_a_direction(three, operation):
    with pytest.raises(residuum.UnknownLayer, match=r"for the layers \[3\]\. Choose among \[2, 4, 9\]"):
        getattr(three, operation)(layers=[2, 3])
    with pytest.raises(residuum.InvalidRequest, match="'some' does not name layers"):
        getattr(three, operation)(layers="some")
    with pytest.raises(residuum.InvalidRequest, match="at least one layer"):
        getattr(three, operation)(layers=[])


@pytest.mark.parametrize(
    "site", ["attn_in", "mlp_in", "q_pre", "k_pre", "router_logits", "routing_weights", "final_norm"]
)
def test_directions_of_rows_after_a_norm_cannot_steer(site):
    normed = residuum.Directions({1: VECTORS[2]}, origin=directions.Origin(site=site))
    with pytest.raises(residuum.UnknownSite, match=f"Directions of {site} cannot be applied"):
        normed.add()


def test_resid_pre_directions_steer_after_the_previous_layer():
    pre = residuum.Directions({0: VECTORS[2], 1: VECTORS[4]}, origin=directions.Origin(site="resid_pre"))
    assert pre.add(layers=[1]) == [residuum.Add({0: pre[1]})]
    later = residuum.Directions({1: VECTORS[2], 3: VECTORS[4]}, origin=directions.Origin(site="resid_pre"))
    assert residuum.Add(later) == residuum.Add({0: later[1], 2: later[3]})
    with pytest.raises(residuum.UnknownLayer, match=r"before the first layer.*Leave layer\s+0 out"):
        pre.add()
    with pytest.raises(residuum.UnknownLayer, match="before the first layer"):
        residuum.Add(pre)
    for site in ("attn_out", "mlp_out", "resid_post"):
        same = residuum.Directions(pre, origin=directions.Origin(site=site))
        assert same.add() == [residuum.Add(same)] == [residuum.Add({0: pre[0], 1: pre[1]})]


def test_normalized(three):
    unit = three.normalized()
    assert unit.origin == three.origin
    for layer, vector in unit.items():
        np.testing.assert_allclose(vector.values, VECTORS[layer] / np.linalg.norm(VECTORS[layer]), rtol=1e-6)
    with pytest.raises(residuum.BadVector, match="layer 1 is zero"):
        residuum.Directions({1: [0.0, 0.0]}).normalized()


def test_project(three):
    values = RANDOM.standard_normal((3, 5, 6))
    acts = activations(values, layers=[2, 3, 9])
    found = three.project(acts)
    assert sorted(found) == [2, 9]
    for layer in (2, 9):
        direction = VECTORS[layer].astype(np.float64)
        expected = acts[layer].astype(np.float64) @ direction / np.linalg.norm(direction)
        np.testing.assert_allclose(found[layer], expected, rtol=1e-6)
        assert found[layer].dtype == np.float64
    assert three.project({4: np.zeros(6)})[4].shape == ()
    assert three.project({4: np.zeros((2, 3, 6))})[4].shape == (2, 3)


def test_invalid_projections_are_refused(three):
    with pytest.raises(residuum.InvalidRequest, match="select"):
        three.project(activations(np.zeros((10, 1, 6)), sites=("mlp_out",)))
    for bare in (np.zeros((3, 6)), [np.zeros(6)] * 10):
        with pytest.raises(TypeError, match="mapping layer -> rows"):
            three.project(bare)
    with pytest.raises(residuum.InvalidRequest, match="none of these"):
        three.project({0: np.zeros((1, 6))})
    with pytest.raises(residuum.BadVector, match=r"layer 4 have the shape \[1, 5\]"):
        three.project({4: np.zeros((1, 5))})
    with pytest.raises(residuum.BadVector, match="zero"):
        residuum.Directions({4: np.zeros(6)}).project({4: np.zeros((1, 6))})


def test_directions_steer_and_are_sent_once(endpoint, peer):
    joy = residuum.Directions({layer: np.full(8, layer + 1.0) for layer in range(3)})
    with residuum.Client(endpoint) as client:
        assert client.put_vectors(joy).sent == 3
        assert client.put_vectors(joy.values()).sent == 0
        assert client.find_missing_vectors(joy) == []
        client.generate("a", max_tokens=1, steer=joy.add(0.5, layers=[1, 2]))
