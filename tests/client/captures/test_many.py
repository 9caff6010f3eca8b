"""Reading many captures in one stream: as lists of activations, and as one array of rows."""

from __future__ import annotations

import socket
import threading
import time
import uuid

import grpc
import numpy as np
import pytest

import residuum
from residuum._async import captures as async_captures
from residuum._sync import captures as sync_captures
from residuum._sync import io
from residuum.protocol.captures.many import MESSAGE_STREAMS, most_streams, split_reads
from residuum.v1 import store_pb2
from tests.client.support.flaky_store import Unknown
from tests.client.support.peer import HIDDEN, POST, PRE, rows
from tests.waiting import wait_for

PROMPTS = ["a", "a bb ccc", "a bb", "a bb ccc dddd"]
SITES = "resid_post,resid_pre"
LAYER_1 = residuum.Capture(layers=[1])


@pytest.fixture
def replies(endpoint):
    """Replies of 5 tokens to PROMPTS, with captures of layers 1 and 4; their IDs share a prefix, in reverse order."""
    prefix = f"many-{uuid.uuid4().hex[:8]}-"
    with residuum.Client(endpoint) as client:
        made = [
            client.generate(
                prompt, max_tokens=5, capture=residuum.Capture(layers=[1, 4], sites=SITES),
                request_id=f"{prefix}{9 - number}",
            )
            for number, prompt in enumerate(PROMPTS)
        ]  # fmt: skip
        for reply in made:
            client.manifest(reply, wait=True)
    return made


@pytest.fixture
def reader(make, endpoint, flaky):
    return make(endpoint, store=flaky.endpoint, timeout=10)


def asked(flaky):
    """The captures that each call of ReadCaptures asked for."""
    return [list(store_pb2.ReadCapturesRequest.FromString(data).capture_ids) for data in flaky.requests]


def parts_of(messages):
    """Each part of the stream as a separate message."""
    parts = [part for data in messages for part in store_pb2.ReadCapturesResponse.FromString(data).captures]
    return [store_pb2.ReadCapturesResponse(captures=[part]).SerializeToString() for part in parts]


async def test_a_list_comes_in_one_read_and_equals_single_reads(client, reader, flaky, replies):
    found = await reader.activations(replies)
    assert flaky.reads == 1
    assert [acts.manifest.capture_id for acts in found] == [reply.request_id for reply in replies]
    for acts, reply in zip(found, replies, strict=True):
        one = await client.activations(reply)
        assert acts.manifest == one.manifest
        assert (acts.layers, acts.sites) == (one.layers, one.sites)
        for site in one.sites:
            for layer in one.layers:
                assert np.array_equal(acts.select(site=site).raw(layer), one.select(site=site).raw(layer))


async def test_a_list_takes_the_same_selection_and_keeps_its_order_and_repeats(client, replies):
    names = [replies[2].request_id, replies[0].request_id, replies[2].request_id]
    found = await client.activations(names, layers=[4], sites="resid_pre", positions="generated")
    assert [acts.manifest.capture_id for acts in found] == names
    assert np.array_equal(found[0][4], rows(0, PRE, 4, range(2, 6)).astype(np.float32))
    assert (found[0].layers, found[0].sites) == ((4,), ("resid_pre",))
    assert await client.activations([]) == []


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_an_interrupted_read_asks_for_the_rest(reader, flaky, replies, at):
    def change(number, messages):
        parts = parts_of(messages)
        if not number:
            yield from parts[:at]
            raise Unknown(grpc.StatusCode.UNAVAILABLE)
        yield from parts

    flaky.change = change
    found = await reader.activations(replies)
    names = [reply.request_id for reply in replies]
    assert asked(flaky) == [names, names[at:]]
    assert [acts.manifest.capture_id for acts in found] == names
    assert np.array_equal(found[3][1], rows(0, POST, 1, range(8)).astype(np.float32))


