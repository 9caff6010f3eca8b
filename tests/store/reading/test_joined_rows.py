"""Rows of one layer: those of many stored chunks are joined."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import residuum
from residuum.client import Client as PublicClient
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2
from residuum.wire.limits import MAX_CHUNK_POSITIONS
from residuum.wire.rows.encodings import RowFormat
from residuum.wire.rows.frame_keys import FrameKey
from residuum.wire.rows.frames import ChunkView, checksum, chunk_prefix, parse_chunk, parse_read
from residuum.wire.rows.shared_memory import MIN_PLACED_BYTES, MIN_READ_BYTES, encode_released
from store_svc.database.db import Table, Txn
from store_svc.database.frames import StoredFrame
from store_svc.item_errors import item_error
from store_svc.reading import responses as responses_module
from store_svc.reading.placing import Placing
from store_svc.reading.query import Query
from store_svc.reading.responses import Responses
from tests.encoding_cases import FORMATS
from tests.store.reading.test_encodings import decoded, describe_format, frame
from tests.store.reading.test_shared_memory import Peer
from tests.store.support import (
    COMPLETE,
    ONE_AND_SEVERAL,
    POST,
    PRE,
    Client,
    Rows,
    describe,
    failing_with,
    grid,
    make_chunk,
    row,
    serving,
    stored_frames,
)

MAX_WAIT_SECONDS = responses_module._MAX_WAIT_SECONDS


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows wait for others also on a busy machine: the tests count messages."""
    monkeypatch.setattr(responses_module, "_MAX_WAIT_SECONDS", 60.0)


BLOCK, BLOCKS = 32, 20
PROMPT = BLOCK * BLOCKS
LAYERS = [0, 1, 2]
WIDTH = 1024
ROW_BYTES = 4 * WIDTH
MESSAGE_ROWS = (1 << 20) // ROW_BYTES


def with_layer_checksums(layers: Sequence[int], positions: Iterable[int], **fields: Any) -> bytes:
    """Return a chunk as shippers make it."""
    positions = list(positions)
    cells = [(fields.get("sequence", 0), fields.get("site", POST), layer, at) for layer in layers for at in positions]
    payload = b"".join(row(cell, WIDTH).tobytes() for cell in cells)
    parts = [payload[at : at + len(positions) * ROW_BYTES] for at in range(0, len(payload), len(positions) * ROW_BYTES)]
    named = {"site": POST, "dtype": 1, "width": WIDTH, "encoding": capture_pb2.ENCODING_RAW, **fields}
    header = capture_pb2.ChunkHeader(layers=layers, positions=positions, **named)
    return chunk_prefix(header, checksum(payload), len(payload), list(map(checksum, parts))) + payload


def without_layer_checksums(layers: Sequence[int], positions: Iterable[int], **fields: Any) -> bytes:
    return make_chunk(layers, list(positions), width=WIDTH, **fields)


def blocks(make: Callable[..., bytes], layers: Sequence[int] = LAYERS, **fields: Any) -> list[bytes]:
    """Return all rows of some layers, in chunks of one block."""
    return [make(layers, range(first, first + BLOCK), **fields) for first in range(0, PROMPT, BLOCK)]


def chunks_of(client: Client, **query: object) -> list[capture_pb2.Chunk]:
    """Read rows, check their values, and return the chunks that they came in."""
    request = store_pb2.ReadChunksRequest(capture_id="a", **query)
    answers = list(client.stub.ReadChunks(request, timeout=30))
    rows = Rows()
    for answer in answers[1:-1]:
        rows.take(answer.chunk)
    return [answer.chunk for answer in answers[1:-1]]


def positions_of(chunks: Iterable[capture_pb2.Chunk]) -> list[list[int]]:
    return [list(chunk.header.positions) for chunk in chunks]


@ONE_AND_SEVERAL
@pytest.mark.parametrize("make", [with_layer_checksums, without_layer_checksums])
@pytest.mark.parametrize("is_open", [False, True])
def test_one_layer_comes_in_few_messages(client: Client, make: Callable[..., bytes], is_open: bool) -> None:
    client.open(describe(prompt=PROMPT, width=WIDTH))
    client.append(blocks(make))
    if not is_open:
        assert client.seal(generated=[1]).state == COMPLETE
    expected = [list(range(first, min(first + MESSAGE_ROWS, PROMPT))) for first in range(0, PROMPT, MESSAGE_ROWS)]
    chunks = chunks_of(client, layers=[1])
    assert positions_of(chunks) == expected
    assert {tuple(chunk.header.layers) for chunk in chunks} == {(1,)}


