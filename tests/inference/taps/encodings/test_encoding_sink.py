"""Rows on their way into the ring: encoded, projected, reduced, or lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.plan import Capture, RequestPlan, RowEncoding
from inference_svc.taps.reductions import _Running
from inference_svc.taps.sink import BlockSink
from residuum.v1 import capture_pb2
from residuum.wire.limits import MAX_CHUNK_BYTES
from residuum.wire.rows.encodings import (
    BY_DIMENSION,
    ENCODINGS,
    FP32,
    FULL8,
    PROJECT,
    RAW,
    RP8,
    TOPK,
    RowFormat,
    basis_of,
)
from tests.inference.taps_support import CPU, DTYPES, GENERATED, MLP, POST, PROMPT, Ring, Worker, is_wanted, select

HIDDEN, VECTORS = 24, 3
LAST, MEAN, MAX, SUM = (getattr(capture_pb2, f"REDUCTION_{name}") for name in ("LAST", "MEAN", "MAX", "SUM"))


class EncodedRing(Ring):
    """A ring that keeps the encoded payloads."""

    def publish(self, extent, capture_id, headers):
        data, at = self._taken.pop(extent), 0
        for header in headers:
            form = RowFormat.of(header)
            size = form.payload_bytes(len(header.layers), len(header.positions))
            self.chunks.append((header, form, data[at : at + size]))
            at += size
        assert at == len(data)


def make_worker(dtype=torch.float32, layers=range(2), **options):
    rng = np.random.default_rng(3)
    worker = Worker(hidden=HIDDEN, dtype=dtype, layers=layers, vectors=rng.standard_normal((8, HIDDEN)), **options)
    worker.ring = EncodedRing(options.get("ring_bytes"))
    worker.sink = BlockSink(worker.pool, worker.sink._format, worker.ring, worker.bank)
    worker.runtime._sink = worker.sink
    return worker


class Engine:
    """A worker whose model computes random rows, and records all of them."""

    def __init__(self, dtype=torch.float32, **options):
        self.worker = make_worker(dtype, **options)
        self.dtype = dtype
        self.rows = {}
        """(request, site, layer, position): the row that was computed first."""

    def compute(self, *parts, admitted=(), finished=()):
        """Run a step of (request, first position, count)."""
        total = sum(count for _, _, count in parts)
        tensors = {}
        for site in (POST, MLP):
            for layer in self.worker.layers:
                values = torch.randn(total, HIDDEN).to(self.dtype)
                tensors[site, layer] = (values, None)
                names = [(name, first + i) for name, first, count in parts for i in range(count)]
                for (name, position), value in zip(names, values, strict=True):
                    self.rows.setdefault((name, site, layer, position), value.clone())
        self.worker.step(parts, admitted=admitted, finished=finished, tensors=tensors)

    def run(self, plan, tokens, chunk=50):
        """Compute one request from its first position to its last: the prompt in chunks, then one token at a time."""
        prompt, admitted = plan.prompt_tokens, [("a", plan)]
        for first in range(0, prompt, chunk):
            self.compute(("a", first, min(chunk, prompt - first)), admitted=admitted)
            admitted = ()
        for position in range(prompt, tokens):
            self.compute(("a", position, 1))
        self.compute(finished=["a"])

    def stored(self):
        """Return {(site, layer, position): decoded row}. No key may occur twice."""
        found = {}
        for header, form, payload in self.worker.ring.chunks:
            prefixes, rows = form.split(payload, len(header.layers), len(header.positions))
            values = form.decode(rows, None if prefixes is None else prefixes[:, None])
            for i, layer in enumerate(header.layers):
                for j, position in enumerate(header.positions):
                    assert (header.site, layer, position) not in found
                    found[header.site, layer, position] = values[i, j].astype(np.float64)
        return found

    def computed(self, site, layer, positions):
        rows = [self.rows["a", site, layer, position] for position in positions]
        return torch.stack(rows).double().numpy()


def capture(encoding=None, reduction=capture_pb2.REDUCTION_NONE, positions=None, **options):
    return Capture(
        "c", 0, (0, 1), positions or select(), (POST, MLP), encoding=encoding or RowEncoding(), reduction=reduction,
        **options,
    )  # fmt: skip


WITHOUT_SAE = [name for name in ENCODINGS if name != "sae"]
"""test_sae.py has features of sparse autoencoders."""


def encoding_of(name):
    dimensions = {"rp": 7, "rp8": 7, "topk": 5, "topk8": 5, "project": VECTORS}.get(name, 0)
    rows = (6, 0, 2) if name == "project" else ()
    return RowEncoding(ENCODINGS[name], dimensions, 11 if "rp" in name else 0, rows=rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITHOUT_SAE)
def test_a_capture_is_encoded_as_it_asks(name, dtype):
    torch.manual_seed(0)
    engine, encoding = Engine(dtype), encoding_of(name)
    engine.run(RequestPlan(70, capture(encoding)), 110)
    found = engine.stored()
    assert found.keys() == {(site, layer, p) for site in (POST, MLP) for layer in (0, 1) for p in range(110)}
    vectors = engine.worker.bank.vectors[list(encoding.rows)].numpy()
    for header, form, payload in engine.worker.ring.chunks:
        assert form == RowFormat(ENCODINGS[name], HIDDEN, DTYPES[dtype][1], encoding.dimensions)
        values = np.stack([engine.computed(header.site, layer, header.positions) for layer in header.layers])
        options = capture_pb2.EncodingOptions(seed=encoding.seed)
        expected = form.encode(values.astype(DTYPES[dtype][0]), basis_of(form, options, list(vectors)))
        wanted = form.decode(form.split(expected, *values.shape[:2])[1])
        got = form.decode(form.split(payload, *values.shape[:2])[1])
        step = 0.02 if form.encoding == RP8 else 0.0  # a sum may round to the next integer
        np.testing.assert_allclose(got.astype(float), wanted.astype(float), atol=1e-5 + step)


def test_rows_quantised_along_dimensions_fit_one_chunk():
    torch.manual_seed(0)
    engine = Engine(rows=8 * 400, largest_block=8 * 100)
    encoding = RowEncoding(FULL8, axis=BY_DIMENSION)
    engine.run(RequestPlan(70, capture(encoding)), 80, chunk=70)
    (header, form, payload) = engine.worker.ring.chunks[0]
    assert list(header.positions) == [*range(70)]
    assert form.axis == BY_DIMENSION
    values = np.stack([engine.computed(POST, layer, header.positions) for layer in (0, 1)]).astype(np.float32)
    assert payload.tobytes() == form.encode(values)
    assert len(engine.stored()) == 4 * 80
    wide = BlockPool(4000, 4096, torch.float32, CPU, largest_block=4000)
    block = wide.take(Capture("c", 0, (0,), select(), encoding=encoding), 2000)
    form = encoding.format_of(4096, header.dtype)
    assert form.payload_bytes(1, block.capacity) <= MAX_CHUNK_BYTES < form.payload_bytes(1, 600)


def test_a_block_holds_fewer_positions_where_encoded_rows_are_longer():
    pool = BlockPool(20_000, HIDDEN, torch.bfloat16, CPU, largest_block=4000)
    capacities = {
        name: pool.take(capture(encoding), 3000).capacity
        for name, encoding in {
            "raw": RowEncoding(RAW),
            "rp8": RowEncoding(RP8, 8),
            "fp32": RowEncoding(FP32),
            "project": RowEncoding(PROJECT, 120, rows=(0,) * 120),
        }.items()
    }
    assert capacities == {"raw": 1000, "rp8": 1000, "fp32": 500, "project": 100}


def test_vectors_are_those_of_the_requests_begin():
    """Another vector may be in the bank's row before the last block has left."""
    engine = Engine()
    encoding = RowEncoding(PROJECT, 1, rows=(4,))
    vector = engine.worker.bank.vectors[4].double().numpy()
    engine.compute(("a", 0, 3), admitted=[("a", RequestPlan(2, capture(encoding)))])
    engine.worker.bank.load([(4, np.zeros(HIDDEN, dtype="<f4").tobytes())])
    engine.compute(finished=["a"])
    found = engine.stored()
    for position in range(3):
        expected = engine.computed(POST, 0, [position]) @ vector
        np.testing.assert_allclose(found[POST, 0, position], expected, rtol=1e-5)
    assert not engine.worker.sink._followed


