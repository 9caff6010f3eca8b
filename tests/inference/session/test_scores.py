"""Probes without an engine: what is refused, the score board, and the service around it."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from inference_svc.admission.probes import columns_of, probe_sites, resolve_probes
from inference_svc.admission.specs import SharedSpec
from inference_svc.admission.steering import demand_of_steering
from inference_svc.engine.streams import Delta
from inference_svc.requests.plans import make_plan
from inference_svc.requests.registry import Running
from inference_svc.resources.score_board import ScoreBoard, ScoreMemory
from inference_svc.session.messages import messages
from inference_svc.session.scores import scoring
from inference_svc.session.scores.probe_groups import ProbeGroups, groups_of
from inference_svc.session.scores.scoring import SequenceScores
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.cpu.score_copies import CpuScoreCopies
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.plan import Kind, RequestPlan, ScoreRegion
from inference_svc.taps.points import TapPoints
from inference_svc.taps.scores import Scores, open_board
from inference_svc.taps.steps.layout import NOWHERE, StepLayout, StepRows
from inference_svc.taps.steps.programs import Program, Step
from inference_svc.taps.steps.runtimes import TapRuntimes
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, probe_pb2, steering_pb2
from residuum.wire.limits import MAX_PROBE_OUTPUTS
from tests.inference import service_support as support
from tests.inference.spec_support import resolve_spec

torch = pytest.importorskip("torch")

FACTS = replace(support.FACTS, probe_sites=(capture_pb2.SITE_RESID_POST,))
A, B = b"a" * 32, b"b" * 32


def probe(name="p", layer=1, outputs=((A, 0.0),), **fields):
    outputs = [probe_pb2.ProbeOutput(digest=digest, bias=bias) for digest, bias in outputs]
    return probe_pb2.Probe(name=name, layer=layer, outputs=outputs, **fields)


def spec(*probes, **fields):
    return probe_pb2.ProbeSpec(probes=probes, **fields)


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        (spec(probe(name="")), "probes.probes[0].name", "1 to 64"),
        (spec(probe(name="no spaces")), "probes.probes[0].name", "1 to 64"),
        (spec(probe(), probe()), "probes.probes[1].name", "Two probes"),
        (spec(probe(outputs=())), "probes.probes[0].outputs", "at least one"),
        (spec(probe(outputs=((b"short", 0.0),))), "probes.probes[0].outputs[0].digest", "32 bytes"),
        (spec(probe(outputs=((A, float("nan")),))), "probes.probes[0].outputs[0].bias", "finite"),
        (spec(probe(outputs=((A, 0.0),) * (MAX_PROBE_OUTPUTS + 1))), "probes.probes", "65 outputs"),
        (spec(probe(activation=9)), "probes.probes[0].activation", "9"),
        (spec(probe(output_names=["a", "b"])), "probes.probes[0].output_names", "2 names for 1 outputs"),
        (spec(probe(mlp=[probe_pb2.ProbeLayer()])), "probes.probes[0].mlp", "layer 2 has 0 outputs"),
        (spec(probe(activation=probe_pb2.PROBE_ACTIVATION_SOFTMAX)), "probes.probes[0].activation", "always 1"),
    ],
)
def test_an_invalid_probe_is_refused(bad, field, words):
    with pytest.raises(Failure, match=words) as caught:
        resolve_probes(bad, FACTS)
    assert caught.value.metadata["field"] == field


def test_probes_that_are_too_large_for_a_description_are_refused():
    layers = [probe_pb2.ProbeLayer(weights=bytes(4 * count * 64), biases=[0] * 64) for count in (1, 64)]
    probes = [probe(f"p{number}", mlp=layers) for number in range(20)]
    resolve_probes(spec(*probes[:10]), FACTS)
    with pytest.raises(Failure, match=r"take \d+ bytes; those of a request take at most 262144") as caught:
        resolve_probes(spec(*probes), FACTS)
    assert caught.value.metadata["field"] == "probes"


def test_a_probe_at_an_unknown_place_is_refused():
    with pytest.raises(Failure, match="There is no layer 3") as caught:
        resolve_probes(spec(probe(layer=3)), FACTS)
    assert caught.value.reason == Reason.ERROR_REASON_UNKNOWN_LAYER
    for site, words in ((capture_pb2.SITE_ATTN_OUT, "--capture-sites"), (capture_pb2.SITE_Q, "as wide as")):
        with pytest.raises(Failure, match=words) as caught:
            resolve_probes(spec(probe(site=site)), FACTS)
        assert caught.value.reason == Reason.ERROR_REASON_UNKNOWN_SITE
    with pytest.raises(Failure, match="--score-mib"):
        resolve_probes(spec(probe()), support.FACTS)


def test_probes_read_the_sites_that_are_as_wide_as_the_stream():
    sites = (capture_pb2.SITE_MLP_OUT, capture_pb2.SITE_Q)
    assert probe_sites(sites) == (capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT)


def test_columns_are_in_the_order_of_layers():
    """So the columns of a pipeline stage are neighbours, whatever the order of the probes is."""
    probes = spec(probe("late", 2), probe("early", 0, ((A, 0.0), (B, 0.0))), probe("middle", 1))
    resolved = resolve_spec(inference_pb2.RequestSpec(probes=probes), FACTS)
    assert columns_of(resolved.probes) == [[3], [0, 1], [2]]
    assert resolved.shared.digests == [A, B]
    assert resolved.shared.cache_salt(10) is None, "probes change nothing, so requests share the prefix cache"
    region = ScoreRegion(0, 4, 7, 4)
    plan = make_plan(Running("r", resolved, was_registered=False), 0, 5, {A: 3, B: 8}, scores=region)
    assert RequestPlan.from_extra_args(plan.to_extra_args()) == plan
    assert [(item.kind, item.row, item.layers, item.column) for item in plan.operations] == [
        (Kind.SCORE, 3, (2,), 3),
        (Kind.SCORE, 3, (0,), 0),
        (Kind.SCORE, 8, (0,), 1),
        (Kind.SCORE, 3, (1,), 2),
    ]
    moved = make_plan(Running("s", resolved, was_registered=False), 0, 5, {A: 8, B: 3}, scores=region)
    assert [item.row for item in moved.operations] == [8, 8, 3, 8], "the vectors have other rows now"
    assert not plan.needs_whole_prompt
    assert replace(plan, scores=region._replace(first_position=0)).needs_whole_prompt


def test_a_probe_of_several_places_has_a_column_for_each_output_at_each():
    places = [probe_pb2.ProbePlace(layer=0, digests=[B, A]), probe_pb2.ProbePlace(layer=2, digests=[B, B])]
    several = probe("several", 1, ((A, 1.0), (B, 2.0)), further_places=places)
    resolved = resolve_spec(inference_pb2.RequestSpec(probes=spec(several, probe("early", 0))), FACTS)
    assert [place.site for place in resolved.probes.probes[0].further_places] == [capture_pb2.SITE_RESID_POST] * 2
    assert columns_of(resolved.probes) == [[3, 4, 0, 1, 5, 6], [2]]
    plan = make_plan(Running("r", resolved, was_registered=False), 0, 5, {A: 3, B: 8}, scores=ScoreRegion(0, 4, 7, 7))
    assert [(item.row, item.layers, item.column) for item in plan.operations] == [
        (3, (1,), 3), (8, (1,), 4), (8, (0,), 0), (3, (0,), 1), (8, (2,), 5), (8, (2,), 6), (3, (0,), 2),
    ]  # fmt: skip
    groups = groups_of(resolved.shared)
    assert groups.columns == 7
    big, inf = np.finfo(np.float32).max, np.inf
    products = np.array(
        [[10, 20, 5, 1, 2, 100, 200], [inf, -inf, inf, 1, inf, 1, 2], [big, np.nan, 5, big, 2, 1, 2]], dtype=np.float32
    )
    scores, early = groups.scores(products, groups.begin())
    np.testing.assert_array_equal(scores, [[112, 224], [inf, np.nan], [inf, np.nan]])
    np.testing.assert_array_equal(early, [[5], [inf], [5]])


def test_attention_pools_the_sums_over_the_places():
    pooled = probe("a", 0, ((A, 0.0), (B, 1.0)), attention=probe_pb2.AttentionPooling(heads=1))
    several = probe_pb2.Probe()
    several.CopyFrom(pooled)
    several.further_places.add(layer=1, digests=[A, B])
    products = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
    both, alone = ProbeGroups(spec(several)), ProbeGroups(spec(pooled))
    phase, other = both.begin(), alone.begin()
    both.pool(products[:2], phase)
    alone.pool(products[:2, :2] + products[:2, 2:], other)
    (found,), (wanted,) = both.scores(products[2:], phase), alone.scores(products[2:, :2] + products[2:, 2:], other)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def place(layer=0, site=0, digests=(A,)):
    return probe_pb2.ProbePlace(layer=layer, site=site, digests=digests)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([place(1)], "place 2 is the same as place 1"),
        ([place(0), place(0, capture_pb2.SITE_RESID_POST)], "place 3 is the same as place 2"),
        ([place(digests=[A, B])], "each output needs a vector at each place, but place 2 has 2"),
        ([place(digests=[b"short"])], "a digest of place 2 is not 32 bytes"),
    ],
)
def test_invalid_places_are_refused(places, words):
    with pytest.raises(Failure, match=words) as caught:
        resolve_probes(spec(probe(further_places=places)), FACTS)
    assert caught.value.metadata["field"] == "probes.probes[0].further_places"


def test_many_places_without_an_output_are_refused_before_they_are_looked_at():
    with pytest.raises(Failure, match="at least one output"):
        resolve_probes(spec(probe(outputs=(), further_places=[place(9, digests=())] * 40_000)), FACTS)


def test_a_further_place_is_one_of_the_models():
    with pytest.raises(Failure, match="There is no layer 3"):
        resolve_probes(spec(probe(further_places=[place(3)])), FACTS)
    with pytest.raises(Failure, match="--capture-sites"):
        resolve_probes(spec(probe(further_places=[place(0, capture_pb2.SITE_ATTN_OUT)])), FACTS)


def test_each_place_counts_among_the_outputs():
    outputs = ((A, 0.0),) * (MAX_PROBE_OUTPUTS // 2)
    resolve_probes(spec(probe(outputs=outputs, further_places=[place(digests=[A] * len(outputs))])), FACTS)
    outputs += ((A, 0.0),)
    with pytest.raises(Failure, match=r"have 66 outputs.* once for each place"):
        resolve_probes(spec(probe(outputs=outputs, further_places=[place(digests=[A] * len(outputs))])), FACTS)


def test_scores_reach_the_board_by_position():
    """Two pipeline stages: each copies the columns of its own layers. The first has a prompt in two chunks."""
    board = ScoreBoard(ScoreMemory(1 << 16))
    region = board.take(3, 5, 3)  # positions 3 to 7
    memory = open_board(board._memory.path)
    rows = [
        (StepRows(["other", "r"], [9, 0], [1, 3]), None),
        (StepRows(["r", "other"], [3, 10], [2, 1]), {3: 0, 4: 1}),
        (StepRows(["other", "r"], [11, 5], [1, 1]), {5: 1}),
        (StepRows(["r"], [8], [1]), None),  # beyond the end
    ]
    operations = resolve_spec(
        inference_pb2.RequestSpec(probes=spec(probe("a", 0), probe("b", 1), probe("c", 1))), FACTS
    )
    plan = make_plan(Running("r", operations, was_registered=False), 0, 4, {A: 0}, scores=region)
    expected = np.full((5, 3), np.nan, np.float32)
    for points, columns in ((TapPoints(0, 1), slice(0, 1)), (TapPoints(1, 2), slice(1, 3))):
        buffer = torch.zeros(8, MAX_PROBE_OUTPUTS)
        scores = TapRuntimes([], Scores(CpuScoreCopies(buffer, memory), points))
        scores.begin_step([], [("other", None), ("r", plan), ("plain", replace(plan, scores=None))])
        for step, (batch, at) in enumerate(rows):
            buffer.copy_(torch.arange(8 * MAX_PROBE_OUTPUTS).reshape(8, -1) + 1000 * step)
            scores.place(lambda batch=batch: batch)
            scores.send_scores()
            for position, row in (at or {}).items():
                expected[position - 3, columns] = buffer[row, columns]
        scores.begin_step(["r"], [])
        scores.place(lambda: pytest.fail("no request is scored"))
        scores.send_scores()
    got = asyncio.run(board.read(region, 3, 3))
    np.testing.assert_array_equal(got, expected[:3])


def test_a_score_that_has_not_arrived_is_waited_for():
    board = ScoreBoard(ScoreMemory(1 << 12))
    region = board.take(0, 4, 2)
    memory = open_board(board._memory.path)

    async def late():
        reading = asyncio.create_task(board.read(region, 1, 2))
        await asyncio.sleep(0.02)
        assert not reading.done()
        memory[region.offset + 2 : region.offset + 6] = [1.0, np.nan, 3.0, 4.0]  # a NaN of the model is a score
        return await reading

    np.testing.assert_array_equal(asyncio.run(late()), [[1.0, np.nan], [3.0, 4.0]])


def test_a_region_that_the_engine_never_knew_is_free_at_once():
    board = ScoreBoard(ScoreMemory(4096))
    region = board.take(0, 1000, 1)
    board.give_back(region, rests=False)
    assert board.take(0, 1000, 1) == region
    with pytest.raises(Failure, match=r"Other requests use the rest.*--score-mib"):
        board.take(0, 100, 1)


def test_processes_that_share_a_board_use_parts_of_their_own():
    """The API servers of one `vllm serve` share the memory that the worker made."""
    memory = ScoreMemory(4000)
    boards = [ScoreBoard(open_board(memory.path), share=(index, 3)) for index in range(3)]
    regions = [board.take(0, 111, 3) for board in boards]
    assert [region.offset for region in regions] == [0, 333, 666]
    with pytest.raises(Failure, match="--score-mib"):
        boards[0].take(0, 1, 1)
    for number, (board, region) in enumerate(zip(boards, regions, strict=True)):
        memory.numbers[region.offset : region.offset + 333] = number
        np.testing.assert_array_equal(asyncio.run(board.read(region, 0, 111)), np.full((111, 3), number))
        board.give_back(region, rests=False)
        assert board.take(0, 111, 3) == region


def test_probes_and_steering_at_one_point_share_its_room():
    """`resid_pre` of a layer is `resid_post` of the layer before, and a site that is not set is `resid_post`."""
    facts = replace(FACTS, probe_sites=(capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE))
    steering = steering_pb2.SteeringSpec(operations=[support.ADD_JOY])
    for layer, site in ((1, capture_pb2.SITE_RESID_POST), (2, capture_pb2.SITE_RESID_PRE)):
        asked = inference_pb2.RequestSpec(steering=steering, probes=spec(probe(layer=layer, site=site)))
        resolved = resolve_spec(asked, facts)
        demand = demand_of_steering(resolved.steering, None, resolved.probes)
        assert demand.entries == 3, "one operation at layers 0 and 2, which share it, and two at layer 1"


@pytest.mark.parametrize("size", [3e38, 1e-44])
def test_a_score_whose_product_is_not_finite_changes_nothing(size):
    bank = VectorBank(2, 4, torch.device("cpu"))
    bank.load([(0, np.ones(4, "<f4").tobytes()), (1, np.full(4, size, "<f4").tobytes())])
    tap = CpuTap(bank, None, TapPoints(0, 1), torch.zeros(1, MAX_PROBE_OUTPUTS))
    steps = [Step(Kind.ADD, 0, (0,), 2.0, 0.0, 0.0), Step(Kind.SCORE, 1, (0,), 1.0, -np.inf, np.inf)]
    tap.arm(StepLayout([Program.make(steps=steps)], np.array([(0, 0, NOWHERE, 0)])))
    rows = torch.full((1, 4), 10.0)
    tap.tap(rows, None, TapPoints(0, 1).after(0))
    assert rows.tolist() == [[12.0] * 4]


def test_many_scores_take_several_messages():
    """A caller that reads slowly gets many tokens at once. No message may be too long."""
    tokens, outputs = 20_000, MAX_PROBE_OUTPUTS
    scores = (np.arange(tokens * outputs, dtype=np.float32).reshape(tokens, outputs),)
    events = messages(0, Delta("text", list(range(tokens)), scores=scores, prompt_scores=scores))
    deltas = [event.delta for event in events]
    assert all(message.ByteSize() < 2 << 20 for message in deltas)
    assert [token for message in deltas for token in message.token_ids] == list(range(tokens))
    assert "".join(message.text for message in deltas) == "text"
    for name in ("scores", "prompt_scores"):
        values = [value for message in deltas for part in getattr(message, name) for value in part.values]
        np.testing.assert_array_equal(values, scores[0].ravel())


def test_a_score_that_never_arrives_fails():
    seconds = iter(range(0, 1000, 6))
    board = ScoreBoard(ScoreMemory(1 << 12), clock=lambda: next(seconds))
    region = board.take(0, 4, 2)
    with pytest.raises(Failure, match="did not arrive"):
        asyncio.run(board.read(region, 0, 1))


def test_a_full_board_refuses_and_regions_rest_before_they_are_used_again():
    now = [0.0]
    board = ScoreBoard(ScoreMemory(4096), clock=lambda: now[0])
    region = board.take(0, 1000, 1)
    with pytest.raises(Failure, match="--score-mib") as caught:
        board.take(0, 100, 1)
    assert (caught.value.reason, caught.value.metadata) == (Reason.ERROR_REASON_LIMIT_REACHED, {"limit": "score_mib"})
    board.give_back(region)
    with pytest.raises(Failure):  # a step of the ended request may still write to it
        board.take(0, 100, 1)
    now[0] = 60.0
    assert board.take(0, 1000, 1) == region


def test_deltas_that_are_merged_keep_their_scores():
    one = Delta("a", [1], scores=(np.array([[1.0]]), np.array([[2.0, 3.0]])))
    both = one.followed_by(Delta("b", [2], scores=(np.array([[4.0]]), np.array([[5.0, 6.0]]))))
    assert [part.tolist() for part in both.scores] == [[[1.0], [4.0]], [[2.0, 3.0], [5.0, 6.0]]]
    assert one.followed_by(Delta("", [], "stop")).scores == one.scores
    assert Delta("", [1]).followed_by(Delta("", [2])).scores == ()


def attending(**fields):
    """A probe with one head: the products of A are its logits, and those of B its values."""
    attention = probe_pb2.AttentionPooling(heads=1)
    return probe("t", outputs=((A, 0.0), (B, 0.5)), attention=attention, **fields)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("steps", [[5], [1, 1, 1, 1, 1], [2, 3]])
async def test_an_attention_probe_reads_the_whole_sequence(monkeypatch, prompt, quick, steps):
    """In whatever parts the tokens come, and whether or not the prompt's scores are asked for."""
    if not quick:
        monkeypatch.setattr(scoring, "_QUICK_SCORES", 0)
        monkeypatch.setattr(scoring, "_PIECE_SCORES", 2 * 3)
    prompt_tokens, products = 20, np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32) * 3
    weights = np.exp(products[:, 0].astype(np.float64))
    expected = np.cumsum(weights * (products[:, 1] + 0.5)) / np.cumsum(weights)

    class Board:
        async def read(self, region, first, count):
            return products[first : first + count]

    sequence = SequenceScores(Board(), None, ProbeGroups(spec(attending())), prompt_tokens, prompt=prompt)
    deltas = [await sequence.add_to(Delta("", [0] * count)) for count in steps]
    found = np.concatenate([delta.scores[0][:, 0] for delta in deltas])
    np.testing.assert_allclose(found, expected[prompt_tokens - 1 :], rtol=1e-5)
    if prompt:
        np.testing.assert_allclose(deltas[0].prompt_scores[0][:, 0], expected[:prompt_tokens], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "sequences", "tokens", "needed", "by_prompt"),
    [
        ({}, 3, 100, 12 * 100, 0),
        ({}, 1, 300, 4 * 300, 0),
        ({"score_prompt": True}, 1, 50, 4 * (50 + 209), 4 * 209),
        ({"score_prompt": True}, 2, 50, 4 * (100 + 209), 4 * 209),
        ({"pools": True}, 2, 50, 16 * (50 + 209), 16 * 209),
    ],
)
async def test_scores_that_never_fit_together_are_refused_at_once(fields, sequences, tokens, needed, by_prompt):
    """Each sequence of three would fit alone. The failure says how much of that is for the prompt of 210 tokens."""
    board = ScoreBoard(ScoreMemory(1 << 10))
    item = attending() if fields.pop("pools", False) else probe()
    sampling = inference_pb2.SamplingParameters(max_tokens=tokens, num_sequences=sequences)
    with pytest.raises(Failure, match="Generate fewer tokens or sequences") as caught:
        async with scoring.scoring(board, SharedSpec(probes=spec(item, **fields)), 210, sampling):
            pass
    assert caught.value.reason == Reason.ERROR_REASON_LIMIT_REACHED
    assert caught.value.metadata == {
        "limit": "score_mib", "needed": str(needed), "allowed": "1024", "needed_by_prompt": str(by_prompt)
    }  # fmt: skip
    assert ("a shorter prompt" in str(caught.value)) == bool(by_prompt)
    assert board.take(0, 256, 1).offset == 0, "nothing was taken"