def test_a_capture_of_one_layer_is_joined_too(client: Client) -> None:
    client.open(describe(layers=[0], prompt=PROMPT, width=WIDTH))
    client.append(blocks(with_layer_checksums, [0]))
    client.seal(generated=[1])
    assert [len(positions) for positions in positions_of(chunks_of(client))] == [256, 256, 128]


def test_chosen_positions_of_each_block_are_joined(client: Client) -> None:
    client.open(describe(prompt=PROMPT, width=WIDTH))
    client.append(blocks(with_layer_checksums))
    client.seal(generated=[1])
    (chunk,) = chunks_of(client, layers=[2], positions=selection_pb2.PositionSelection(every=5))
    assert list(chunk.header.positions) == list(range(0, PROMPT, 5))
    ranges = [selection_pb2.PositionRange(first=0, last=40), selection_pb2.PositionRange(first=300, last=301)]
    (chunk,) = chunks_of(client, layers=[0], positions=selection_pb2.PositionSelection(ranges=ranges))
    assert list(chunk.header.positions) == [*range(41), 300, 301]


def test_sites_and_sequences_are_not_joined(client: Client) -> None:
    client.open(describe(prompt=PROMPT, width=WIDTH, sites=[POST, PRE], sequences=2))
    for sequence in (0, 1):
        for site in (POST, PRE):
            client.append(blocks(with_layer_checksums, sequence=sequence, site=site))
    client.seal(generated=[1, 1])
    chunks = chunks_of(client, layers=[1])
    assert len(chunks) == 2 * 2 * 3
    assert {(chunk.header.sequence, chunk.header.site) for chunk in chunks} == {
        (0, POST),
        (0, PRE),
        (1, POST),
        (1, PRE),
    }


def test_several_layers_come_as_they_are_stored(client: Client) -> None:
    client.open(describe(prompt=PROMPT, width=WIDTH))
    client.append(blocks(with_layer_checksums))
    client.seal(generated=[1])
    assert len(chunks_of(client, layers=[0, 2])) == BLOCKS


def test_layers_in_chunks_of_their_own_are_not_joined_with_each_other(client: Client) -> None:
    client.open(describe(layers=[0, 1], prompt=PROMPT, width=WIDTH))
    for layer in (0, 1):
        client.append(blocks(with_layer_checksums, [layer]))
    client.seal(generated=[1])
    chunks = chunks_of(client)
    assert [list(chunk.header.layers) for chunk in chunks] == [[0]] * 3 + [[1]] * 3


def test_chunks_that_lack_the_layer_between_their_first_and_last_one(client: Client) -> None:
    client.open(describe(prompt=PROMPT, width=WIDTH))
    for layers in ([0, 2], [1]):
        client.append(blocks(with_layer_checksums, layers))
    client.seal(generated=[1])
    assert len(chunks_of(client, layers=[1])) == 3


def test_chunks_out_of_order_are_joined_as_far_as_positions_ascend(client: Client) -> None:
    """An open capture is read in the order in which its rows came."""
    client.open(describe(prompt=PROMPT, width=WIDTH))
    firsts = (64, 96, 0, 32, 128)
    client.append([with_layer_checksums(LAYERS, range(first, first + BLOCK)) for first in firsts])
    found = positions_of(chunks_of(client, layers=[1]))
    assert found == [list(range(64, 128)), [*range(64), *range(128, 160)]]


@pytest.mark.parametrize("other", [{"layers": [1]}, {"sequence": 1}, {"site": PRE}])
def test_rows_that_follow_in_time_but_not_in_place_are_not_joined(client: Client, other: dict[str, Any]) -> None:
    client.open(describe(layers=[0, 1], prompt=PROMPT, width=WIDTH, sites=[POST, PRE], sequences=2))
    places = ({"layers": [0]}, {"layers": [0], **other})
    client.append([with_layer_checksums(positions=[at], **place) for at, place in enumerate(places)])
    assert positions_of(chunks_of(client)) == [[0], [1]]


@pytest.mark.parametrize("row_kib", [200, 1200])
def test_large_pieces_are_sent_alone(client: Client, row_kib: int) -> None:
    width = (row_kib << 10) // 4
    large = [1, 2, 3] if row_kib == 200 else [1]
    client.open(describe(layers=[0], prompt=6, width=width))
    client.append([make_chunk([0], positions, width=width) for positions in ([0], large, [4], [5])])
    expected = [[0], large, [4, 5]] if row_kib == 200 else [[0], large, [4], [5]]
    assert positions_of(chunks_of(client)) == expected