def test_a_full_ring_sheds_encoded_rows_by_their_own_size():
    engine = Engine(ring_bytes=4 * 40 * (8 + HIDDEN))
    engine.run(RequestPlan(70, capture(RowEncoding(FULL8), sheds=True)), 70, chunk=70)
    assert [list(header.positions) for header, _, _ in engine.worker.ring.chunks[::2]] == [
        [*range(32)],
        [*range(64, 70)],
    ]
    ((_, loss),) = engine.worker.ring.losses
    assert list(loss.positions) == [*range(32, 64)]


def reduced(rows, reduction):
    """The reduction of rows, in float64."""
    return {LAST: rows[-1], MEAN: rows.mean(0), MAX: rows.max(0), SUM: rows.sum(0)}[reduction]


SELECTIONS = {
    "all": select(),
    "prompt": select(phases=(PROMPT,)),
    "generated": select(phases=(GENERATED,)),
    "every fifth": select(every=5),
    "some": select((3, 60), (75, 90)),
    "the first": select((0, 0)),
}


@pytest.mark.parametrize("reduction", [LAST, MEAN, MAX, SUM])
@pytest.mark.parametrize("positions", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize(("prompt", "tokens"), [(70, 115), (64, 65), (1, 40), (33, 33), (70, 74)])
def test_a_reduction_has_one_row_for_each_phase(reduction, positions, prompt, tokens):
    torch.manual_seed(1)
    engine = Engine()
    engine.run(RequestPlan(prompt, capture(None, reduction, positions, spare_positions=7)), tokens)
    wanted = [position for position in range(tokens) if is_wanted(positions, prompt, position)]
    of_prompt, generated = [p for p in wanted if p < prompt], [p for p in wanted if p >= prompt]
    expected = {*of_prompt[-1:], *generated[-8:]}
    found = engine.stored()
    assert found.keys() == {(site, layer, p) for site in (POST, MLP) for layer in (0, 1) for p in expected}
    for (site, layer, position), row in found.items():
        phase = of_prompt if position < prompt else generated
        rows = engine.computed(site, layer, [p for p in phase if p <= position])
        np.testing.assert_allclose(row, reduced(rows, reduction), rtol=1e-5, atol=1e-5)
    assert engine.worker.pool.free_rows == 16 * 2 * 32
    assert not engine.worker.sink._followed


@pytest.mark.parametrize("reduction", [LAST, MEAN, MAX, SUM])
def test_reduced_rows_can_have_every_encoding(reduction):
    torch.manual_seed(2)
    engine = Engine(torch.bfloat16)
    engine.run(RequestPlan(70, capture(RowEncoding(FP32), reduction)), 120)
    for (site, layer, position), row in engine.stored().items():
        assert position in (69, 119)
        rows = engine.computed(site, layer, range(70) if position == 69 else range(70, 120))
        np.testing.assert_allclose(row, reduced(rows, reduction), rtol=1e-5, atol=1e-5)
    for name in WITHOUT_SAE:
        if name != "fp32":
            engine = Engine(torch.bfloat16)
            engine.run(RequestPlan(70, capture(encoding_of(name), reduction)), 120)
            assert {position for _, _, position in engine.stored()} == {69, 119}
    rounded = Engine(torch.bfloat16)
    rounded.run(RequestPlan(70, capture(RowEncoding(TOPK, HIDDEN), reduction)), 120)
    for (site, layer, position), row in rounded.stored().items():
        rows = rounded.computed(site, layer, range(70) if position == 69 else range(70, 120))
        np.testing.assert_allclose(row, reduced(rows, reduction), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("reduction", [MEAN, MAX, SUM])
def test_reductions_keep_values_that_are_not_finite(reduction):
    engine = Engine()
    plan = RequestPlan(3, capture(None, reduction))
    values = torch.ones(3, HIDDEN)
    values[1, 4] = float("nan")
    tensors = {(site, layer): (values.clone(), None) for site in (POST, MLP) for layer in (0, 1)}
    engine.worker.step([("a", 0, 3)], admitted=[("a", plan)], tensors=tensors)
    for row in engine.stored().values():
        assert np.isnan(row[4])
        assert np.isfinite(np.delete(row, 4)).all()


@pytest.mark.parametrize("reduction", [LAST, MEAN, MAX, SUM])
def test_a_position_that_is_computed_again_counts_once(reduction):
    torch.manual_seed(3)
    engine = Engine()
    engine.compute(("a", 0, 40), admitted=[("a", RequestPlan(60, capture(None, reduction)))])
    engine.compute(("a", 0, 60))  # preempted during its prompt
    for position in range(60, 100):
        engine.compute(("a", position, 1))
    engine.compute(("a", 0, 64))  # preempted during its reply
    engine.compute(("a", 64, 40))
    engine.compute(finished=["a"])
    found = engine.stored()
    assert {position for _, _, position in found} == {59, 103}
    for (site, layer, position), row in found.items():
        rows = engine.computed(site, layer, range(60) if position == 59 else range(60, 104))
        np.testing.assert_allclose(row, reduced(rows, reduction), rtol=1e-5, atol=1e-5)


def test_a_reduction_with_missing_rows_is_reported_as_lost():
    engine = Engine()
    engine.compute(("a", 0, 20), admitted=[("a", RequestPlan(60, capture(None, MEAN)))])
    engine.compute(("a", 25, 35))  # the engine read five positions from a cache
    engine.compute(("a", 60, 1))
    engine.compute(finished=["a"])
    assert {position for _, _, position in engine.stored()} == {60}, "the reduction of the reply is complete"
    lost = [list(loss.positions) for _, loss in engine.worker.ring.losses]
    assert lost == [[20, 21, 22, 23, 24], [59]]


def test_an_aborted_prompt_has_no_row():
    engine = Engine()
    engine.compute(("a", 0, 20), admitted=[("a", RequestPlan(60, capture(None, SUM)))])
    engine.compute(finished=["a"])
    assert not engine.worker.ring.chunks
    assert engine.worker.pool.free_rows == 16 * 2 * 32
    assert not engine.worker.sink._followed


def test_shed_reduced_rows_are_reported():
    engine = Engine(ring_bytes=10)
    engine.run(RequestPlan(40, capture(None, MEAN, spare_positions=2, sheds=True)), 50)
    assert [list(loss.positions) for _, loss in engine.worker.ring.losses] == [[39], [47, 48, 49]]
    assert {loss.reason for _, loss in engine.worker.ring.losses} == {capture_pb2.INCOMPLETE_REASON_OVERFLOW}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError()], ids=repr)