async def test_a_read_that_breaks_within_a_capture_yields_it_once(reader, flaky, replies):
    def change(number, messages):
        (data,) = messages
        if number:
            yield data
            return
        response = store_pb2.ReadCapturesResponse.FromString(data)
        del response.captures[2:]
        response.captures[1].is_last = False
        del response.captures[1].chunks[1:]
        yield response.SerializeToString()
        raise Unknown(grpc.StatusCode.UNAVAILABLE)

    flaky.change = change
    found = await reader.activations(replies)
    assert [len(names) for names in asked(flaky)] == [4, 3]
    assert np.array_equal(found[1][1], rows(0, POST, 1, range(7)).astype(np.float32))


@pytest.mark.parametrize("streams", [1, 2])
async def test_the_warning_of_empty_captures_is_where_the_user_asks(endpoint, replies, monkeypatch, streams):
    """Not in the tasks and threads that read."""
    for module in (async_captures, sync_captures):
        monkeypatch.setattr(module, "most_streams", lambda names: streams)
    asked = [*replies, replies[0]]
    async with residuum.AsyncClient(endpoint) as client:
        with pytest.warns(residuum.EmptyCaptureWarning) as of_async:
            await client.activations(asked, positions=5000)
    with residuum.Client(endpoint) as client, pytest.warns(residuum.EmptyCaptureWarning) as of_sync:
        client.activations(asked, positions=5000)
    for warned in (of_async, of_sync):
        assert {item.filename for item in warned} == {__file__}
        assert sorted(str(item.message).split()[2] for item in warned) == sorted(reply.request_id for reply in replies)


@pytest.mark.parametrize(("timeout", "reads", "tried"), [(None, 5, 120), (100.0, 4, 90)])
async def test_a_read_of_a_list_ends_if_the_store_stays_unreachable(
    make, endpoint, flaky, replies, clock, timeout, reads, tried
):
    """The time limit is that of a single read: the client's timeout if it never reached the store, else the read's.

    The first one counts from the first failure, the limit of a read from its start.
    """

    def change(number, messages):
        clock.seconds += 30
        raise Unknown(grpc.StatusCode.UNAVAILABLE)

    flaky.change = change
    reader = make(endpoint, store=flaky.endpoint, timeout=100 if timeout is None else 1000)
    with pytest.raises(residuum.Unreachable, match=rf"{flaky.endpoint}.* tried again for {tried}\.0 s"):
        await reader.activations(replies, timeout=timeout)
    assert flaky.reads == reads


async def test_a_known_store_may_be_unreachable_in_the_middle_of_a_list(make, endpoint, flaky, replies, clock):
    """The store is away for longer than the client's timeout. Captures that have arrived are not requested again."""

    def change(number, messages):
        parts = parts_of(messages)
        if not number:
            yield from parts[:2]
        if number < 4:
            clock.seconds += 30
            raise Unknown(grpc.StatusCode.UNAVAILABLE)
        yield from parts

    flaky.change = change
    reader = make(endpoint, store=flaky.endpoint, timeout=20)
    found = await reader.activations(replies)
    names = [reply.request_id for reply in replies]
    assert [acts.manifest.capture_id for acts in found] == names
    assert asked(flaky)[0] == names
    assert asked(flaky)[1:] == [names[2:]] * 4


async def test_a_reply_without_a_capture_is_named(client, replies):
    plain = await client.generate("a", max_tokens=1)
    for read in (client.activations, lambda captures: client.rows(captures, layer=1)):
        with pytest.raises(residuum.UnknownCapture, match=f"{plain.request_id} captured nothing"):
            await read([replies[0], plain])


async def test_unknown_captures_are_named(client, replies):
    names = [replies[0].request_id, "none-1", replies[1].request_id, "none-2"]
    with pytest.raises(residuum.UnknownCapture, match="2 of 4 captures are in no store: none-1, none-2") as caught:
        await client.activations(names)
    assert caught.value.metadata["capture_ids"] == "none-1,none-2"
    with pytest.raises(residuum.UnknownCapture, match="holds no capture 'none-1'"):
        await client.activations(["none-1"])