def test_a_chunk_has_no_more_positions_than_the_contract_allows(client: Client) -> None:
    prompt = MAX_CHUNK_POSITIONS + 512
    client.open(describe(layers=[0], prompt=prompt))
    client.append([make_chunk([0], range(first, first + 512)) for first in range(0, prompt, 512)])
    client.seal(generated=[1])
    assert [len(positions) for positions in positions_of(chunks_of(client))] == [MAX_CHUNK_POSITIONS, 512]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_encoding(client: Client, name: str) -> None:
    """Those with a prefix for each layer of a chunk are not joined, because each chunk has another one."""
    form: RowFormat = FORMATS[name]
    client.open(describe_format(form))
    chunks = [frame(form, [0, 1, 2], list(range(first, first + 3)), seed=first) for first in range(0, 9, 3)]
    client.append(chunks)
    assert client.seal(generated=[4]).state == COMPLETE
    answers = list(client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", layers=[1]), timeout=30))[1:-1]
    assert len(answers) == (3 if form.prefix_bytes else 1)
    found: dict[tuple[int, int], np.ndarray] = {}
    for answer in answers:
        view = parse_chunk(answer.chunk.SerializeToString())
        assert view.verify()
        found |= decoded(view)
    sent = [decoded(parse_chunk(chunk)) for chunk in chunks]
    expected = {key: values for part in sent for key, values in part.items() if key[0] == 1}
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)


def damage(txn: Txn, number: int) -> None:
    """Change a byte of the last layer of a stored chunk."""
    key, value = list(stored_frames(txn))[number]
    at = len(value) - BLOCK * ROW_BYTES
    txn.put(Table.FRAMES, key, bytes(value[:at]) + bytes([value[at] ^ 1]) + bytes(value[at + 1 :]))


@pytest.mark.parametrize("make", [with_layer_checksums, without_layer_checksums])
@pytest.mark.parametrize("number", [0, 4, BLOCKS - 1])
def test_a_damaged_chunk_is_never_sent_in_a_message(tmp_path: Path, make: Callable[..., bytes], number: int) -> None:
    with serving(tmp_path / "store") as (store, client):
        client.open(describe(prompt=PROMPT, width=WIDTH))
        client.append(blocks(make))
        client.seal(generated=[1])
        store._db.write(lambda txn: damage(txn, number))
        rows = Rows()
        answers = client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", layers=[2]), timeout=30)
        with failing_with(Reason.ERROR_REASON_CHECKSUM_MISMATCH):
            for answer in answers:
                if answer.HasField("chunk"):
                    rows.take(answer.chunk)  # fails on a wrong value
        if make is with_layer_checksums:
            assert client.read(layers=[1])[0] == grid([1], range(PROMPT))


@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("number", [1, 4, BLOCKS - 1])
def test_rows_before_a_damaged_chunk_leave_no_room_in_use(tmp_path: Path, number: int) -> None:
    with serving(tmp_path / "store") as (store, client):
        for name in ("damaged", "good"):
            client.open(describe(name, prompt=PROMPT, width=WIDTH))
            client.append(blocks(without_layer_checksums), name)
            client.seal(name, generated=[1])
        store._db.write(lambda txn: damage(txn, number))
        peer = Peer(store, client)
        request = store_pb2.ReadCapturesRequest(capture_ids=["good", "damaged"], layers=[2])
        request.shared_memory_key = peer.given.key
        for _ in range(10):  # a memory of which something is in use would not be used again
            answers = list(client.stub.ReadCaptures(request, timeout=30))
            parts = [part for answer in answers for part in answer.captures]
            assert [part.index for part in parts if part.HasField("error")] == [1]
            rows, end = Rows(), 0
            for part in parts:
                for placed in part.placed_chunks:
                    end = placed.end
                    if part.index == 0:
                        rows.take(peer.chunk(placed))
            assert rows.cells == grid([2], range(PROMPT))
            assert peer.given.send(encode_released(end))
        peer.given.close()


