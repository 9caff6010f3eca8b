"""Rows of captures as the values of operations: read before the request, and sent as vectors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import residuum
from residuum._async import generation as async_generation
from residuum._sync import generation as sync_generation
from residuum.v1 import capture_pb2
from tests.client.support.peer import row

POST = capture_pb2.SITE_RESID_POST
"""The site of all rows here."""


def vector_of(layer, position, sequence=0):
    return residuum.Vector(row(sequence, POST, layer, position))


def digests(peer):
    """The digests of the operations of the last generation."""
    spec = [request for name, request in zip(peer.calls, peer.requests, strict=True) if name == "Generate"][-1].spec
    return [
        list(operation.layer_digests) or getattr(operation, operation.WhichOneof("operation")).digest
        for operation in spec.steering.operations
    ]


MAKE = {
    "add": lambda value: residuum.Add(value, layer=2, scale=0.5),
    "ablate": lambda value: residuum.Ablate(value, layers="all"),
    "cap": lambda value: residuum.Cap(value, layer=2, max=1.0, keep_norm=True),
    "replace": lambda value: residuum.Replace(value, layers=[2, 3], value=2.0, positions="generated"),
    "set": lambda value: residuum.Set(value, layer=2, positions=[0], site="mlp_out"),
    "multiply": lambda value: residuum.Multiply(value, layer=2),
}


@pytest.mark.parametrize("operation_of", MAKE.values(), ids=MAKE)
async def test_an_operation_with_a_row_is_sent_as_the_same_one_with_its_vector(client, peer, captured, operation_of):
    await client.generate("x", max_tokens=1, steer=operation_of(residuum.StoredRow(captured, layer=4, position=1)))
    with_row = peer.requests[-1].spec.steering
    await client.generate("x", max_tokens=1, steer=operation_of(vector_of(4, 1)))
    assert peer.requests[-1].spec.steering == with_row
    assert peer.vectors_received == 1, "the vector of the row is known by its content"


async def test_a_row_is_named_as_in_a_capture(client, peer, captured):
    """By any object with the ID, counted from the prompt's end, of any sequence; and for each layer."""
    acts = await client.activations(captured)
    last = residuum.StoredRow(acts.manifest, layer=1)
    two = await client.generate("a bb", max_tokens=3, n=2, capture=residuum.Capture([3]))
    await client.manifest(two, wait=True)
    second = residuum.StoredRow(two, layer=3, position=2, sequence=1)
    mixed = {1: residuum.StoredRow(captured, layer=1, position=0), 5: vector_of(4, 4), 2: last}
    await client.generate("x", max_tokens=1, steer=[residuum.Set(last, layer=0), residuum.Set(second, layer=0)])
    assert digests(peer) == [vector_of(1, 2).digest, vector_of(3, 2, 1).digest]
    await client.generate("x", max_tokens=1, steer=[residuum.Add(mixed)])
    assert digests(peer) == [[vector_of(1, 0).digest, vector_of(1, 2).digest, vector_of(4, 4).digest]]
    np.testing.assert_array_equal(acts.vector(1, -1).values, acts[1][2])
    assert acts.vector(4, 0, site="resid_post") == vector_of(4, 0)


async def test_every_call_that_steers_reads_rows(client, peer, captured):
    stored = residuum.Set(residuum.StoredRow(captured, layer=4, position=0), layer=1)
    expected = vector_of(4, 0).digest
    registration = await client.register(steer=stored)
    assert peer.requests[peer.calls.index("RegisterRequest")].spec.steering.operations[0].set.digest == expected
    await client.generate("x", max_tokens=1, registration=registration)
    await client.generate_many(["x", "y"], max_tokens=1, steer=[[stored], None], progress=False)
    generations = [request for name, request in zip(peer.calls, peer.requests, strict=True) if name == "Generate"]
    sent = [request.spec.steering.operations for request in generations[-2:]]
    assert sorted(len(operations) for operations in sent) == [0, 1]
    assert {operation.set.digest for operations in sent for operation in operations} == {expected}