async def test_invalid_ids_are_refused(client):
    with pytest.raises(residuum.InvalidRequest, match="is not a valid request ID"):
        await client.activations(["a/b"])
    with pytest.raises(TypeError, match="A request must be an ID"):
        await client.activations([3])


async def test_an_open_capture_is_waited_for_or_refused(client, peer, replies):
    peer.script.delay_seal = threading.Event()
    late = await client.generate("a bb", max_tokens=4, capture=residuum.Capture(layers=[1]))
    with pytest.raises(residuum.OpenCapture, match="still being written"):
        await client.activations([replies[0], late], wait=False)
    threading.Timer(0.2, peer.script.delay_seal.set).start()
    found = await client.activations([late, replies[0]])
    assert [acts.manifest.state for acts in found] == ["complete"] * 2
    assert np.array_equal(found[0][1], rows(0, POST, 1, range(5)).astype(np.float32))


async def test_a_capture_without_the_layer_is_named(client, replies):
    with pytest.raises(residuum.UnknownLayer, match=f"The capture {replies[0].request_id} has no layer 3") as caught:
        await client.activations(replies, layers=[3])
    assert caught.value.metadata["capture_id"] == replies[0].request_id


async def test_a_damaged_row_is_noticed(reader, flaky, replies):
    def change(number, messages):
        response = store_pb2.ReadCapturesResponse.FromString(messages[0])
        chunk = response.captures[2].chunks[0]
        chunk.payload = chunk.payload[:-1] + bytes([chunk.payload[-1] ^ 1])
        yield response.SerializeToString()

    flaky.change = change
    with pytest.raises(residuum.DamagedCapture, match="do not match their checksum") as caught:
        await reader.activations(replies)
    assert caught.value.metadata["capture_id"] == replies[2].request_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[:2], "ended the read before the capture"),
        (lambda parts: parts[1:], "ended the read before the capture"),
        (lambda parts: [*parts[:2], parts[0], *parts[2:]], "had sent already"),
        (lambda parts: [b"\xff\xff", *parts], "damaged message"),
    ],
)
async def test_a_stream_that_is_wrong_is_an_error(reader, flaky, replies, change, message):
    flaky.change = lambda number, messages: iter(change(parts_of(messages)))
    with pytest.raises((residuum.ServerFault, residuum.DamagedCapture), match=message):
        await reader.activations(replies)


async def test_rows_of_many_captures_are_one_array(client, replies):
    found = await client.rows(replies, layer=4, site="resid_pre", positions="generated")
    expected = [rows(0, PRE, 4, range(len(prompt.split()), len(prompt.split()) + 4)) for prompt in PROMPTS]
    assert np.array_equal(found.values, np.concatenate(expected).astype(np.float32))
    assert found.values.dtype == np.float32
    assert found.ids.tolist() == [reply.request_id for reply in replies for _ in range(4)]
    assert found.positions.tolist() == [at for prompt in PROMPTS for at in np.arange(4) + len(prompt.split())]
    assert found.sequences.tolist() == [0] * 16
    assert len(found) == len(found.token_ids) == 16
    assert repr(found) == f"Rows(16 × {HIDDEN}, 4 captures, resid_pre of layer 4)"


async def test_rows_of_a_prefix_are_in_the_order_of_the_ids(client, replies):
    prefix = replies[0].request_id[:-1]
    found = await client.rows(prefix=prefix, layer=1, positions="last_prompt")
    assert found.captures == tuple(reply.request_id for reply in replies[::-1])
    last = [len(prompt.split()) - 1 for prompt in PROMPTS[::-1]]
    assert np.array_equal(found.values, rows(0, POST, 1, last).astype(np.float32))
    assert found.positions.tolist() == last


