"""One request at a time: the rows of each site, and prompts and replies around the limits of blocks and chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.engines import CHUNK
from tests.conformance.rows import ALL, MAX_ERROR, SITES, check_capture, make_prompt
from tests.reference.hf import relative_error
from tests.reference.tiny import LAYERS

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.conformance.rows import Row
    from tests.reference.hf import Reference, Rows

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(3), 150)


def test_rows_of_a_layer_are_transformers_hidden_states(engine: Engine, reference: Reference) -> None:
    """resid_post of layer k is hidden_states[k + 1], resid_pre hidden_states[k]; the last is the final norm's input."""
    reply = engine.client.generate(PROMPT[:20], max_tokens=4, ignore_eos=True, capture=ALL)
    acts = engine.client.activations(reply.request_id).select(site="resid_post")
    states = reference.hidden_states(acts.token_ids)
    for layer in range(LAYERS - 1):
        assert relative_error(acts[layer], states[layer + 1]) < MAX_ERROR
        assert relative_error(acts[layer], states[layer]) > 0.01, (
            "the layers differ, so the comparison would detect a wrong one"
        )
        assert relative_error(acts[layer], states[layer + 2]) > 0.01
    before = acts.select(site="resid_pre")
    for layer in range(LAYERS):
        assert relative_error(before[layer], states[layer]) < MAX_ERROR, (
            "the input of the first layer is the embeddings"
        )
    last = acts[LAYERS - 1]
    assert relative_error(reference.final_norm(last), states[LAYERS]) < MAX_ERROR
    assert relative_error(last, states[LAYERS]) > 0.01, "the row is taken before the final norm"


def test_taps_are_folded_into_norms_in_one_engine_and_not_in_the_other(engine: Engine) -> None:
    """So all other tests cover both."""
    both = 2 * LAYERS  # the norms after each layer, and those after each attention
    assert engine.serving()["folded_norms"] == (both if engine.name == "compiled" else 0)


@pytest.mark.parametrize("layers", [(0,), (1, 3), (LAYERS - 1,)])
def test_some_layers(engine: Engine, reference: Reference, layers: tuple[int, ...]) -> None:
    capture = residuum.Capture(layers=layers, sites=SITES)
    reply = engine.client.generate(PROMPT[:20], max_tokens=4, ignore_eos=True, capture=capture)
    check_capture(engine, reference, reply, layers=layers)


def test_points_have_layers_of_their_own(engine: Engine, reference: Reference) -> None:
    """A prompt in three chunks and two replies. Some points share a tap, a width or neither."""
    layers = {
        "resid_pre": (1,),
        "resid_post": (0, LAYERS - 1),
        "mlp_out": (2,),
        "q": (0, 2),
        "z": (1,),
        "mlp_act": (3,),
        "final_norm": (LAYERS - 1,),
    }
    points = [f"{site}.{layer}" for site, of_site in layers.items() for layer in of_site]
    capture = residuum.Capture(points=points)
    reply = engine.client.generate(PROMPT, max_tokens=40, ignore_eos=True, n=2, temperature=1.0, capture=capture)
    check_capture(engine, reference, reply, sites=tuple(layers), layers=layers)
    acts = engine.client.activations(reply.request_id)
    assert {site: acts.select(site=site).layers for site in acts.sites} == layers


def test_the_input_and_the_additions_of_a_layer_make_its_output(engine: Engine, reference: Reference) -> None:
    """Every site of every layer, for a prompt in three chunks and a reply: the rows are right and add up."""
    reply = engine.client.generate(PROMPT, max_tokens=40, ignore_eos=True, capture=ALL)
    check_capture(engine, reference, reply)
    assert len(engine.journal.chunks(reply.request_id)) == 3 + 39
    acts = engine.client.activations(reply.request_id)
    assert set(acts.sites) == set(SITES)
    site = {name: acts.select(site=name) for name in SITES}
    for layer in range(LAYERS):
        total = site["resid_pre"][layer] + site["attn_out"][layer] + site["mlp_out"][layer]
        assert relative_error(total, site["resid_post"][layer]) < MAX_ERROR
        assert relative_error(site["attn_out"][layer], site["mlp_out"][layer]) > 0.1, (
            "the two sites differ, so the comparison would detect a swap"
        )
        if layer:
            np.testing.assert_array_equal(site["resid_pre"][layer], site["resid_post"][layer - 1])