@pytest.mark.parametrize(
    ("method", "nth", "stored", "lost"),
    [
        ("add", 1, set(), {*range(115)}),
        ("add", 3, set(), {*range(64, 115)}),  # the last block of the prompt
        ("add", 4, {69}, {*range(70, 115)}),
        ("add", 5, {69}, {*range(81, 115)}),  # with the last eight rows of the block before it
        ("take", 1, set(), {*range(64, 115)}),
        ("take", 2, {69}, {*range(107, 115)}),
    ],
)
def test_without_memory_only_the_rows_of_the_reduction_are_lost(monkeypatch, method, nth, stored, lost, error):
    engine, calls = Engine(), []
    plain = getattr(_Running, method)

    def failing(*args):
        calls.append(args)
        if len(calls) == nth:
            raise error
        return plain(*args)

    monkeypatch.setattr(_Running, method, failing)
    engine.run(RequestPlan(70, capture(None, MEAN, spare_positions=7)), 115)
    assert {position for _, _, position in engine.stored()} == stored
    losses = [loss for _, loss in engine.worker.ring.losses]
    assert {position for loss in losses for position in loss.positions} == lost
    assert {loss.reason for loss in losses} == {capture_pb2.INCOMPLETE_REASON_WRITE_FAILED}
    assert f"could not reduce rows ({type(error).__name__})" in losses[0].detail
    assert engine.worker.pool.free_rows == 16 * 2 * 32
    assert not engine.worker.sink._followed