async def test_open_captures_of_a_prefix_are_waited_for_and_broken_ones_left_out(client, replies, endpoint, peer):
    """Otherwise rows that were generated a moment ago would be missing without notice."""
    prefix = replies[0].request_id[:-1]
    peer.script.delay_seal = threading.Event()
    with residuum.Client(endpoint) as other:
        open_one = other.generate("a bb", max_tokens=2, capture=LAYER_1, request_id=f"{prefix}z")
        assert other.manifest(open_one).state == "open"
        threading.Timer(0.5, peer.script.delay_seal.set).start()
        found = await client.rows(prefix=prefix, layer=1)
        assert open_one.request_id in found.captures
        peer.script.lost_layers = (1,)
        broken = other.generate("a bb", max_tokens=2, capture=LAYER_1, request_id=f"{prefix}broken")
        assert other.manifest(broken, wait=20).state == "incomplete"
    with pytest.warns(residuum.LeftOutWarning, match=r"1 of the 6 captures .*broken \(incomplete\)"):
        complete = await client.rows(prefix=prefix, layer=1)
    assert complete.captures == found.captures
    assert len((await client.rows(prefix=prefix, layer=1, allow_partial=True)).captures) == 6


async def test_captures_without_a_row_are_listed(client, replies):
    found = await client.rows(replies, layer=1, positions=7)
    assert found.captures == tuple(reply.request_id for reply in replies)
    assert found.ids.tolist() == [replies[3].request_id]


@pytest.mark.parametrize("layer", [[1], [1, 4], "1", "all", None, True])
async def test_rows_of_several_layers_are_refused_before_they_are_read(client, layer):
    with pytest.raises(residuum.InvalidRequest, match="layer= takes the number of one layer, such as 12, not "):
        await client.rows(["none-1"], layer=layer)


async def test_rows_of_several_sites_are_refused(client):
    with pytest.raises(residuum.InvalidRequest, match="site= takes the name of one site"):
        await client.rows(["none-1"], layer=1, site=["resid_post"])


async def test_a_numpy_number_is_a_layer(client, replies):
    found = await client.rows(replies, layer=np.int64(1))
    assert found.layer == 1


async def test_rows_of_no_capture_are_refused(client, replies):
    with pytest.raises(residuum.InvalidRequest, match="There is no capture whose ID starts with 'none-'"):
        await client.rows(prefix="none-", layer=1)
    with pytest.raises(residuum.InvalidRequest, match="either captures="):
        await client.rows(replies, prefix="many-", layer=1)
    with pytest.raises(residuum.InvalidRequest, match="either captures="):
        await client.rows("many-1", layer=1)


async def test_rows_of_all_captures_must_be_asked_for(client, replies):
    with pytest.raises(residuum.InvalidRequest, match=r"Which captures\?.*For all captures, pass prefix=''"):
        await client.rows(layer=1)
    with pytest.raises(residuum.UnknownLayer, match=rf"The capture {replies[0].request_id[:-1]}\d has no layer 3"):
        await client.rows(prefix=replies[0].request_id[:-1], layer=3)
    with pytest.raises(residuum.InvalidRequest, match="There is no capture with labels"):
        await client.rows(where="x = none", layer=1)
    with pytest.raises(residuum.InvalidRequest, match="either captures="):
        await client.rows(replies, prefix="a", layer=1)


async def test_rows_of_different_widths_are_refused(client, replies):
    narrow = await client.generate(
        "a bb", max_tokens=2, capture=residuum.Capture(layers=[1], encoding="rp", dimensions=3)
    )
    with pytest.raises(residuum.InvalidRequest, match=f"have {HIDDEN} elements, and those of {narrow.request_id}"):
        await client.rows([replies[0], narrow], layer=1)


async def test_rows_that_mean_something_else_are_refused(client):
    one, other = (residuum.Vector.from_array(np.eye(HIDDEN)[axis]) for axis in (0, 1))
    for options, others, what in (
        ({"encoding": "project", "vectors": [one]}, {"encoding": "project", "vectors": [other]}, "projected_onto"),
        ({"encoding": "rp", "dimensions": 4, "seed": 1}, {"encoding": "rp", "dimensions": 4, "seed": 2}, "seed"),
        ({}, {"before_steering": True}, r"before_steering \(False and True\)"),
    ):
        replies = [
            await client.generate("a bb", max_tokens=2, capture=residuum.Capture(layers=[1], **more))
            for more in (options, others)
        ]
        with pytest.raises(residuum.InvalidRequest, match=rf"differ in {what}.*\. The captures of one array of rows"):
            await client.rows(replies, layer=1)
        assert len(await client.rows(replies[:1], layer=1))