@pytest.mark.parametrize(
    "sites", [("resid_pre",), ("attn_out",), ("mlp_out",), ("mlp_out", "resid_pre"), ("attn_out", "resid_post")],
    ids=" and ".join,
)  # fmt: skip
def test_some_sites(engine: Engine, reference: Reference, sites: tuple[str, ...]) -> None:
    """Only some layers and positions are captured."""
    capture = residuum.Capture(sites=sites, layers=(0, 2), positions=[3, (63, 65), (-1, None)])
    reply = engine.client.generate(PROMPT[:70], max_tokens=10, ignore_eos=True, capture=capture)
    check_capture(
        engine, reference, reply, sites=sites, layers=(0, 2), wanted=lambda _, rows: [3, 63, 64, 65, *range(69, rows)]
    )
    acts = engine.client.activations(reply.request_id)
    assert acts.sites == sites
    for absent in set(SITES) - set(sites):
        with pytest.raises(KeyError, match=sites[0]):
            acts.select(site=absent)
        with pytest.raises(residuum.InvalidRequest, match=absent):
            engine.client.activations(reply.request_id, sites=[absent])


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150])
def test_lengths_of_prompts(engine: Engine, reference: Reference, length: int) -> None:
    """Lengths around the sizes of capture blocks, vLLM's blocks and chunks. 65 and 129 leave a chunk of one token."""
    reply = engine.client.generate(PROMPT[:length], max_tokens=34, ignore_eos=True, capture=ALL)
    check_capture(engine, reference, reply)
    chunks = [(first, min(CHUNK, length - first)) for first in range(0, length, CHUNK)]
    assert engine.journal.chunks(reply.request_id) == chunks + [(length + i, 1) for i in range(33)]


@pytest.mark.parametrize("length", [1, 2, 32, 65])
def test_one_generated_token(engine: Engine, reference: Reference, length: int) -> None:
    reply = engine.client.generate(PROMPT[:length], max_tokens=1, ignore_eos=True, capture=ALL)
    rows = check_capture(engine, reference, reply)
    assert {row.position for row in rows} == set(range(length)), (
        "the last token is never fed to the model, so it has no row"
    )


@pytest.mark.parametrize("generated", [32, 33, 64, 65, 66])
def test_lengths_of_replies(engine: Engine, reference: Reference, generated: int) -> None:
    reply = engine.client.generate(PROMPT[:5], max_tokens=generated, ignore_eos=True, capture=ALL)
    check_capture(engine, reference, reply)


def test_both_engines_give_the_same_rows(
    engine: Engine, reference: Reference, replies_of_engines: dict[str, tuple[tuple[int, ...], dict[Row, Rows]]]
) -> None:
    """The second engine's replies are compared with the first one's."""
    reply = engine.client.generate(PROMPT, max_tokens=70, ignore_eos=True, capture=ALL)
    rows = check_capture(engine, reference, reply)
    replies_of_engines[engine.name] = (reply.token_ids, rows)
    for token_ids, others in replies_of_engines.values():
        assert token_ids == reply.token_ids
        for site in SITES:
            names = sorted(name for name in rows if name.site == site)
            assert relative_error(np.stack([rows[n] for n in names]), np.stack([others[n] for n in names])) < MAX_ERROR


@pytest.fixture(scope="package")
def replies_of_engines() -> dict[str, tuple[tuple[int, ...], dict[Row, Rows]]]:
    """The replies of each engine to the same request."""
    return {}