def test_a_stage_encodes_and_reduces_its_own_layers():
    torch.manual_seed(4)
    for reduction in (capture_pb2.REDUCTION_NONE, MEAN):
        engine = Engine(layers=range(4, 6))
        asked = Capture("c", 0, (0, 3, 5, 9), select(), (POST, MLP), encoding=RowEncoding(FP32), reduction=reduction)
        engine.run(RequestPlan(40, asked), 60)
        assert {layer for _, layer, _ in engine.stored()} == {5}
        assert len(engine.stored()) == 2 * (60 if reduction == capture_pb2.REDUCTION_NONE else 2)


def test_another_request_may_use_the_same_id():
    """The first request's last block has not left yet, as can happen on a GPU."""
    torch.manual_seed(5)
    engine = Engine()
    sink = engine.worker.sink
    plans = [RequestPlan(4, capture(None, SUM)) for _ in range(2)]
    blocks = []
    for plan, value in zip(plans, (1.0, 10.0), strict=True):
        sink.begin(plan)
        block = engine.worker.pool.take(plan.capture, 4)
        block.positions.extend(range(4))
        engine.worker.pool.rows(block).fill_(value)
        blocks.append(block)
    sink.send([blocks[0]])
    sink.end(plans[0].capture)
    sink.send([blocks[1]])
    sink.end(plans[1].capture)
    payloads = [payload.view("<f4") for _, _, payload in engine.worker.ring.chunks]
    assert [set(payload.tolist()) for payload in payloads] == [{4.0}, {4.0}, {40.0}, {40.0}]
    assert not sink._followed