@pytest.fixture
def many_cores(monkeypatch):
    """A machine on which lists are read in several streams."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr("residuum.protocol.captures.many._MIN_PART", 1)


@pytest.mark.parametrize(
    ("cores", "captures", "parts"),
    [(2, 50, [50]), (4, 6, [3, 3]), (16, 3, [3]), (16, 6, [2, 2, 2]), (16, 50, [13, 13, 12, 12]), (None, 9, [9])],
)
def test_cores_and_captures_decide_the_number_of_streams(monkeypatch, cores, captures, parts):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    names = [f"c{number}" for number in range(captures)]
    found = split_reads(names, most_streams(names))
    assert [len(part) for part in found] == parts
    assert sorted(name for part in found for name in part) == sorted(names)


@pytest.mark.usefixtures("shared_memory")
async def test_with_many_cores_a_list_is_read_in_several_streams(many_cores, reader, flaky, replies):
    found = await reader.activations(replies)
    assert sorted(asked(flaky)) == sorted([reply.request_id] for reply in replies)
    assert [acts.manifest.capture_id for acts in found] == [reply.request_id for reply in replies]


@pytest.mark.parametrize("is_old", [False, True])
async def test_rows_in_messages_come_in_fewer_streams(many_cores, make, endpoint, flaky, replies, is_old):
    flaky.missing = {"DescribeStore"} if is_old else set()
    reader = make(endpoint, store=flaky.endpoint, shared_memory=is_old)
    found = await reader.activations(replies)
    assert len(asked(flaky)) == MESSAGE_STREAMS
    assert [acts.manifest.capture_id for acts in found] == [reply.request_id for reply in replies]


async def test_the_time_limit_of_a_list_counts_once_if_the_store_is_silent(many_cores, make, endpoint, replies):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        took = []
        while len(took) < 3 and (not took or took[-1] >= 3):  # on a busy machine, a read may take longer
            reader = make(endpoint, store=f"127.0.0.1:{silent.getsockname()[1]}")
            start = time.monotonic()
            with pytest.raises(residuum.ResiduumError):
                await reader.activations(replies, timeout=2)
            took.append(time.monotonic() - start)
        assert min(took) < 3


async def test_the_error_of_several_streams_names_all_unknown_captures(many_cores, client, replies):
    with pytest.raises(residuum.UnknownCapture, match="2 of 6 captures are in no store: gone-1, gone-2"):
        await client.activations(["gone-1", *replies, "gone-2"])


async def test_other_errors_of_one_stream_end_the_others(many_cores, client, replies):
    with pytest.raises(residuum.UnknownLayer, match="no layer 3"):
        await client.activations(replies, layers=[3])


@pytest.mark.parametrize("place", [0, 1])
async def test_an_error_of_one_stream_does_not_wait_for_open_captures_of_another(
    many_cores, client, peer, replies, place
):
    peer.script.delay_seal = threading.Event()
    late = await client.generate("a bb", max_tokens=4, capture=LAYER_1)
    peer.script.delay_seal, delayed = None, peer.script.delay_seal
    peer.script.lost_layers = (1,)
    broken = await client.generate("a bb", max_tokens=4, capture=LAYER_1)
    before = set(threading.enumerate())
    names = [late, broken] if place else [broken, late]
    with pytest.raises(residuum.IncompleteCapture, match=broken.request_id):
        await client.activations(names, timeout=20)
    wait_for(
        lambda: not {thread for thread in set(threading.enumerate()) - before if "(run)" in thread.name},
        "the thread of the other stream ends",
    )
    delayed.set()


def test_an_interrupt_of_a_read_is_not_hidden_by_another_error():
    def fail(index, stop):
        raise ValueError

    def interrupted(index, stop):
        wait_for(lambda: stop.is_requested, "the other job fails")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        io.run_all([fail, interrupted])
