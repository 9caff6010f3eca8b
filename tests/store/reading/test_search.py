"""Search: equal to float64 numpy over the rows that a reader gets, with everything that it leaves out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, errors_pb2, selection_pb2, store_pb2, tensor_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.labels import to_label
from residuum.wire.rows.encodings import RowFormat
from residuum.wire.rows.frames import checksum, chunk_prefix, parse_chunk
from store_svc.calls import Calls
from store_svc.database.db import Table
from store_svc.searching.turns import Turns
from tests.store.support import (
    ABORTED,
    COMPLETE,
    INCOMPLETE,
    POST,
    PRE,
    describe,
    failing_with,
    seal_request,
    serving,
    stored_frames,
    without_collections,
)  # fmt: skip

INVALID = errors_pb2.ERROR_REASON_INVALID_FIELD
F32, F16, BF16 = tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_FLOAT16, tensor_pb2.DATA_TYPE_BFLOAT16
WIDTH = 6
MOST, LEAST, ABSOLUTE = (
    store_pb2.SEARCH_ORDER_MOST, store_pb2.SEARCH_ORDER_LEAST, store_pb2.SEARCH_ORDER_ABSOLUTE
)  # fmt: skip
PROJECTION, COSINE = store_pb2.SEARCH_MEASURE_PROJECTION, store_pb2.SEARCH_MEASURE_COSINE


def chunk_of(values, layers, positions, *, encoding=capture_pb2.ENCODING_RAW, dtype=F32, **header):
    """Return a chunk with the values [layers, positions, width], rounded to `dtype` and encoded."""
    form = RowFormat(encoding, values.shape[2], dtype, header.get("dimensions", 0))
    payload = form.encode(values.astype(numpy_dtype(dtype)))
    head = capture_pb2.ChunkHeader(
        **{"sequence": 0, "site": POST, **header}, layers=layers, positions=positions, width=values.shape[2],
        dtype=dtype, encoding=encoding,
    )  # fmt: skip
    return chunk_prefix(head, checksum(payload), len(payload)) + payload


def put(client, name, values, *, labels=None, texts=None, outcome=COMPLETE, seal=True, missing=(), at_once=3, **fields):
    """Store a capture of one sequence and layer 1 with the values [positions, width], all of its prompt."""
    description = describe(name, layers=[1], prompt=len(values), width=values.shape[1])
    description.dtype = fields.get("dtype", F32)
    description.spec.encoding = fields.get("encoding", capture_pb2.ENCODING_RAW)
    description.spec.encoding_options.dimensions = fields.get("dimensions", 0)
    description.spec.labels.extend(to_label(*item) for item in (labels or {}).items())
    client.open(description)
    kept = [at for at in range(len(values)) if at not in missing]
    for first in range(0, len(kept), at_once):
        at = kept[first : first + at_once]
        client.append([chunk_of(values[None, at], [1], at, **fields)], name)
    if missing:
        reason = capture_pb2.INCOMPLETE_REASON_OVERFLOW
        loss = store_pb2.RowLoss(sites=[POST], layers=[1], positions=list(missing), reason=reason)
        message = store_pb2.AppendChunksRequest(number=1, capture_id=name, loss=loss)
        client.send([message.SerializeToString()])
    if seal:
        request = seal_request(name, [0], outcome)
        if texts:
            request.prompt_token_texts.text = "".join(texts)
            request.prompt_token_texts.lengths.extend(map(len, texts))
        client.stub.SealCapture(request)
    return values


def search(client, vector, *, max_hits=10, layer=1, **fields):
    request = store_pb2.SearchRequest(
        vector=np.asarray(vector, "<f4").tobytes(), max_hits=max_hits, layer=layer, **fields
    )
    answers = list(client.stub.Search(request, timeout=30))
    assert [answer.is_last for answer in answers] == [False] * (len(answers) - 1) + [True]
    return [hit for answer in answers for hit in answer.hits], answers[-1]


def places(hits):
    return [(hit.capture_id, hit.sequence, hit.position) for hit in hits]


def left_out(answer):
    return {store_pb2.LeftOutReason.Name(item.reason)[16:]: item.count for item in answer.progress.left_out}


def read_rows(client, name, layer, site=POST, **fields):
    """Return the rows as a reader gets them, in float64, by sequence and position."""
    request = store_pb2.ReadChunksRequest(capture_id=name, layers=[layer], sites=[site], **fields)
    rows = {}
    for answer in client.stub.ReadChunks(request, timeout=30):
        if answer.WhichOneof("content") == "chunk":
            view = parse_chunk(answer.chunk.SerializeToString())
            for position, values in zip(view.header.positions, view.rows()[0], strict=True):
                rows[view.header.sequence, position] = values.astype(np.float64)
    return rows


def reference(rows, vector, measure, order):
    """Return the places of rows with a finite score from the first hit to the last, with their scores."""
    vector = np.asarray(vector, np.float32).astype(np.float64)
    found = []
    for place, values in rows.items():
        with np.errstate(all="ignore"):
            score = float(np.sum(values * vector))
            if measure == COSINE:
                score /= np.sqrt(np.sum(values**2)) * np.sqrt(np.sum(vector**2))
        if np.isfinite(score):
            rank = {MOST: score, LEAST: -score, ABSOLUTE: abs(score)}[order]
            found.append((-rank, place, score))
    return [(place, score) for _, place, score in sorted(found)]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_search_equals_float64_over_what_a_reader_gets(clients, data):
    client = clients
    for summary in client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_size=1000)).captures:
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=summary.capture_id))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = {}
    for name in data.draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True)):
        length = data.draw(st.integers(1, 12))
        encoding = data.draw(st.sampled_from(["RAW", "FP32", "FP16", "BF16", "FULL8", "TOPK", "TOPK8"]))
        number = capture_pb2.Encoding.Value(f"ENCODING_{encoding}")
        values = np.round(random.standard_normal((length, WIDTH)) * 2) / data.draw(st.sampled_from([1, 1e-3, 1e4]))
        missing = data.draw(st.sets(st.integers(0, length - 1), max_size=length // 2))
        put(
            client, name, values, encoding=number, dtype=data.draw(st.sampled_from([F32, F16, BF16])),
            dimensions=3 if encoding.startswith("TOPK") else 0, missing=missing,
        )  # fmt: skip
        if data.draw(st.booleans()):
            rows |= {(name, *place): row for place, row in read_rows(client, name, 1).items()}
        else:
            client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=name))
    vector = random.standard_normal(WIDTH)
    measure, order = (
        data.draw(st.sampled_from([PROJECTION, COSINE])),
        data.draw(st.sampled_from([MOST, LEAST, ABSOLUTE])),
    )
    count = data.draw(st.integers(1, 30))
    limit = data.draw(st.integers(0, 3))
    hits, answer = search(client, vector, max_hits=count, measure=measure, order=order, max_hits_per_capture=limit)
    wanted, taken = [], {}
    for place, score in reference(rows, vector, measure, order):
        taken[place[0]] = taken.get(place[0], 0) + 1
        if len(wanted) < count and (not limit or taken[place[0]] <= limit):
            wanted.append((place, score))
    np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in wanted], rtol=1e-12)
    assert places(hits) == [place for place, _ in wanted]
    assert answer.progress.rows_scanned == len(rows)
    assert answer.progress.num_captures == answer.progress.captures_done == len({place[0] for place in rows})


@pytest.fixture(scope="module", params=[1, 3], ids=["one shard", "three shards"])
def clients(request, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("store"), shards=request.param) as (_, client):
        yield client


def test_equal_scores_come_by_capture_sequence_and_position(client):
    rows = np.ones((5, 512))
    for name in "dacb":
        put(client, name, rows)
    for count in (1, 3, 7, 20):
        hits, _ = search(client, np.linspace(-1, 2, 512), max_hits=count)
        assert places(hits) == [(name, 0, at) for name in "abcd" for at in range(5)][:count]


def test_many_rows_in_many_blocks(client):
    random = np.random.default_rng(1)
    rows = {}
    width = 40_000  # three rows fill a block
    for name in "abc":
        values = put(client, name, random.standard_normal((10, width)).astype(np.float32))
        rows |= {(name, 0, at): row.astype(np.float64) for at, row in enumerate(values)}
    vector = random.standard_normal(width)
    hits, _ = search(client, vector, max_hits=30)
    expected = reference(rows, vector, PROJECTION, MOST)
    assert places(hits) == [place for place, _ in expected]


def test_sites_layers_sequences_and_positions(client):
    description = describe("a", layers=[0, 2, 3], sites=[POST, PRE], prompt=2, sequences=2, width=WIDTH)
    client.open(description)
    random = np.random.default_rng(2)
    for sequence in range(2):
        for site in (POST, PRE):
            for positions in ([0, 1], [2, 3, 5], [4]):
                values = random.standard_normal((3, len(positions), WIDTH)).astype(np.float32)
                client.append([chunk_of(values, [0, 2, 3], positions, sequence=sequence, site=site)], "a")
    client.seal("a", [5, 3])  # of the second sequence, positions 4 and 5 do not count
    vector = random.standard_normal(WIDTH)
    for site in (POST, PRE):
        for layer in (0, 2, 3):
            rows = {("a", *place): row for place, row in read_rows(client, "a", layer, site).items()}
            hits, _ = search(client, vector, layer=layer, site=site, max_hits=100)
            assert places(hits) == [place for place, _ in reference(rows, vector, PROJECTION, MOST)]
            assert len(hits) == 6 + 4
    generated = selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_GENERATED])
    hits, _ = search(client, vector, layer=2, positions=generated, max_hits=100)
    assert sorted(places(hits)) == [("a", 0, 2), ("a", 0, 3), ("a", 0, 4), ("a", 0, 5), ("a", 1, 2), ("a", 1, 3)]


def test_hits_have_their_token_and_the_text_around(client):
    values = np.zeros((5, WIDTH))
    values[3, 0] = 1
    put(client, "a", values, texts=["The", " Eiffel", " Tower", " is", " tall"])
    put(client, "b", values)
    hits, _ = search(client, np.eye(WIDTH)[0], max_hits=2, context_tokens=2)
    assert [(hit.token_id, hit.text_before, hit.text, hit.text_after) for hit in hits] == [
        (3, " Eiffel Tower", " is", " tall"),
        (3, "", "", ""),
    ]
    assert [hit.HasField("text") for hit in hits] == [True, False]
    hits, _ = search(client, np.eye(WIDTH)[0], max_hits=1)
    assert (hits[0].text, hits[0].text_before) == (" is", "")


def test_captures_are_selected_as_in_lists(client):
    for name, labels in (("x-1", {"y": 1}), ("x-2", {"y": 2}), ("z-3", {"y": 2})):
        put(client, name, np.ones((1, WIDTH)), labels=labels)
    put(client, "x-4", np.ones((1, WIDTH)), outcome=ABORTED)
    for fields, names in (
        ({}, ["x-1", "x-2", "x-4", "z-3"]),
        ({"prefix": "x-"}, ["x-1", "x-2", "x-4"]),
        ({"where": "y = 2"}, ["x-2", "z-3"]),
        ({"where": "y > 1", "prefix": "x"}, ["x-2"]),
        ({"states": [ABORTED, INCOMPLETE]}, ["x-4"]),
        ({"capture_ids": ["z-3", "none", "z-3", "x-1"]}, ["x-1", "z-3"]),
    ):
        hits, answer = search(client, np.ones(WIDTH), **fields)
        assert [hit.capture_id for hit in hits] == names
        assert list(answer.unknown_capture_ids) == (["none"] if "capture_ids" in fields else [])


def test_what_is_left_out_is_counted(client):
    put(client, "open", np.ones((2, WIDTH)), seal=False)
    put(client, "wide", np.ones((2, WIDTH + 1)))
    put(client, "projected", np.ones((2, 9)), encoding=capture_pb2.ENCODING_FP32)
    client.open(describe("elsewhere", layers=[0], width=WIDTH, prompt=1))
    client.append([chunk_of(np.ones((1, 1, WIDTH)), [0], [0])], "elsewhere")
    client.seal("elsewhere", [0])
    rows = np.ones((4, WIDTH))
    rows[0], rows[1, 2], rows[2] = 0, np.nan, np.inf
    put(client, "odd", rows)
    hits, answer = search(client, np.ones(WIDTH), measure=COSINE)
    assert places(hits) == [("odd", 0, 3)]
    assert left_out(answer) == {"OPEN": 1, "OTHER_WIDTH": 2, "NO_LAYER": 1}
    assert (answer.progress.rows_scanned, answer.progress.rows_without_score) == (4, 3)
    hits, answer = search(client, np.ones(WIDTH), layer=99)
    assert not hits
    assert left_out(answer) == {"OPEN": 1, "NO_LAYER": 4}


def test_projected_rows_are_not_rows(client):
    description = describe("a", layers=[1], prompt=1, width=WIDTH)
    description.spec.encoding = capture_pb2.ENCODING_RP
    description.spec.encoding_options.dimensions = WIDTH
    client.open(description)
    payload = np.ones(WIDTH, "<f4").tobytes()
    head = capture_pb2.ChunkHeader(
        site=POST, layers=[1], positions=[0], width=WIDTH, dtype=F32, encoding=capture_pb2.ENCODING_RP, dimensions=WIDTH
    )
    client.append([chunk_prefix(head, checksum(payload), len(payload)) + payload], "a")
    assert client.seal("a", [0]).state == COMPLETE
    hits, answer = search(client, np.ones(WIDTH))
    assert (hits, left_out(answer)) == ([], {"ENCODING": 1})


def test_large_values_are_scored_in_float64(client):
    rows = np.zeros((3, WIDTH))
    rows[0, 0], rows[1, :2], rows[2, 0] = 3e38, (3e38, -3e38), -3e38
    put(client, "a", rows)
    vector = np.full(WIDTH, 3e38)
    hits, _ = search(client, vector)
    assert [hit.position for hit in hits] == [0, 1, 2]
    np.testing.assert_allclose([hit.score for hit in hits], [9e76, 0, -9e76], rtol=1e-6)
    hits, _ = search(client, vector, measure=COSINE)
    np.testing.assert_allclose([hit.score for hit in hits], [6**-0.5, 0, -(6**-0.5)], rtol=1e-6)


def test_a_row_without_a_score_in_float32_hides_no_better_rows(client):
    """The second row is too short for float32. The last row, in the third block, is compared with the first two."""
    rows = np.zeros((441, 600))  # 218 rows fill a block
    rows[:, :2] = -1, 1
    rows[0, :2], rows[1, :2], rows[-1, :2] = (1, 0), (1e-17, 1e-16), (1, 1)
    put(client, "a", rows, at_once=len(rows))
    hits, _ = search(client, np.eye(1, 600)[0], measure=COSINE, max_hits=2)
    assert [hit.position for hit in hits] == [0, 440]


def test_hits_of_a_damaged_chunk_are_left_out(tmp_path):
    with serving(tmp_path / "store", shards=1) as (store, client):
        put(client, "a", np.ones((3, WIDTH)))
        put(client, "b", np.ones((3, WIDTH)))
        with store._db.read() as txn:
            key, value = next((key, bytes(value)) for key, value in stored_frames(txn))
        store._db.write(lambda txn: txn.delete(Table.FRAMES, key))
        store._db.write(lambda txn: txn.put(Table.FRAMES, key, value[:-1] + b"\x41"))
        hits, answer = search(client, np.ones(WIDTH))
        assert places(hits) == [("b", 0, at) for at in range(3)]
        assert left_out(answer) == {"DAMAGED": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"vector": b""},
        {"vector": b"123"},
        {"vector": np.zeros(4, "<f4").tobytes()},
        {"vector": np.array([1, np.nan], "<f4").tobytes()},
        {"vector": np.array([1, np.inf], "<f4").tobytes()},
        {"vector": bytes(2 << 20)},
        {"max_hits": 0},
        {"max_hits": 10_001},
        {"context_tokens": 65},
        {"site": 99},
        {"measure": 7},
        {"states": [7]},
        {"order": 7},
        {"where": "y ~ 1"},
        {"capture_ids": ["a"], "prefix": "a"},
        {"capture_ids": ["a"] * 4097},
        {"positions": selection_pb2.PositionSelection(phases=[9])},
    ],
)
def test_bad_requests(client, fields):
    request = {"vector": np.ones(4, "<f4").tobytes(), "max_hits": 1, **fields}
    with failing_with(INVALID) as caught:
        list(client.stub.Search(store_pb2.SearchRequest(**request), timeout=30))
    assert caught[0].metadata["field"] == next(iter(fields))


def test_many_hits_take_several_messages(client):
    texts = ["x" * 200] * 4000
    put(client, "a", np.arange(4000)[:, None] * np.ones((1, 2)) + 1, texts=texts, at_once=1000)
    hits, _ = search(client, np.ones(2), max_hits=4000, context_tokens=64)
    assert [hit.position for hit in hits] == list(range(4000))[::-1]
    assert len(hits[2000].text_before) == 1024


def slow_steps(monkeypatch, searching, go_on=None):
    """Make each step of a scan slow, and set an event at the first one. `go_on`: no step ends before it is set."""
    from store_svc.searching import scanning

    step = scanning._CaptureScan.step

    def slow(self, *arguments):
        searching.set()
        assert go_on is None or go_on.wait(60)
        threading.Event().wait(0.02)
        return step(self, *arguments)

    monkeypatch.setattr(scanning._CaptureScan, "step", slow)


def test_a_cancelled_search_stops(tmp_path, monkeypatch):
    searching = threading.Event()
    slow_steps(monkeypatch, searching)
    with serving(tmp_path / "store", shards=1) as (store, client):
        put(client, "a", np.ones((2000, 2)))
        request = store_pb2.SearchRequest(vector=np.ones(2, "<f4").tobytes(), layer=1, max_hits=1)
        call = client.stub.Search(request)
        assert searching.wait(10)
        assert not next(call).is_last
        call.cancel()
        store._servicer.calls.wait_until_idle(10)
        assert not store._catalog._readers
        assert store._servicer.calls.num_reading == 0


def test_a_capture_that_is_deleted_during_the_search_is_left_out(tmp_path, monkeypatch):
    searching = threading.Event()
    slow_steps(monkeypatch, searching)
    with serving(tmp_path / "store", shards=1) as (_, client):
        put(client, "a", np.ones((200, 2)))
        put(client, "b", np.ones((200, 2)))
        call = client.stub.Search(store_pb2.SearchRequest(vector=np.ones(2, "<f4").tobytes(), layer=1, max_hits=1000))
        assert searching.wait(10)
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="b"))
        answers = list(call)
        assert not [hit for answer in answers for hit in answer.hits]
        assert left_out(answers[-1]) == {"GONE": 2}


def test_more_searches_than_the_limit_are_refused_and_all_take_turns(tmp_path, monkeypatch):
    searching, go_on = threading.Event(), threading.Event()
    slow_steps(monkeypatch, searching, go_on)
    with serving(tmp_path / "store", shards=1) as (_, client):
        put(client, "a", np.ones((30, 2)))
        request = store_pb2.SearchRequest(vector=np.ones(2, "<f4").tobytes(), layer=1, max_hits=1)
        calls = [client.stub.Search(request, timeout=30) for _ in range(2)]
        firsts = [next(call) for call in calls]
        assert not any(answer.is_last for answer in firsts)
        with failing_with(errors_pb2.ERROR_REASON_LIMIT_REACHED):
            list(client.stub.Search(request, timeout=30))
        go_on.set()
        assert all(list(call)[-1].hits for call in calls)


def test_a_stopping_store_ends_searches(tmp_path, monkeypatch):
    searching = threading.Event()
    slow_steps(monkeypatch, searching)
    with serving(tmp_path / "store", shards=1) as (store, client):
        put(client, "a", np.ones((3000, 2)))
        call = client.stub.Search(store_pb2.SearchRequest(vector=np.ones(2, "<f4").tobytes(), layer=1, max_hits=1))
        assert searching.wait(10)
        store.stop()
        with pytest.raises(grpc.RpcError):
            list(call)


def test_a_tenant_runs_one_search_and_leaves_room_for_others():
    calls = Calls(max_streams=4, max_writers=4)
    with calls.searching("a"):
        with pytest.raises(Failure, match="of this tenant") as own, calls.searching("a"):
            pass
        with calls.searching("b"), pytest.raises(Failure, match="its limit") as common, calls.searching("c"):
            pass
        assert own.value.metadata == common.value.metadata == {"limit": "searches"}
        with calls.searching("*"):
            pass
    with calls.searching("a"), calls.searching("b"):
        pass
    with calls.searching("*"), calls.searching("*"):
        pass


@pytest.mark.parametrize("is_read", [True, False])
def test_a_search_that_has_failed_is_freed_at_once(is_read: bool) -> None:
    def fail() -> Iterator[None]:
        yield
        raise ValueError("broken")

    turns = Turns(1)
    with without_collections():
        with suppress(ValueError), turns.working(fail) as lanes:
            freed = weakref.ref(lanes)
            if is_read:
                lanes.wait(60.0)
        turns.close()
        del lanes
        assert freed() is None
