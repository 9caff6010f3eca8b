"""ReadCaptures: the rows of many captures in one stream."""

from __future__ import annotations

import queue
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residuum.v1 import capture_pb2, errors_pb2, selection_pb2, store_pb2
from residuum.wire.rows.capture_batches import BATCH_BYTES, CaptureBatch, end_field
from residuum.wire.rows.frame_keys import unpack_frame
from residuum.wire.rows.frames import payload_prefix
from store_svc.database.db import Table
from store_svc.reading.open_read import OpenRead
from tests.store.support import (
    COMPLETE,
    ONE_AND_SEVERAL,
    OPEN,
    Rows,
    describe,
    failing_with,
    grid,
    make_chunk,
    serving,
    stored_frames,
)

UNKNOWN = errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE


def put(client, name, *, layers=(0, 1), prompt=4, seal=True, width=4):
    client.open(describe(name, layers=layers, prompt=prompt, width=width))
    client.append([make_chunk(layers, range(prompt), width=width), make_chunk(layers, [prompt], width=width)], name)
    if seal:
        assert client.seal(name, generated=[2]).state == COMPLETE


class Found:
    """The received parts of one capture."""

    def __init__(self):
        self.rows, self.states, self.error, self.is_last = Rows(), [], None, False

    def take(self, part):
        assert not self.is_last, "a part arrived after the last one"
        if part.HasField("manifest"):
            self.states.append(part.manifest.state)
        for chunk in part.chunks:
            assert self.states, "rows arrived before the manifest"
            self.rows.take(chunk)
        if part.HasField("error"):
            self.error = part.error
        self.is_last = part.is_last


def read(client, names, **fields):
    """Read captures. Return the messages, and the parts of each capture by its index, in order of arrival."""
    request = store_pb2.ReadCapturesRequest(capture_ids=names, **fields)
    messages = list(client.stub.ReadCaptures(request, timeout=30))
    found = {}
    for message in messages:
        for part in message.captures:
            found.setdefault(part.index, Found()).take(part)
    assert all(item.is_last for item in found.values())
    return messages, found


def test_many_small_captures_come_in_one_message_in_order(client):
    names = [f"c{number}" for number in range(60)]
    for name in names:
        put(client, name)
    messages, found = read(client, names[::-1])
    assert len(messages) == 1
    assert list(found) == list(range(60))
    assert all(item.rows.cells == grid([0, 1], range(5)) and item.states == [COMPLETE] for item in found.values())
    assert [part.manifest.description.capture_id for part in messages[0].captures] == names[::-1]


def test_each_capture_is_cut_to_the_selection(client):
    put(client, "short", prompt=2)
    put(client, "long", prompt=6)
    positions = selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_GENERATED])
    _, found = read(client, ["short", "long"], layers=[1], positions=positions)
    assert [item.rows.cells for item in found.values()] == [grid([1], [2]), grid([1], [6])]


def test_a_large_capture_takes_several_messages(client):
    width = 65536
    put(client, "small", width=width, prompt=1)
    client.open(describe("large", layers=[0], prompt=12, width=width))
    client.append([make_chunk([0], [at], width=width) for at in range(13)], "large")
    client.seal("large", generated=[2])
    put(client, "end")
    messages, found = read(client, ["small", "large", "end"])
    assert len(messages) > 2
    assert all(message.ByteSize() < 2 * BATCH_BYTES for message in messages)
    cells = [grid([0, 1], range(2)), grid([0], range(13)), grid([0, 1], range(5))]
    assert [item.rows.cells for item in found.values()] == cells


def test_unknown_captures_come_first_and_the_others_follow(client):
    for name in ("a", "b"):
        put(client, name)
    _, found = read(client, ["a", "gone-1", "b", "gone-2"])
    assert list(found) == [1, 3, 0, 2]
    assert [found[index].error.reason for index in (1, 3)] == [UNKNOWN] * 2
    assert "gone-2" in found[3].error.message
    assert found[2].rows.cells == grid([0, 1], range(5))


def test_only_the_capture_without_the_layer_fails(client):
    put(client, "a", layers=[0, 1])
    put(client, "b", layers=[0])
    put(client, "c", layers=[1])
    _, found = read(client, ["a", "b", "c"], layers=[1])
    assert found[1].error.reason == errors_pb2.ERROR_REASON_UNKNOWN_LAYER
    assert [found[index].rows.cells for index in (0, 2)] == [grid([1], range(5))] * 2


def test_an_open_capture_is_sent_as_far_as_it_is_written(client):
    put(client, "open", seal=False)
    put(client, "ended")
    _, found = read(client, ["open", "ended"])
    assert [item.states for item in found.values()] == [[OPEN, OPEN], [COMPLETE]]
    assert found[0].rows.cells == grid([0, 1], range(5))


def test_in_any_order_open_captures_are_sent_as_their_rows_come(client):
    """In the order of the request, nothing of the second open capture would come before the first one ended."""
    put(client, "ended")
    for name in ("late", "early"):
        client.open(describe(name, layers=[0], prompt=4))
    request = store_pb2.ReadCapturesRequest(capture_ids=["late", "ended", "gone", "early"], follow=True, any_order=True)
    parts = (part for message in client.stub.ReadCaptures(request, timeout=30) for part in message.captures)
    found = {index: Found() for index in range(4)}

    def take_until(holds):
        while not holds():
            part = next(parts)
            found[part.index].take(part)

    take_until(lambda: found[0].states and found[3].states)
    assert found[2].error.reason == UNKNOWN
    assert found[1].is_last
    for name, index in (("early", 3), ("late", 0)):
        client.append([make_chunk([0], range(4))], name)
        take_until(lambda index=index: found[index].rows.cells)
    client.append([make_chunk([0], [4])], "early")
    client.seal("early", generated=[2])
    take_until(lambda: found[3].is_last)
    assert found[3].states == [OPEN, COMPLETE]
    assert not found[0].is_last
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="late"))
    assert next(parts).error.reason == UNKNOWN
    assert list(parts) == []
    assert found[3].rows.cells == grid([0], range(5))


