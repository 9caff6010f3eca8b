"""Writer streams: acknowledgements, repeats, and chunks that cannot be written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2, tensor_pb2
from residuum.wire.rows.frames import checksum, chunk_prefix
from tests.store.support import (
    COMPLETE,
    POST,
    PRE,
    WIDTH,
    Client,
    OpenStream,
    busy_writer,
    cells_of,
    describe,
    failing_with,
    grid,
    loss_message,
    make_chunk,
    message,
    rejections,
    row,
    serving,
)
from tests.waiting import wait_for

LAYERS = [0, 1, 2]
INVALID = Reason.ERROR_REASON_INVALID_FIELD


def test_everything_is_committed_and_synced_at_the_end(client: Client) -> None:
    client.open()
    answers = client.append([make_chunk(LAYERS, [position]) for position in range(50)])
    assert (answers[-1].committed_through, answers[-1].synced_through) == (50, 50)
    assert client.get().num_rows == 150


def test_an_empty_stream_is_fine(client: Client) -> None:
    assert all(answer.committed_through == 0 for answer in client.send([]))


@pytest.mark.parametrize("ack", ["committed", "synced"])
def test_a_writer_can_wait_for_each_acknowledgement(tmp_path: Path, ack: str) -> None:
    with serving(tmp_path / "store", ack=ack, sync_interval_seconds=0.01) as (_, client):
        client.open()
        stream = OpenStream(client)
        for position in range(5):
            number = stream.send(make_chunk(LAYERS, [position]))
            acked = stream.until_acked(number)
            if ack == "synced":
                assert acked.synced_through == number
        stream.half_close()
        assert all(answer.committed_through == 5 for answer in stream.answers)


def test_a_quiet_stream_is_synced_too(tmp_path: Path) -> None:
    with serving(tmp_path / "store", sync_interval_seconds=0.05) as (_, client):
        client.open()
        stream = OpenStream(client)
        number = stream.send(make_chunk(LAYERS, [0]))
        assert next(answer for answer in stream.answers if answer.synced_through == number)
        stream.half_close()
        list(stream.answers)


def test_one_stream_carries_many_captures(client: Client) -> None:
    names = ["a", "b", "c"]
    for name in names:
        client.open(describe(name))
    client.send([message(at + 1, names[at % 3], make_chunk(LAYERS, [at // 3])) for at in range(15)])
    for name in names:
        assert cells_of(client.get(name).present) == grid(LAYERS, range(5))


def test_the_first_write_of_a_row_wins(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, [0, 1, 2])])
    zeros = bytes(2 * 2 * WIDTH * 4)
    header = capture_pb2.ChunkHeader(site=POST, layers=[1, 2], positions=[2, 3], dtype=1, width=WIDTH)
    other = chunk_prefix(header, checksum(zeros), len(zeros)) + zeros
    assert rejections(client.append([other])) == {}
    answers = list(client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a")))
    values = {}
    for answer in answers[1:-1]:
        at = iter(range(10_000))
        for layer in answer.chunk.header.layers:
            for position in answer.chunk.header.positions:
                start = next(at) * WIDTH * 4
                assert values.setdefault((layer, position), answer.chunk.payload[start : start + WIDTH * 4])
    assert values[1, 2] == row((0, POST, 1, 2)).tobytes()
    assert values[1, 3] == bytes(WIDTH * 4)
    assert len(values) == 11


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from(LAYERS), min_size=1).map(sorted),
            st.sets(st.integers(0, 8), min_size=1).map(sorted),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_chunks_that_overlap_leave_each_row_once(client: Client, chunks: list[tuple[list[int], list[int]]]) -> None:
    client.open(describe("overlap"))
    client.append([make_chunk(layers, positions) for layers, positions in chunks], "overlap")
    cells = set().union(*(grid(layers, positions) for layers, positions in chunks))
    assert cells_of(client.get("overlap").present) == cells
    assert client.read("overlap")[0] == cells  # read() fails on duplicate or wrong rows
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="overlap"))


def test_repeats_of_an_ended_capture_are_acknowledged(client: Client) -> None:
    client.open()
    chunks = [make_chunk(LAYERS, [0, 1, 2]), make_chunk(LAYERS, [3, 4, 5])]
    client.append(chunks)
    client.seal(generated=[2])
    manifest = client.get()
    assert manifest.state == COMPLETE
    assert rejections(client.append([*chunks, make_chunk([1], [1, 3])])) == {}
    assert client.get() == manifest


def test_only_the_chunk_with_a_wrong_checksum_is_rejected(client: Client) -> None:
    client.open()
    damaged = bytearray(make_chunk(LAYERS, [1]))
    damaged[-1] ^= 1
    answers = client.append([make_chunk(LAYERS, [0]), bytes(damaged), make_chunk(LAYERS, [2])])
    assert rejections(answers) == {2: Reason.ERROR_REASON_CHECKSUM_MISMATCH}
    assert answers[-1].committed_through == 3
    assert cells_of(client.get().present) == grid(LAYERS, [0, 2])


def chunk_with(**header: object) -> bytes:
    """Make a chunk of two rows of one layer, with some header fields wrong."""
    chunk = capture_pb2.Chunk.FromString(make_chunk([0], [0, 1]))
    for name in header:
        chunk.header.ClearField(name)
    chunk.header.MergeFrom(capture_pb2.ChunkHeader(**header))
    return chunk.SerializeToString()


def payload_first() -> bytes:
    """Make a chunk whose payload comes before its other fields."""
    chunk = capture_pb2.Chunk.FromString(make_chunk([0], [0]))
    payload = capture_pb2.Chunk(payload=chunk.payload).SerializeToString()
    chunk.ClearField("payload")
    return payload + chunk.SerializeToString()


BAD_CHUNKS = {
    "no such layer": make_chunk([0, 7], [0]),
    "no such site": make_chunk([0], [0], site=PRE),
    "no such sequence": make_chunk([0], [0], sequence=1),
    "another dtype": make_chunk([0], [0], dtype=tensor_pb2.DATA_TYPE_BFLOAT16, width=2 * WIDTH),
    "another width": chunk_with(positions=[0], width=2 * WIDTH),
    "unknown encoding": make_chunk([0], [0], encoding=9),
    "payload too short": chunk_with(positions=[0, 1, 2]),
    "layers that do not ascend": make_chunk([1, 0], [0]),
    "no header": capture_pb2.Chunk(payload=b"x").SerializeToString(),
    "payload first": payload_first(),
    "unknown field after the payload": make_chunk([0], [0]) + b"\xaa\x01\x00",
    "two payloads": capture_pb2.Chunk(payload=b"x").SerializeToString() + make_chunk([0], [0]),
    "not a chunk": b"\xff\xff\xff",
    "over 2 MiB": make_chunk([0], [0]) + b"\xaa\x01\x00" * 800_000,
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_only_the_invalid_chunk_is_rejected(client: Client, name: str) -> None:
    client.open()
    answers = client.append([BAD_CHUNKS[name], make_chunk(LAYERS, [0])])
    assert rejections(answers) == {1: INVALID}
    assert cells_of(client.get().present) == grid(LAYERS, [0])


def test_every_rejection_is_sent_before_a_later_acknowledgement(client: Client) -> None:
    client.open()
    bad = make_chunk([7], [0])
    told: set[int] = set()
    for answer in client.append([bad] * 2500):
        told |= {item.number for item in answer.rejections}
        assert len(answer.rejections) <= 1024
        assert told >= set(range(1, answer.committed_through + 1))
    assert len(told) == 2500


def test_the_error_for_a_long_name_is_short(client: Client) -> None:
    name = "x" * 1_000_000
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        client.get(name)
    with failing_with(INVALID):
        client.open(describe(name))
    answers = client.send([message(1, name, make_chunk(LAYERS, [0]))])
    assert rejections(answers) == {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
    assert answers[-1].ByteSize() < 1000


@pytest.mark.parametrize("reason", [Reason.ERROR_REASON_CHECKSUM_MISMATCH, Reason.ERROR_REASON_UNKNOWN_CAPTURE])
def test_as_many_rejections_of_long_names_as_an_answer_carries_fit_into_a_message(tmp_path: Path, reason: int) -> None:
    """An answer that is too long would fail the stream."""
    chunk = bytearray(make_chunk(LAYERS, [0]))
    chunk[-1] ^= reason == Reason.ERROR_REASON_CHECKSUM_MISMATCH
    with serving(tmp_path / "store") as (store, client):
        stream = OpenStream(client)
        with busy_writer(store):  # so that one answer has all of them
            for _ in range(1024):
                number = stream.send(bytes(chunk), "\U000e0001" * 1100)
            wait_for(lambda: store._writer.queue.waiting().messages == 1024)
        answer = stream.until_acked(number)
        assert rejections([answer]) == dict.fromkeys(range(1, 1025), reason)
        stream.half_close()


def test_rows_of_unknown_captures_are_rejected(client: Client) -> None:
    client.open()
    answers = client.send(
        [
            message(1, "b", make_chunk(LAYERS, [0])),
            loss_message(2, "b", store_pb2.RowLoss(sites=[POST], layers=[0], positions=[0], reason=1)),
            message(3, "a", make_chunk(LAYERS, [0])),
        ]
    )
    assert rejections(answers) == dict.fromkeys((1, 2), Reason.ERROR_REASON_UNKNOWN_CAPTURE)
    assert client.get().num_rows == 3


@pytest.mark.parametrize(
    "loss",
    [
        store_pb2.RowLoss(sites=[POST], layers=[0], positions=[0]),
        store_pb2.RowLoss(sites=[POST], layers=[9], positions=[0], reason=1),
        store_pb2.RowLoss(sites=[PRE], layers=[0], positions=[0], reason=1),
        store_pb2.RowLoss(sites=[POST], layers=[0], reason=1),
        store_pb2.RowLoss(sites=[POST], layers=[0], positions=[0], reason=1, sequence=3),
    ],
)
def test_an_invalid_loss_is_rejected(client: Client, loss: store_pb2.RowLoss) -> None:
    client.open()
    assert rejections(client.send([loss_message(1, "a", loss)])) == {1: INVALID}


@pytest.mark.parametrize(
    "messages",
    [
        [b"\xff\xff\xff\xff"],
        [b""],
        [store_pb2.AppendChunksRequest(number=1, capture_id="a").SerializeToString()],
        [message(2, "a", make_chunk(LAYERS, [0])), message(2, "a", make_chunk(LAYERS, [1]))],
        [message(0, "a", make_chunk(LAYERS, [0]))],
    ],
    ids=["malformed", "empty", "without content", "number repeats", "number is 0"],
)
def test_a_stream_that_breaks_the_rules_fails(client: Client, messages: list[bytes]) -> None:
    client.open()
    with failing_with(INVALID):
        client.send(messages)
    client.append([make_chunk(LAYERS, [0, 1])])
    assert client.get().num_rows == 6, "the service continues"


def test_a_message_over_the_limit_fails_its_stream_only(client: Client) -> None:
    client.open()
    unlimited = grpc.insecure_channel(client.target, options=[("grpc.max_send_message_length", -1)])
    with unlimited, pytest.raises(grpc.RpcError) as caught:
        list(unlimited.stream_stream("/residuum.v1.StoreService/AppendChunks")(iter([bytes(5 << 20)]), timeout=10))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    client.append([make_chunk(LAYERS, [0])])


def test_the_stock_stub_is_a_writer(client: Client) -> None:
    client.open()
    requests = [
        store_pb2.AppendChunksRequest(
            number=position + 1, capture_id="a", chunk=capture_pb2.Chunk.FromString(make_chunk(LAYERS, [position]))
        )
        for position in range(5)
    ]
    answers = list(client.stub.AppendChunks(iter(requests), timeout=30))
    assert answers[-1].synced_through == 5
    assert client.seal(generated=[2]).state == COMPLETE
    assert client.read()[0] == grid(LAYERS, range(5))


def test_a_disconnected_writer_frees_its_slot(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_writers=1) as (_, client):
        client.open()
        for position in range(5):  # more calls than slots, so each slot must be freed
            stream = OpenStream(client)
            stream.until_acked(stream.send(make_chunk(LAYERS, [position])))
            stream.cancel()
            wait_until_released(client)
        assert client.get().num_rows == 15


def wait_until_released(client: Client) -> None:
    """Open a stream, retrying until the store accepts it."""
    for _ in range(500):
        with suppress(grpc.RpcError):
            client.send([])
            return
    pytest.fail("the streams of disconnected clients still hold their slots")


def test_a_writer_beyond_the_limit_of_streams_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_writers=2) as (_, client):
        client.open()
        streams = [OpenStream(client), OpenStream(client)]
        for position, stream in enumerate(streams):
            stream.until_acked(stream.send(make_chunk(LAYERS, [position])))
        with failing_with(Reason.ERROR_REASON_LIMIT_REACHED) as caught:
            client.append([make_chunk(LAYERS, [3])])
        assert caught[0].metadata == {"limit": "max_writers"}
        assert client.get().num_rows == 6, "short calls are answered"
        for stream in streams:
            stream.cancel()


def test_waiting_readers_do_not_block_writers(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_streams=2, max_writers=1) as (_, client):
        client.open()
        client.seal(generated=[1])
        request = store_pb2.ReadChunksRequest(capture_id="a", follow=True)
        waiting = [client.stub.ReadChunks(request, timeout=30) for _ in range(2)]
        for answers in waiting:
            next(answers)
        with failing_with(Reason.ERROR_REASON_LIMIT_REACHED) as caught:
            client.get(wait=1)
        assert caught[0].metadata == {"limit": "max_streams"}
        client.append([make_chunk(LAYERS, range(4))])
        assert [list(answers)[-1].manifest.state for answers in waiting] == [COMPLETE] * 2