async def test_every_sequence_of_an_attention_probe_has_its_prompts_rows():
    board = ScoreBoard(ScoreMemory(1 << 14))
    sampling = inference_pb2.SamplingParameters(max_tokens=4, num_sequences=2)
    for item, first in ((attending(), 0), (probe(outputs=((A, 0.0), (B, 0.0))), 9)):
        async with scoring.scoring(board, SharedSpec(probes=spec(item)), 10, sampling) as held:
            assert [(one.region.first_position, one.region.positions) for one in held] == [(first, 13 - first)] * 2


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        ({"heads": 0}, "0 heads; from 1 to 16"),
        ({"heads": 17}, "17 heads"),
        ({"heads": 2}, "2 outputs; 2 heads need"),
        ({"heads": 1, "position_weights": [math.nan]}, "not all finite"),
        ({"heads": 1, "position_weights": [1, 2]}, "2 position weights for 1 heads"),
    ],
)
def test_invalid_attention_is_refused(attention, words):
    bad = probe(outputs=((A, 0.0), (B, 0.0)), attention=probe_pb2.AttentionPooling(**attention))
    with pytest.raises(Failure, match=words) as caught:
        resolve_spec(inference_pb2.RequestSpec(probes=spec(bad)), FACTS)
    assert caught.value.metadata["field"] == "probes.probes[0].attention"