happenings = st.lists(st.one_of(st.integers(1, 45), st.just("preempt")), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    happenings,
    st.integers(1, 60),
    st.integers(0, 9),
    st.sampled_from([LAST, MEAN, MAX, SUM]),
    st.sampled_from(list(SELECTIONS.values())),
)
def test_reductions_do_not_depend_on_the_schedule(happenings, prompt, spare, reduction, positions):
    """In chunks of any length, with preemption at any time, compared with all rows, one by one."""
    engine, position, reached = Engine(), 0, 0
    admitted = [("a", RequestPlan(prompt, capture(None, reduction, positions, spare_positions=spare)))]
    for happening in happenings:
        if happening == "preempt":
            position = 0
            continue
        # A step computes known tokens of the prompt and the reply, and one new token.
        count = min(happening, max(prompt, reached + (reached >= prompt)) - position)
        engine.compute(("a", position, count), admitted=admitted)
        admitted, position = (), position + count
        reached = max(reached, position)
    engine.compute(finished=["a"], admitted=admitted)
    wanted = [place for place in range(reached) if is_wanted(positions, prompt, place)]
    of_prompt, generated = [p for p in wanted if p < prompt], [p for p in wanted if p >= prompt]
    last = max((p for p in range(prompt) if is_wanted(positions, prompt, p)), default=None)
    expected = {*generated[-spare - 1 :], *({last} & set(of_prompt))}
    found = engine.stored()
    assert {place for _, _, place in found} == expected
    for (site, layer, place), row in found.items():
        rows = engine.computed(site, layer, [p for p in (of_prompt if place < prompt else generated) if p <= place])
        np.testing.assert_allclose(row, reduced(rows, reduction), rtol=1e-5, atol=1e-5)
    assert engine.worker.pool.free_rows == 16 * 2 * 32
    assert not engine.worker.ring.losses