@pytest.mark.usefixtures("shared_memory")
def test_few_rows_of_many_sequences_are_read_ahead(tmp_path: Path) -> None:
    """A thread reads them ahead. It takes room and gives it back, while the bytes of the message before are counted."""
    sequences, prompt = 64, 8
    with serving(tmp_path / "store") as (store, client):
        client.open(describe(prompt=prompt, width=WIDTH, sequences=sequences))
        halves = range(prompt // 2), range(prompt // 2, prompt)
        client.append(
            [with_layer_checksums(LAYERS, half, sequence=number) for number in range(sequences) for half in halves]
        )
        client.seal(generated=[1] * sequences)
        with PublicClient(store=client.target) as reader:
            for _ in range(20):
                acts = reader.activations("a", layers=[1])
                assert len(acts.sequences) == sequences
        peer = Peer(store, client)
        expected = set().union(*(grid([1], range(prompt), sequence=number) for number in range(sequences)))
        assert peer.read(layers=[1]) == expected
        assert peer.placed == 0


@pytest.mark.usefixtures("shared_memory")
def test_joined_rows_are_written_straight_into_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placing, "place", lambda *_: pytest.fail("the rows were in a buffer first"))
    with serving(tmp_path / "store") as (store, client):
        client.open(describe(prompt=PROMPT, width=WIDTH))
        client.append(blocks(with_layer_checksums))
        client.seal(generated=[1])
        peer = Peer(store, client)
        assert peer.read(layers=[1]) == grid([1], range(PROMPT))
        assert peer.placed == -(-PROMPT // MESSAGE_ROWS)


def test_many_captures_and_the_client(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (_, client):
        names = ["a", "b", "open"]
        for name in names:
            client.open(describe(name, prompt=PROMPT, width=WIDTH))
            client.append(blocks(with_layer_checksums), name)
        client.seal("a", generated=[1])
        client.seal("b", generated=[1])
        request = store_pb2.ReadCapturesRequest(capture_ids=names, layers=[1])
        answers = list(client.stub.ReadCaptures(request, timeout=30))
        chunks = [chunk for answer in answers for part in answer.captures for chunk in part.chunks]
        assert len(chunks) == 3 * 3
        expected = np.stack([row((0, POST, 1, position), WIDTH) for position in range(PROMPT)])
        with PublicClient(store=client.target, shared_memory=False) as reader:
            for name in "ab":
                np.testing.assert_array_equal(reader.activations(name, layers=[1]).raw(1), expected)


def test_more_chunks_than_the_database_has_places_for_readers(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_streams=4, max_writers=4) as (store, client):
        places = store._db._max_readers
        client.open(describe(layers=[0], prompt=3 * places))
        client.append([make_chunk([0], [position]) for position in range(3 * places)])
        client.seal(generated=[1])
        assert client.read()[0] == grid([0], range(3 * places))


class FakeFrame:
    """A frame of one row of layer 0."""

    def __init__(self, position: int, *, is_fetched: bool = False) -> None:
        self.key = FrameKey(1, 0, POST, 0, 0, position, position).pack()
        self.is_fetched = is_fetched
        self.chunk = make_chunk([0], [position])

    def __enter__(self) -> StoredFrame:
        return StoredFrame.of(None, memoryview(self.chunk))

    def __exit__(self, *_: object) -> None:
        pass


def responses(frames: Iterable[FakeFrame], *, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[bytes]:
    query = Query(store_pb2.ReadChunksRequest(), describe(layers=[0], prompt=100), [])
    return Responses(query, Placing(is_cancelled, None), is_cancelled).of(frames)  # type: ignore[arg-type]


def noted(frames: Iterable[FakeFrame], asked: list[FakeFrame]) -> Iterator[FakeFrame]:
    for frame_ in frames:
        asked.append(frame_)
        yield frame_


def rows_in(response: bytes) -> list[int]:
    view = parse_read(response)
    assert isinstance(view, ChunkView)
    return list(view.header.positions)


def test_rows_from_the_archive_do_not_wait_for_the_next_ones() -> None:
    asked: list[FakeFrame] = []
    frames = [FakeFrame(0), FakeFrame(1), *(FakeFrame(position, is_fetched=True) for position in range(2, 5))]
    found = responses(noted(frames, asked))
    assert rows_in(next(found)) == [0, 1]
    assert len(asked) == 3
    assert rows_in(next(found)) == [2]
    assert len(asked) == 3
    assert list(map(rows_in, found)) == [[3], [4]]


def test_rows_that_are_dropped_during_the_read_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their frames are fetched when they are entered."""

    class Dropped(FakeFrame):
        def __enter__(self) -> StoredFrame:
            self.is_fetched = True
            return super().__enter__()

    found = responses([FakeFrame(0), Dropped(1), Dropped(2), FakeFrame(3)])
    assert list(map(rows_in, found)) == [[0, 1], [2], [3]]


def test_rows_wait_for_others_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(responses_module, "_MAX_WAIT_SECONDS", MAX_WAIT_SECONDS)
    monkeypatch.setattr(responses_module, "time", SimpleNamespace(monotonic=lambda: next(now) * 0.009))
    found = list(map(rows_in, responses(FakeFrame(position) for position in range(9))))
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_read_looks_at_one_frame_more_than_it_needs() -> None:
    asked: list[FakeFrame] = []
    frames = [FakeFrame(position) for position in (5, 4, 3, 2)]
    found = responses(noted(frames, asked))
    assert rows_in(next(found)) == [5]
    assert len(asked) == 2


def test_a_caller_who_cancels_gets_nothing_more() -> None:
    cancelled: list[bool] = []
    found = responses((FakeFrame(position) for position in (1, 0)), is_cancelled=lambda: bool(cancelled))
    next(found)
    cancelled.append(True)
    with pytest.raises(Failure, match="cancelled"):
        next(found)


def test_a_failure_that_ends_a_call_is_in_no_cycle() -> None:
    """Its traceback holds the shared memory of the read, which must be free at once."""
    failure = Failure(Reason.ERROR_REASON_ABORTED, "The caller cancelled the call.")
    seen = weakref.ref(failure)
    gc.disable()
    try:
        with contextlib.suppress(Failure):
            item_error(failure)
        del failure
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("shared_memory")
class TestWithSharedMemory:
    @pytest.mark.parametrize("make", [with_layer_checksums, without_layer_checksums])
    def test_joined_rows_are_placed_if_they_are_many(self, tmp_path: Path, make: Callable[..., bytes]) -> None:
        few = MIN_PLACED_BYTES // ROW_BYTES - 1
        with serving(tmp_path / "store", max_bytes="256MiB") as (store, client):
            client.open(describe(layers=[0, 1], prompt=PROMPT, width=WIDTH, sequences=3))
            short = [make([0, 1], range(at, at + 8)) for at in range(0, PROMPT, 8)]
            client.append(short + blocks(make, [0, 1], sequence=1))
            client.append([make([0, 1], [at], sequence=2) for at in range(few)])
            client.seal(generated=[1, 1, 1])
            peer = Peer(store, client)
            expected = grid([1], range(PROMPT)) | grid([1], range(PROMPT), sequence=1)
            assert peer.read(layers=[1]) == expected | grid([1], range(few), sequence=2)
            assert (peer.placed, peer.in_message) == (3 + 3, 1)

    def test_joined_rows_wait_for_room(self, tmp_path: Path) -> None:
        prompt = 3 * MIN_READ_BYTES // ROW_BYTES
        with serving(tmp_path / "store", max_bytes="256MiB") as (store, client):
            client.open(describe(layers=[0], prompt=prompt, width=WIDTH))
            client.append([with_layer_checksums([0], range(at, at + BLOCK)) for at in range(0, prompt, BLOCK)])
            client.seal(generated=[1])
            peer = Peer(store, client)
            assert peer.read() == grid([0], range(prompt))
            assert (peer.placed, peer.in_message) == (prompt // MESSAGE_ROWS, 0)

    @pytest.mark.parametrize("make", [with_layer_checksums, without_layer_checksums])
    def test_a_damaged_chunk_is_noticed(self, tmp_path: Path, make: Callable[..., bytes]) -> None:
        with serving(tmp_path / "store") as (store, client):
            client.open(describe(prompt=PROMPT, width=WIDTH))
            client.append(blocks(make))
            client.seal(generated=[1])
            store._db.write(lambda txn: damage(txn, 4))
            damaged = pytest.raises(residuum.DamagedCapture)
            with PublicClient(store=client.target, shared_memory=True) as reader, damaged:
                reader.activations("a", layers=[2])

    @pytest.mark.parametrize("lengths", [(32, 9, 32), (32, 9, 9, 32), (9, 32, 32), (9, 9, 32), (32, 32, 9), (9, 9, 9)])
    @pytest.mark.parametrize("is_open", [False, True])
    def test_rows_of_any_lengths_in_turn(self, tmp_path: Path, lengths: tuple[int, ...], is_open: bool) -> None:
        ends = list(accumulate((*lengths, *lengths)))
        with serving(tmp_path / "store", max_bytes="256MiB") as (store, client):
            client.open(describe("a", layers=[0, 1], prompt=ends[-1], width=WIDTH))
            for first, end in pairwise([0, *ends]):
                client.append([with_layer_checksums([0, 1], range(first, end))])
            if not is_open:
                assert client.seal(generated=[1]).state == COMPLETE
            for layers in ([0], [0, 1]):
                assert Peer(store, client).read(layers=layers) == grid(layers, range(ends[-1]))
            expected = np.stack([row((0, POST, 1, position), WIDTH) for position in range(ends[-1])])
            with PublicClient(store=client.target, shared_memory=True) as reader:
                options = {"layers": [1], "wait": False, "allow_partial": True}
                np.testing.assert_array_equal(reader.activations("a", **options).raw(1), expected)
                np.testing.assert_array_equal(reader.activations(["a"], **options)[0].raw(1), expected)
