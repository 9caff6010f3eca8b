"""The score of a token is what its probe computes for the row that predicted it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

import residuum
from residuum.v1 import inference_pb2, inference_pb2_grpc, probe_pb2, selection_pb2, steering_pb2
from residuum.values.selections.points import SITES
from tests.conformance.rows import make_prompt
from tests.conformance.steering import add, in_turn, tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

TOLERANCE = 2e-3
"""Relative to the largest score: rows differ by up to 2e-4 of their length, and inner products add that up."""

SITES_OF_PROBES = ("resid_post", "resid_pre", "attn_out", "mlp_in")


def make_vector(engine: Engine, seed: int) -> residuum.Vector:
    rng = np.random.default_rng(seed)
    return residuum.Vector(rng.standard_normal(engine.client.info().hidden_size).astype(np.float32))


def output(vector: residuum.Vector, bias: float = 0.0) -> probe_pb2.ProbeOutput:
    return probe_pb2.ProbeOutput(digest=vector.digest, bias=bias)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    probes: Sequence[probe_pb2.Probe],
    *,
    score_prompt: bool = False,
    sequences: int = 1,
    spec: inference_pb2.RequestSpec | None = None,
    **sampling: object,
) -> list[list[inference_pb2.GenerateResponse]]:
    """Generate for all prompts at once, and return the events of each request."""
    asked = inference_pb2.RequestSpec(probes=probe_pb2.ProbeSpec(probes=probes, score_prompt=score_prompt))
    if spec is not None:
        asked.MergeFrom(spec)
    parameters = inference_pb2.SamplingParameters(
        **{"temperature": 0.0, "ignore_eos": True, "num_sequences": sequences, **sampling}
    )
    with grpc.insecure_channel(engine.client.endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [
            stub.Generate(
                inference_pb2.GenerateRequest(
                    spec=asked, token_ids=inference_pb2.TokenIds(ids=prompt), sampling=parameters
                )
            )
            for prompt in prompts
        ]
        return [list(call) for call in calls]


def scores_of(events: Sequence[inference_pb2.GenerateResponse], probe: int, sequence: int = 0) -> list[float]:
    """Return the scores of a probe with one output, in the order of the tokens."""
    found: list[float] = []
    for event in events:
        delta = event.delta
        if event.HasField("delta") and delta.sequence == sequence and delta.token_ids:
            values = delta.scores[probe].values
            assert len(values) == len(delta.token_ids), "the scores come with their tokens"
            found += values
    return found


def tokens_of(events: Sequence[inference_pb2.GenerateResponse], sequence: int = 0) -> list[int]:
    return [token for event in events if event.delta.sequence == sequence for token in event.delta.token_ids]


def check_scores(given: Sequence[float], expected: np.ndarray) -> None:
    assert len(given) == len(expected)
    assert np.abs(np.array(given) - expected).max() < TOLERANCE * max(np.abs(expected).max(), 1.0)


def test_scores_of_a_mixed_batch(engine: Engine, reference: Reference) -> None:
    """Requests with prompts in one chunk and in several; probes at several layers and sites, in no order of layers."""
    rng = np.random.default_rng(7)
    vectors = [make_vector(engine, seed) for seed in range(len(SITES_OF_PROBES))]
    engine.client.put_vectors(vectors)
    probes = [
        probe_pb2.Probe(name=site, layer=3 - index, site=SITES[site], outputs=[output(vector, 0.25 * index)])
        for index, (site, vector) in enumerate(zip(SITES_OF_PROBES, vectors, strict=True))
    ]
    prompts = [make_prompt(rng, size) for size in (1, 40, 150, 17)]
    for prompt, events in zip(prompts, generate(engine, prompts, probes, max_tokens=9), strict=True):
        tokens = tokens_of(events)
        assert len(tokens) == 9
        rows = reference.rows([*prompt, *tokens[:-1]])
        for index, (site, vector) in enumerate(zip(SITES_OF_PROBES, vectors, strict=True)):
            wanted = rows[site][3 - index][len(prompt) - 1 :] @ vector.values + 0.25 * index
            check_scores(scores_of(events, index), wanted)


def test_a_probe_of_several_places_adds_them_up(engine: Engine, reference: Reference) -> None:
    """The probe reads three layers and two sites, as Python's client sends it. Two prompts, one in several chunks."""
    rng = np.random.default_rng(20013)  # no other test of this engine sends these vectors
    width = engine.client.info().hidden_size
    weights = rng.standard_normal((2, 3 * width)).astype(np.float32)
    sites = ["resid_post", "attn_out", "resid_post"]
    probe = residuum.Probe(weights, [0.5, -1], layer=[3, 1, 0], site=sites, name="several")
    assert engine.client.put_probes([probe]).sent == 6
    assert engine.client.put_probes(probe).sent == 0
    for size in (20, 150):
        prompt = make_prompt(rng, size)
        reply = engine.client.generate(
            prompt, max_tokens=6, temperature=0.0, ignore_eos=True, probes=[probe], score_prompt=True
        )
        rows = reference.rows([*prompt, *reply.token_ids[:-1]])
        joined = np.concatenate([rows[site][layer] for site, layer in probe.places], axis=-1)
        wanted = joined @ weights.T + probe.bias
        assert reply.scores is not None
        assert reply.prompt_scores is not None
        for output in range(2):
            check_scores(reply.scores["several"][:, output], wanted[size - 1 :, output])
            check_scores(reply.prompt_scores["several"][:, output], wanted[:size, output])
        np.testing.assert_allclose(probe.score(joined), wanted, rtol=1e-4, atol=1e-3)