async def test_the_scores_of_a_long_prompt_do_not_hold_up_other_requests(monkeypatch):
    """A thread computes them in pieces, with the same result."""
    products = np.random.default_rng(0).standard_normal((3000, 3)).astype(np.float32)
    spec_ = spec(
        probe("p", outputs=((A, 0.5),), smoothing=probe_pb2.Smoothing(mean=64)),
        probe("q", layer=2, outputs=((A, 0.0), (B, 1.0)), smoothing=probe_pb2.Smoothing(ema=0.5)),
    )

    class Board:
        async def read(self, region, first, count):
            return products[first : first + count]

    async def scored():
        sequence = SequenceScores(Board(), None, ProbeGroups(spec_), len(products), prompt=True)
        return (await sequence.add_to(Delta("", ()))).prompt_scores

    threads = []
    of_probes = ProbeGroups.scores

    def watched(self, products, smoothers):
        threads.append((threading.current_thread(), len(products)))
        return of_probes(self, products, smoothers)

    monkeypatch.setattr(ProbeGroups, "scores", watched)
    whole = await scored()
    assert threads == [(threading.main_thread(), 3000)]
    threads.clear()
    monkeypatch.setattr(scoring, "_QUICK_SCORES", 0)
    monkeypatch.setattr(scoring, "_PIECE_SCORES", 3 * 700)
    pieces = await scored()
    assert [count for _, count in threads] == [700, 700, 700, 700, 200]
    assert threading.main_thread() not in {thread for thread, _ in threads}
    for found, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_probe_has_the_same_scores_among_others_as_alone():
    """Probes with the same arithmetic are computed together: the result must not depend on which others there are."""
    ema, mean = probe_pb2.Smoothing(ema=0.5), probe_pb2.Smoothing(mean=2)
    sigmoid, softmax = probe_pb2.PROBE_ACTIVATION_SIGMOID, probe_pb2.PROBE_ACTIVATION_SOFTMAX
    last = probe_pb2.ProbeLayer(weights=np.float32([[1.0, -2.0]]).tobytes(), biases=[0.25])
    two = ((A, 0.5), (B, -1.0))
    probes = [
        probe("a", layer=3),
        probe("b", layer=1, outputs=two, activation=sigmoid),
        probe("c", layer=2, outputs=two, activation=softmax),
        probe("d", layer=0, activation=sigmoid, smoothing=ema),
        probe("e", layer=3, outputs=two, mlp=[last], smoothing=mean),
        probe("f", layer=2, activation=sigmoid, smoothing=ema),
        probe("g", layer=0, outputs=two, activation=softmax),
        probe("h", layer=1, outputs=two, attention=probe_pb2.AttentionPooling(heads=1)),
        probe("i", layer=1, activation=sigmoid, smoothing=mean),
        probe("j", layer=0, outputs=two),
    ]
    whole = spec(*probes)
    groups = groups_of(SharedSpec(probes=whole))
    products = np.random.default_rng(0).standard_normal((5, groups.columns)).astype(np.float32)
    products[1, ::3] = np.inf
    phase, other = groups.begin(), groups.begin()
    parts = []
    for part in (slice(0, 1), slice(1, 2), slice(2, 5)):
        parts.append(groups.scores(products[part], phase))
        groups.scores(-products[part], other)  # of another request meanwhile
    together = [np.concatenate(of_probe) for of_probe in zip(*parts, strict=True)]
    for index, (item, columns) in enumerate(zip(probes, columns_of(whole), strict=True)):
        alone = ProbeGroups(spec(item))
        (expected,) = alone.scores(products[:, columns], alone.begin())
        np.testing.assert_allclose(together[index], expected, rtol=1e-6, err_msg=item.name)
