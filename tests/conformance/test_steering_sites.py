"""Steering at sites inside the layers: every row of every site equals the reference, changed at the same place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import residuum
from tests.conformance.rows import ALL, SITES, check_capture, make_prompt
from tests.conformance.steering import ablate, add, cap, from_position, in_turn, keeping_norm, replace, tensor
from tests.reference.hf import relative_error

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(80), 60)
STEERABLE = ("attn_out", "resid_mid", "mlp_out", "z", "mlp_act")

WAYS = {
    "add": (lambda v, at: residuum.Add(v, scale=0.7, **at), lambda v: add(v, 0.7)),
    "ablate": (lambda v, at: residuum.Ablate(v, **at), ablate),
    "cap": (lambda v, at: residuum.Cap(v, min=-0.1, max=0.1, **at), lambda v: cap(v, -0.1, 0.1)),
    "replace": (lambda v, at: residuum.Replace(v, value=0.8, **at), lambda v: replace(v, 0.8)),
    "set": (lambda v, at: residuum.Set(v, **at), lambda v: lambda x: v.expand_as(x).clone()),
    "multiply": (lambda v, at: residuum.Multiply(v, **at), lambda v: lambda x: x * v),
    "multiply and keep the norm": (
        lambda v, at: residuum.Multiply(v, keep_norm=True, **at),
        lambda v: keeping_norm(lambda x: x * v),
    ),
}


def make_vector(engine: Engine, site: str, seed: int = 0) -> residuum.Vector:
    width = engine.client.info().site_widths[site]
    return residuum.Vector(np.random.default_rng(seed).standard_normal(width).astype(np.float32))


def test_the_server_says_where_it_steers(engine: Engine) -> None:
    info = engine.client.info()
    assert set(info.steering_sites) == {"resid_post", *STEERABLE}
    assert [(layer.num_heads, layer.num_kv_heads) for layer in info.attention] == [(4, 2)] * 4
    assert "multiply" in info.steering_operations


@pytest.mark.parametrize("way", WAYS)
def test_steering_at_a_site_agrees_with_its_definition(engine: Engine, reference: Reference, way: str) -> None:
    """The same operation at all sites at once, each in a layer of its own; the fifth shares one with the first."""
    operation, change = WAYS[way]
    places = {site: index % 4 for index, site in enumerate(STEERABLE)}
    vectors = {site: make_vector(engine, site) for site in STEERABLE}
    steer = [operation(vectors[site], {"layer": layer, "site": site}) for site, layer in places.items()]
    reply = engine.client.generate(PROMPT[:40], max_tokens=6, ignore_eos=True, capture=ALL, steer=steer)
    changes = {(site, layer): change(tensor(vectors[site])) for site, layer in places.items()}
    check_capture(engine, reference, reply, changes=changes)
    acts = engine.client.activations(reply)
    assert {record.site: record.layers for record in acts.manifest.steering} == {
        site: (layer,) for site, layer in places.items()
    }
    for site, layer in places.items():
        without = reference.rows(
            acts.token_ids, {place: made for place, made in changes.items() if place != (site, layer)}
        )
        error = relative_error(acts.select(site=site)[layer], without[site][layer])
        assert error > 0.01, f"the steering at {site} has an effect"


def test_several_sites_at_once(engine: Engine, reference: Reference) -> None:
    """Each with its own layers and positions, among them two operations at one site, and one after a layer."""
    vectors = {site: make_vector(engine, site, seed) for seed, site in enumerate((*STEERABLE, "resid_post"))}
    tensors = {site: tensor(vector) for site, vector in vectors.items()}
    steer = [
        residuum.Add(vectors["resid_post"], layer=0, scale=0.3),
        residuum.Add(vectors["z"], layers=[1, 3], scale=0.5, site="z"),
        residuum.Multiply(vectors["z"], layer=1, site="z"),
        residuum.Set(vectors["mlp_act"], layer=2, site="mlp_act", positions=range(40, 1000)),
        residuum.Replace(vectors["attn_out"], layer=2, site="attn_out", value=0.6),
        residuum.Ablate(vectors["mlp_out"], layer=0, site="mlp_out"),
        residuum.Add(vectors["resid_mid"], layer=3, site="resid_mid", positions=range(45, 1000)),
    ]
    reply = engine.client.generate(PROMPT[:40], max_tokens=10, ignore_eos=True, capture=ALL, steer=steer)
    z, act = tensors["z"], tensors["mlp_act"]
    changes = {
        0: add(tensors["resid_post"], 0.3),
        ("z", 1): lambda x: (x + 0.5 * z) * z,
        ("z", 3): add(z, 0.5),
        ("mlp_act", 2): from_position(40, lambda x: act.expand_as(x).clone()),
        ("attn_out", 2): replace(tensors["attn_out"], 0.6),
        ("mlp_out", 0): ablate(tensors["mlp_out"]),
        ("resid_mid", 3): from_position(45, add(tensors["resid_mid"], 1.0)),
    }
    check_capture(engine, reference, reply, changes=changes)


def test_heads_are_removed(engine: Engine, reference: Reference) -> None:
    mask = engine.client.info().mask("z", [1, 3])
    steer = residuum.Multiply(mask, layers=[0, 2], site="z")
    reply = engine.client.generate(PROMPT[:30], max_tokens=4, ignore_eos=True, capture=ALL, steer=steer)
    check_capture(engine, reference, reply, changes={("z", layer): lambda x: x * tensor(mask) for layer in (0, 2)})
    heads = engine.client.activations(reply).select(site="z")[2].reshape(-1, 4, 32)
    assert not heads[:, [1, 3]].any()
    assert heads[:, [0, 2]].any(axis=-1).all()


def test_rows_of_a_site_before_its_steering(engine: Engine, reference: Reference) -> None:
    vector = make_vector(engine, "mlp_act")
    capture = residuum.Capture(sites=SITES, before_steering=True)
    steer = residuum.Add(vector, layer=1, site="mlp_act", scale=0.7)
    reply = engine.client.generate(PROMPT[:30], max_tokens=3, ignore_eos=True, capture=capture, steer=steer)
    acts = engine.client.activations(reply)
    expected = reference.rows(acts.token_ids, {("mlp_act", 1): add(tensor(vector), 0.7)})
    expected["mlp_act"][1] -= 0.7 * vector.values
    for site in SITES:
        assert relative_error(acts.select(site=site).stack(), expected[site]) < 1e-3, site


def test_rows_of_another_request_can_be_set_at_a_site(engine: Engine, reference: Reference) -> None:
    clean = engine.client.generate(PROMPT[:20], max_tokens=0, capture=ALL)
    source = engine.client.activations(clean).select(site="z")
    rows = torch.from_numpy(source[2].copy())
    chosen = [4, 19]

    def patched(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[chosen] = rows[chosen]
        return x

    steer = residuum.Set.from_activations(source, layers=[2], positions=chosen)
    reply = engine.client.generate(PROMPT[30:50], max_tokens=3, ignore_eos=True, capture=ALL, steer=steer)
    check_capture(engine, reference, reply, changes={("z", 2): patched})


def test_steering_is_moved_from_one_site_to_another(engine: Engine, reference: Reference) -> None:
    """While the request generates: at the start it steers nothing at the second site, whose rows have another width."""
    first, second = make_vector(engine, "attn_out"), make_vector(engine, "mlp_act")
    start = residuum.Add(first, layer=1, site="attn_out", scale=0.7)
    with engine.paced():
        stream = engine.client.stream(
            PROMPT[:40], max_tokens=60, ignore_eos=True, capture=ALL, steer=start, updatable=True
        )
        for _, _ in zip(range(5), stream, strict=False):
            pass
        (changed,) = stream.update_steering(residuum.Add(second, layer=2, site="mlp_act", scale=0.7))
        for _, _ in zip(range(5), stream, strict=False):
            pass
        (ended,) = stream.update_steering(None)
    for _ in stream:
        pass
    assert 40 < changed < ended < 99, "both changes came during the generation"
    changes = {
        ("attn_out", 1): in_turn([(0, add(tensor(first), 0.7)), (changed, None)]),
        ("mlp_act", 2): in_turn([(changed, add(tensor(second), 0.7)), (ended, None)]),
    }
    check_capture(engine, reference, stream.reply, changes=changes)


def test_requests_steered_at_different_sites_share_a_batch(engine: Engine, reference: Reference) -> None:
    asked = []
    vectors = [make_vector(engine, site, index) for index, site in enumerate(STEERABLE)]
    with engine.held(
        *[residuum.Add(vector, layer=0, site=site) for site, vector in zip(STEERABLE, vectors, strict=True)]
    ):
        for index, (site, vector) in enumerate(zip(STEERABLE, vectors, strict=True)):
            steer = residuum.Add(vector, layer=index % 4, site=site, scale=0.8)
            prompt = PROMPT[index : index + 20 + index]
            stream = engine.client.stream(prompt, max_tokens=12, ignore_eos=True, capture=ALL, steer=steer)
            asked.append((stream, {(site, index % 4): add(tensor(vector), 0.8)}))
    for stream, changes in asked:
        for _ in stream:
            pass
        check_capture(engine, reference, stream.reply, changes=changes)


@pytest.mark.parametrize("site", ["q", "k", "v", "attn_in", "mlp_in", "resid_pre"])
def test_other_sites_are_refused_by_name(engine: Engine, site: str) -> None:
    vector = make_vector(engine, "z")  # the client sends it before the server sees the request
    advice = "Steer resid_post of the layer before" if site == "resid_pre" else "No server steers there"
    with pytest.raises(residuum.UnknownSite, match=f"site {site} cannot be steered; .* mlp_act. {advice}"):
        engine.client.generate(PROMPT[:4], max_tokens=1, steer=residuum.Add(vector, layer=1, site=site))


def test_a_vector_of_another_width_is_refused(engine: Engine) -> None:
    narrow, wide = make_vector(engine, "z"), make_vector(engine, "mlp_act")
    with pytest.raises(residuum.BadVector, match=r"of steering.operations\[0\] has 128 elements, but .* have 320"):
        engine.client.generate(PROMPT[:4], max_tokens=1, steer=residuum.Add(narrow, layer=1, site="mlp_act"))
    with pytest.raises(residuum.BadVector, match=r"of steering.operations\[0\] has 320 elements, but .* have 128"):
        engine.client.generate(PROMPT[:4], max_tokens=1, steer=residuum.Add(wide, layer=1))
    probe = residuum.Probe(wide.values, layer=1, name="lies")
    with pytest.raises(residuum.BadVector, match=r"of probes.probes\[0\] \(lies\) has 320 elements, but .* have 128"):
        engine.client.generate(PROMPT[:4], max_tokens=1, probes=probe)
    rule = residuum.Rule(residuum.Probe(narrow.values, layer=1), above=0.5, then=residuum.Add(wide, layer=1))
    with pytest.raises(residuum.BadVector, match=r"of probes.rules\[0\].steering.operations\[0\] has 320 elements"):
        engine.client.generate(PROMPT[:4], max_tokens=2, rules=rule)
    capture = residuum.Capture(encoding="project", vectors=[wide])
    with pytest.raises(residuum.BadVector, match=r"of capture.encoding_options.vectors has 320 elements, but .* 128"):
        engine.client.generate(PROMPT[:4], max_tokens=1, capture=capture)
    with pytest.raises(residuum.BadVector, match="7 elements, but the rows of this model have 128 or 320"):
        engine.client.put_vectors([residuum.Vector(np.ones(7))])