def test_scores_of_the_prompt_and_of_steered_rows(engine: Engine, reference: Reference) -> None:
    """Every position of the prompt is scored, for the steered row, and activations are applied."""
    rng = np.random.default_rng(8)
    prompt = make_prompt(rng, 130)
    joy, first, second = (make_vector(engine, seed) for seed in (20, 21, 22))
    engine.client.put_vectors([first, second])
    probes = [
        probe_pb2.Probe(
            name="softmax",
            layer=2,
            outputs=[output(first, 0.5), output(second)],
            activation=probe_pb2.PROBE_ACTIVATION_SOFTMAX,
        ),
        probe_pb2.Probe(
            name="sigmoid", layer=1, outputs=[output(first)], activation=probe_pb2.PROBE_ACTIVATION_SIGMOID
        ),
    ]
    engine.client.put_vectors([joy])
    spec = inference_pb2.RequestSpec(steering=steering_pb2.SteeringSpec(operations=[add_after(1, joy)]))
    (events,) = generate(engine, [prompt], probes, score_prompt=True, spec=spec, max_tokens=4)
    tokens = tokens_of(events)
    rows = reference.rows([*prompt, *tokens[:-1]], {1: add(tensor(joy), 0.5)})["resid_post"]
    logits = np.stack([rows[2] @ first.values + 0.5, rows[2] @ second.values], axis=-1).astype(np.float64)
    softmax = np.exp(logits - logits.max(-1, keepdims=True))
    softmax /= softmax.sum(-1, keepdims=True)
    sigmoid = 1 / (1 + np.exp(-(rows[1] @ first.values).astype(np.float64)))
    prompt_scores = [[v for event in events for v in _values(event.delta.prompt_scores, index)] for index in range(2)]
    np.testing.assert_allclose(np.reshape(prompt_scores[0], (-1, 2)), softmax[: len(prompt)], atol=5e-3)
    np.testing.assert_allclose(prompt_scores[1], sigmoid[: len(prompt)], atol=5e-3)
    np.testing.assert_allclose(scores_of(events, 1), sigmoid[len(prompt) - 1 :], atol=5e-3)


def test_probes_change_no_row_and_leave_the_prefix_cache_in_use(engine: Engine) -> None:
    prompt = make_prompt(np.random.default_rng(9), 120)
    vector = make_vector(engine, 30)
    engine.client.put_vectors(vector)
    probe = probe_pb2.Probe(name="p", layer=2, outputs=[output(vector)])
    (first,) = generate(engine, [prompt], [probe], max_tokens=3)
    before = len(engine.journal.steps())
    (again,) = generate(engine, [prompt], [probe], max_tokens=3)
    assert (
        tokens_of(first)
        == tokens_of(again)
        == list(engine.client.generate(prompt, max_tokens=3, temperature=0.0, ignore_eos=True).token_ids)
    )
    np.testing.assert_allclose(scores_of(first, 0), scores_of(again, 0), atol=1e-3)
    steps = engine.journal.steps()[before:]
    assert sum(count for step in steps for _, count in step.chunks.values()) < len(prompt), "the cache was read"