def test_a_running_request_gets_a_row(endpoint, peer, captured):
    peer.script.hold = threading.Event()
    stored = residuum.Set(residuum.StoredRow(captured, layer=4, position=0), layer=1)
    with residuum.Client(endpoint) as client, client.stream("x", max_tokens=3, updatable=True) as stream:
        next(stream)
        client.update_steering(stream, stored)
        peer.script.hold.set()
        list(stream)
    changed = peer.requests[peer.calls.index("UpdateSteering")].steering
    assert changed.operations[0].set.digest == vector_of(4, 0).digest


async def test_a_batch_reads_each_row_once(client, peer, captured, monkeypatch):
    reads = []
    found_in = residuum.StoredRow.found_in
    monkeypatch.setattr(
        residuum.StoredRow, "found_in", lambda stored, *found: reads.append(stored) or found_in(stored, *found)
    )
    steer = [residuum.Set(residuum.StoredRow(captured, layer=4, position=position), layer=1) for position in (0, 1)]
    await client.generate_many(["x"] * 6, max_tokens=1, steer=steer, max_concurrency=1, progress=False)
    assert len(reads) == 2
    await client.generate("x", max_tokens=1, steer=steer)
    assert len(reads) == 4, "another capture may have the ID by now"


async def test_the_rows_of_a_position_are_read_in_one_call(client, peer, captured, monkeypatch):
    plans = []
    plan_read = async_generation.plan_read

    def counted(*arguments, **options):
        plans.append((options["layers"], options["positions"]))
        return plan_read(*arguments, **options)

    for module in (async_generation, sync_generation):
        monkeypatch.setattr(module, "plan_read", counted)
    rows = [residuum.StoredRow(captured, layer=layer, position=position) for position in (0, 1) for layer in (4, 1, 4)]
    await client.generate("x", max_tokens=1, steer=[residuum.Set(row, layer=row.layer) for row in rows])
    assert plans == [([4, 1], [0]), ([4, 1], [1])]
    assert digests(peer) == [vector_of(row.layer, row.position).digest for row in rows]
    assert peer.calls.count("PutVectors") == 1


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ({"layer": 2}, residuum.InvalidRequest, "layer"),
        ({"layer": 1, "site": "mlp_out"}, residuum.InvalidRequest, "mlp_out"),
        ({"layer": 1, "position": 7}, residuum.InvalidRequest, "has no row of layer 1 at position 7 .resid_post."),
        ({"layer": 1, "position": -9}, residuum.InvalidRequest, "position"),
        ({"layer": 1, "sequence": 1}, residuum.InvalidRequest, "sequence"),
    ],
)
async def test_a_row_that_the_capture_lacks_is_refused(client, peer, captured, where, error, told):
    calls = len(peer.calls)
    with pytest.raises(error, match=told):
        await client.generate("x", steer=residuum.Set(residuum.StoredRow(captured, **where), layer=1))
    assert "Generate" not in peer.calls[calls:]


@pytest.mark.parametrize(
    ("vector", "place"),
    [
        (residuum.StoredRow("x", layer=1, site="z"), {"layer": 1}),
        ({1: residuum.StoredRow("x", layer=1, site="z")}, {}),
        (residuum.StoredRow("x", layer=1), {"layer": 1, "site": "mlp_act"}),
    ],
)
def test_a_row_beside_the_stream_is_only_for_its_own_site(vector, place):
    with pytest.raises(residuum.InvalidRequest, match=r"Set: The row at .* the operation and the row the same site\."):
        residuum.Set(vector, **place)
    residuum.Set(residuum.StoredRow("x", layer=1, site="z"), layer=1, site="z")
    residuum.Add(residuum.StoredRow("x", layer=1, site="mlp_out"), layer=1)


