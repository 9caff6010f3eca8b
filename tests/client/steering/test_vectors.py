"""Steering vectors are sent once, and registrations send theirs."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

import residuum
from residuum.rpc.errors import Failure, Reason
from tests.client.support.peer import HIDDEN, LAYERS


def vector(seed=0):
    return residuum.Vector.from_array(np.random.default_rng(seed).normal(size=HIDDEN))


async def test_a_vector_is_sent_once(client, peer):
    given = vector(1)
    first, second = await client.put_vectors([given, given]), await client.put_vectors(given)
    assert (first.sent, first.bytes_sent) == (1, 4 * HIDDEN)
    assert first.digests == (given.hexdigest,) * 2
    assert (second.sent, second.bytes_sent) == (0, 0)
    assert peer.vectors_received == 1


async def test_probes_are_sent_once(client, peer):
    rows = np.random.default_rng(4).normal(size=(2, 2 * HIDDEN))
    probe = residuum.Probe(rows, layer=[0, 1])
    first, second = await client.put_probes([probe]), await client.put_probes(probe)
    assert (first.sent, first.bytes_sent) == (4, 4 * 4 * HIDDEN)
    assert first.digests == tuple(item.hexdigest for item in probe.vectors)
    assert (second.sent, peer.vectors_received) == (0, 4)
    with pytest.raises(TypeError, match=r"a list of residuum\.Probe"):
        await client.put_probes([vector(1)])


async def test_another_client_does_not_send_a_known_vector(client, make, endpoint, peer):
    await client.put_vectors([vector(2)])
    assert (await make(endpoint).put_vectors([vector(2)])).sent == 0
    assert peer.vectors_received == 1
    assert await client.find_missing_vectors([vector(2), vector(3)]) == [vector(3)]


async def test_steering_sends_missing_vectors(client, peer):
    steer = [residuum.Add(vector(4), layer=1, scale=2.0), residuum.Ablate(vector(4), layers="all")]
    await client.generate("a", max_tokens=1, steer=steer)
    await client.generate("a", max_tokens=1, steer=steer)
    assert peer.calls == ["FindMissingVectors", "PutVectors", "Generate", "Generate"]
    assert len(peer.requests[-1].spec.steering.operations) == 2


async def test_evicted_vectors_are_sent_again(client, peer):
    await client.put_vectors([vector(5)])
    peer.script.drop_vectors = True
    reply = await client.generate("a", max_tokens=1, steer=residuum.Add(vector(5), layer=1))
    assert reply.text == " 2"
    assert peer.vectors_received == 2


async def test_vectors_that_stay_missing_are_an_error(client, peer):
    peer.script.failures = [
        None,
        None,
        Failure(Reason.ERROR_REASON_MISSING_VECTORS, "Send them.", digests="aa,bb"),
        None,
        Failure(Reason.ERROR_REASON_MISSING_VECTORS, "Send them.", digests="aa,bb"),
    ]
    with pytest.raises(residuum.MissingVectors) as caught:
        await client.generate("a", steer=residuum.Add(vector(6), layer=1))
    assert caught.value.digests == ("aa", "bb")


async def test_a_vector_of_the_wrong_length_is_refused(client):
    wrong = residuum.Vector.from_array(np.ones(HIDDEN + 1))
    with pytest.raises(residuum.BadVector, match="9 elements") as caught:
        await client.put_vectors([vector(7), wrong])
    assert caught.value.digest == wrong.hexdigest
    assert caught.value.reason == "WRONG_LENGTH"
    assert isinstance(caught.value, ValueError)
    assert (await client.put_vectors([vector(7)])).sent == 0  # the valid vector was kept


async def test_invalid_vectors_are_refused(client):
    with pytest.raises(TypeError, match="from_array"):
        await client.put_vectors([np.ones(HIDDEN)])


# -------------------------------------------------------------------------------------------------------- registrations


async def test_register_then_generate(client, peer):
    name = f"reg-{uuid.uuid4().hex}"
    registration = await client.register(
        request_id=name, capture=residuum.Capture(), steer=residuum.Add(vector(8), layer=0)
    )
    assert registration.request_id == name
    assert registration.time_to_live == 600
    assert registration.expire_time.year == 2033
    assert peer.vectors_received == 1
    reply = await client.generate("a bb", registration=registration, max_tokens=2)
    assert reply.request_id == registration.request_id
    assert reply.captured
    assert (await client.activations(reply.request_id)).layers == tuple(range(LAYERS))


async def test_registering_the_same_spec_again_works_but_another_spec_fails(client):
    name = f"again-{uuid.uuid4().hex}"
    capture = residuum.Capture(layers=[0])
    assert (await client.register(request_id=name, capture=capture)).request_id == name
    assert (await client.register(request_id=name, capture=capture)).request_id == name
    with pytest.raises(residuum.RequestExists) as caught:
        await client.register(request_id=name, capture=residuum.Capture(layers=[1]))
    assert caught.value.request_id == name
    assert isinstance(caught.value, residuum.AlreadyExists)


async def test_a_registration_by_name(client):
    registration = await client.register()
    assert (await client.generate("a", registration=registration.request_id)).request_id == registration.request_id


async def test_an_unknown_registration_is_reported(client):
    with pytest.raises(residuum.UnknownRequest) as caught:
        await client.generate("a", registration="never-was")
    assert isinstance(caught.value, LookupError)


async def test_generate_from_a_registration_accepts_no_spec(client):
    registration = await client.register()
    with pytest.raises(residuum.InvalidRequest, match="register"):
        await client.generate("a", registration=registration, capture=residuum.Capture())


async def test_evicted_vectors_of_a_registration_are_sent_again(client, peer):
    registration = await client.register(steer=residuum.Add(vector(9), layer=0))
    peer.script.drop_vectors = True
    await client.generate("a", registration=registration)
    assert peer.vectors_received == 2


async def test_many_vectors_are_sent_in_several_calls(client, peer, monkeypatch):
    monkeypatch.setattr("residuum.protocol.generation.vector_upload.MAX_VECTORS_PER_CALL", 2)
    sent = await client.put_vectors([vector(seed) for seed in range(20, 25)])
    assert sent.sent == 5
    assert peer.calls == ["FindMissingVectors", *["PutVectors"] * 3]


WRONG = residuum.Vector.from_array(np.ones(HIDDEN + 1))
OWNERS = {
    "operation": (
        {"steer": [residuum.Add(vector(8), layer=1), residuum.Add(WRONG, layer=1)]},
        r"It belongs to steer\[1\] \(Add\)\.$",
    ),
    "probe": (
        {"probes": [residuum.Probe(np.ones(HIDDEN + 1), layer=1, name="lies")]},
        r"It belongs to the probe 'lies'\.$",
    ),
    "capture": ({"capture": residuum.Capture(encoding="project", vectors=[WRONG])}, r"elements, not \d+\.$"),
}


@pytest.mark.parametrize("method", ["generate", "register"])
@pytest.mark.parametrize(("asked", "message"), OWNERS.values(), ids=OWNERS)
async def test_the_error_of_a_vector_says_what_it_belongs_to(client, asked, message, method):
    arguments = ("a",) if method == "generate" else ()
    with pytest.raises(residuum.BadVector, match=message):
        await getattr(client, method)(*arguments, **asked)


async def test_the_error_of_a_new_vector_says_what_it_belongs_to(endpoint, peer):
    async with residuum.AsyncClient(endpoint) as client, client.stream("a", max_tokens=3, updatable=True) as stream:
        with pytest.raises(residuum.BadVector, match=r"It belongs to steer\[0\] \(Add\)\.$"):
            await stream.update_steering(residuum.Add(vector(8), layer=1, gate=residuum.Gate(WRONG)))


async def test_an_encoder_for_other_rows_is_no_bad_vector(client, peer):
    peer.script.failures = [Failure(Reason.ERROR_REASON_WRONG_LENGTH, "It has 4, not 8.", length="4", encoder="ab")]
    with pytest.raises(residuum.BadSAE, match="It has 4, not 8"):
        await client.generate("a")