def test_several_sequences_have_their_own_scores(engine: Engine, reference: Reference) -> None:
    prompt = make_prompt(np.random.default_rng(10), 20)
    vector = make_vector(engine, 40)
    engine.client.put_vectors(vector)
    probe = probe_pb2.Probe(name="p", layer=0, outputs=[output(vector)])
    (events,) = generate(engine, [prompt], [probe], max_tokens=6, sequences=3, temperature=1.5, seed=3)
    for sequence in range(3):
        rows = reference.rows([*prompt, *tokens_of(events, sequence)[:-1]])["resid_post"][0]
        check_scores(scores_of(events, 0, sequence), rows[len(prompt) - 1 :] @ vector.values)


def test_attention_probes_pool_all_positions(engine: Engine, reference: Reference) -> None:
    """Prompts in one chunk and in several, in the cache or not, with several sequences, against torch's softmax."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(12)
    query, value, other = (make_vector(engine, seed) for seed in (60, 61, 62))
    engine.client.put_vectors([query, value, other])
    outputs = [output(vector) for vector in (query, other)] + [output(value, 0.5), output(query)]
    slopes = [0.0, 0.25]
    probe = probe_pb2.Probe(name="p", layer=2, outputs=outputs)
    probe.attention.heads = 2
    probe.attention.position_weights.extend(slopes)
    prompts = [make_prompt(rng, size) for size in (1, 40, 150)]
    for _ in range(2):
        answers = generate(engine, prompts, [probe], max_tokens=6, sequences=2, temperature=1.5, seed=3)
        for prompt, events in zip(prompts, answers, strict=True):
            for sequence in range(2):
                rows = reference.rows([*prompt, *tokens_of(events, sequence)[:-1]])["resid_post"][2]
                exact = torch.tensor(
                    np.stack([rows @ item.values for item in (query, other, value, query)], -1)
                ).double()
                logits = exact[:, :2] + torch.arange(len(rows))[:, None] * torch.tensor(slopes)
                values = exact[:, 2:] + torch.tensor([0.5, 0.0])
                expected = [
                    float((logits[:end].softmax(0) * values[:end]).sum()) for end in range(len(prompt), len(rows) + 1)
                ]
                check_scores(scores_of(events, 0, sequence), np.array(expected))


def test_a_probe_goes_on_when_the_steering_changes(engine: Engine, reference: Reference) -> None:
    """A change of steering replaces the operations of a request, but not its probes."""
    prompt = make_prompt(np.random.default_rng(11), 20)
    joy, vector = make_vector(engine, 50), make_vector(engine, 51)
    engine.client.put_vectors([joy, vector])
    probe = probe_pb2.Probe(name="p", layer=2, outputs=[output(vector)])
    asked = inference_pb2.RequestSpec(
        request_id="probed-change",
        steering=steering_pb2.SteeringSpec(updatable=True),
        probes=probe_pb2.ProbeSpec(probes=[probe]),
    )
    request = inference_pb2.GenerateRequest(
        spec=asked,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParameters(temperature=0.0, ignore_eos=True, max_tokens=100),
    )
    change = inference_pb2.UpdateSteeringRequest(
        request_id="probed-change", steering=steering_pb2.SteeringSpec(operations=[add_after(1, joy)])
    )
    events, first = [], None
    with engine.paced(), grpc.insecure_channel(engine.client.endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for event in stub.Generate(request):
            events.append(event)
            if first is None and len(tokens_of(events)) >= 5:
                (first,) = stub.UpdateSteering(change).first_positions
    assert first is not None
    assert len(prompt) + 4 < first < len(prompt) + 99, "the change came during the generation"
    tokens = tokens_of(events)
    rows = reference.rows([*prompt, *tokens[:-1]], {1: in_turn([(0, None), (first, add(tensor(joy), 0.5))])})
    check_scores(scores_of(events, 0), rows["resid_post"][2][len(prompt) - 1 :] @ vector.values)


def test_a_vector_that_is_missing_or_of_another_width_is_refused(engine: Engine) -> None:
    short = residuum.Vector(np.ones(3, np.float32))
    probe = probe_pb2.Probe(name="p", layer=0, outputs=[output(short)])
    with pytest.raises(grpc.RpcError) as caught:
        generate(engine, [[5, 6]], [probe], max_tokens=1)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION  # the vector is not on the server
    with pytest.raises(residuum.BadVector):
        engine.client.put_vectors([short])


def add_after(layer: int, vector: residuum.Vector) -> steering_pb2.SteeringOperation:
    """Return an Add of half of a vector."""
    layers = selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=[layer]))
    return steering_pb2.SteeringOperation(layers=layers, add=steering_pb2.Add(digest=vector.digest, scale=0.5))


def _values(scores: Sequence[probe_pb2.ProbeScores], index: int) -> Sequence[float]:
    return scores[index].values if scores else ()