async def test_captures_without_whole_rows_are_refused(client, peer):
    def steer(reply):
        return residuum.Set(residuum.StoredRow(reply, layer=1, position=0), layer=1)

    with pytest.raises(residuum.UnknownCapture, match="never"):
        await client.generate("x", steer=steer("never"))
    for options, told in (
        ({"encoding": "rp", "dimensions": 4}, "encoding rp keeps 4 other numbers"),
        ({"reduction": "mean"}, "The capture is reduced"),
    ):
        reply = await client.generate("a bb", max_tokens=1, capture=residuum.Capture([1], **options))
        await client.manifest(reply, wait=True)
        with pytest.raises(residuum.InvalidRequest, match=told):
            await client.generate("x", steer=steer(reply))


async def test_rows_of_another_model_are_refused(client, peer, captured, monkeypatch):
    monkeypatch.setattr(peer.script, "model", "another")
    with pytest.raises(
        residuum.InvalidRequest,
        match=r"row at resid_post\.1, position 0 of .* is of the model 'peer', and the server has 'another'",
    ):
        await client.generate("x", steer=residuum.Set(residuum.StoredRow(captured, layer=1, position=0), layer=1))
    vector = (await client.activations(captured)).vector(1, 0)
    await client.generate("x", max_tokens=1, steer=residuum.Set(vector, layer=1))
    assert digests(peer) == [vector.digest]


async def test_an_open_capture_gives_the_rows_that_it_has(client, peer):
    peer.script.delay_seal = threading.Event()
    try:
        reply = await client.generate("a bb", max_tokens=1, capture=residuum.Capture([1]))
        with pytest.raises(residuum.InvalidRequest, match=r"position 9 .* is not stored yet: the capture is open"):
            await client.generate("x", steer=residuum.Set(residuum.StoredRow(reply, layer=1, position=9), layer=1))
    finally:
        peer.script.delay_seal.set()


async def test_a_row_in_a_lossy_encoding_is_what_the_capture_has(client, peer):
    reply = await client.generate("a bb", max_tokens=1, capture=residuum.Capture([1], encoding="full8"))
    acts = await client.activations(reply)
    await client.generate(
        "x", max_tokens=1, steer=residuum.Set(residuum.StoredRow(reply, layer=1, position=1), layer=1)
    )
    assert digests(peer) == [residuum.Vector(acts[1][1]).digest]


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: residuum.StoredRow(3, layer=1), TypeError, "takes a request ID"),
        (lambda: residuum.StoredRow("a", layer="1"), TypeError, "layer must be an integer"),
        (lambda: residuum.StoredRow("a", layer=-1), residuum.InvalidRequest, "layer must not be negative"),
        (lambda: residuum.StoredRow("a", layer=1, site="resid"), residuum.UnknownSite, "'resid' is not a site"),
        (
            lambda: residuum.vllm_xargs(steer=residuum.Add(residuum.StoredRow("a", layer=1), layer=1)),
            residuum.InvalidRequest,
            r"Add: The row at resid_post\.1, position -1 of a must be read before",
        ),
    ],
)
def test_invalid_rows_are_refused(make, error, told):
    with pytest.raises(error, match=told):
        make()


def test_the_command_line_takes_rows(cli, peer, captured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--add", f"{captured}/4/0@2*0.5", "--set", f"{captured}/resid_post.1/-1@0,3")
    assert cli("generate", "x", "--max-tokens", 1, *flags)[0] == 0
    assert digests(peer) == [vector_of(4, 0).digest, vector_of(1, 2).digest]
    for text, told in (
        (f"{captured}/1-2/0@2", "names a point of one layer"),
        (f"{captured}/zz.1/0@2", "is not a point"),
        (f"{captured}/2/0@2", "layer"),
    ):
        code, _, err = cli("generate", "x", "--set", text)
        assert (code, told in err) == (1, True), err