def test_a_capture_that_ends_as_its_read_begins_has_two_manifests(client, monkeypatch):
    """In one part, protobuf would merge both: the prompt would be there twice, and rows would seem to be missing."""
    put(client, "a", seal=False)
    begin = OpenRead.begin

    def begin_and_end(self):
        first = begin(self)
        client.seal("a", generated=[2])
        return first

    monkeypatch.setattr(OpenRead, "begin", begin_and_end)
    messages, found = read(client, ["a"], follow=True, any_order=True)
    assert found[0].states == [OPEN, COMPLETE]
    assert found[0].rows.cells == grid([0, 1], range(5))
    parts = [part for message in messages for part in message.captures if part.HasField("manifest")]
    assert [len(part.manifest.description.prompt_token_ids) for part in parts] == [4, 4]


def test_follow_waits_for_an_open_capture_and_sends_what_is_before_it_at_once(client):
    put(client, "first")
    put(client, "open", seal=False)
    put(client, "last")
    arrived = queue.Queue()
    request = store_pb2.ReadCapturesRequest(capture_ids=["first", "open", "last"], follow=True)

    def run():
        for message in client.stub.ReadCaptures(request, timeout=30):
            for part in message.captures:
                arrived.put(part)
        arrived.put(None)

    thread = threading.Thread(target=run)
    thread.start()
    found = {}
    while not (1 in found and found[1].rows.cells == grid([0, 1], range(5))):
        part = arrived.get(timeout=20)
        found.setdefault(part.index, Found()).take(part)
    assert found[0].is_last
    assert 2 not in found
    client.seal("open", generated=[2])
    while (part := arrived.get(timeout=20)) is not None:
        found.setdefault(part.index, Found()).take(part)
    thread.join()
    assert found[1].states == [OPEN, COMPLETE]
    assert found[2].rows.cells == grid([0, 1], range(5))


@pytest.mark.parametrize("count", [0, 4097])
def test_the_number_of_captures_is_limited(client, count):
    with failing_with(errors_pb2.ERROR_REASON_INVALID_FIELD) as caught:
        read(client, [f"c{number}" for number in range(count)])
    assert f"1 to 4096 captures, not {count}" in caught[0].message


@ONE_AND_SEVERAL
def test_a_damaged_chunk_fails_only_its_capture(tmp_path):
    with serving(tmp_path / "store") as (store, client):
        for name in ("a", "b", "c"):
            put(client, name)

        def damage(txn):
            (key, value), *_ = [item for item in stored_frames(txn) if unpack_frame(item[0]).number == 2]
            txn.put(Table.FRAMES, key, bytes(value[:-1]) + bytes([value[-1] ^ 1]))

        store._db.write(damage)
        _, found = read(client, ["a", "b", "c"])
    assert found[1].error.reason == errors_pb2.ERROR_REASON_CHECKSUM_MISMATCH
    assert found[2].rows.cells == grid([0, 1], range(5))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * BATCH_BYTES), st.booleans()), max_size=12))
def test_a_batch_keeps_every_field_in_order(fields):
    batch, messages, added = CaptureBatch(), [], []
    for number, (index, size, by_batch) in enumerate(fields):
        payload = memoryview(bytes(size))
        if by_batch:
            prefix = payload_prefix(capture_pb2.Chunk(crc32c=number + 1).SerializeToString(), size)
            field = batch.framed(index, prefix, payload)
        else:
            chunk = capture_pb2.Chunk(crc32c=number + 1, payload=bytes(payload))
            field = store_pb2.CaptureRows(chunks=[chunk]).SerializeToString()
        messages.append(batch.add(index, field))
        added.append((index, number + 1, size))
    messages += [batch.add(9, end_field()), batch.take()]
    parsed = [store_pb2.ReadCapturesResponse.FromString(message) for message in messages if message]
    parts = [part for message in parsed for part in message.captures]
    assert [(part.index, chunk.crc32c, len(chunk.payload)) for part in parts for chunk in part.chunks] == added
    assert (parts[-1].index, parts[-1].is_last) == (9, True)
    assert not any(part.is_last for part in parts[:-1])
    assert all(message.ByteSize() <= max([BATCH_BYTES, *sizes(message)]) + 1024 for message in parsed)
    assert not batch.take()


def sizes(message):
    return [len(chunk.payload) for part in message.captures for chunk in part.chunks]


def test_a_large_chunk_is_framed_once():
    batch = CaptureBatch()
    assert not batch.add(0, store_pb2.CaptureRows(manifest=capture_pb2.CaptureManifest(num_rows=7)).SerializeToString())
    field = batch.framed(0, payload_prefix(b"", BATCH_BYTES), memoryview(bytes(BATCH_BYTES)))
    assert batch.add(0, field)  # what waited goes first
    assert batch.take() is field
