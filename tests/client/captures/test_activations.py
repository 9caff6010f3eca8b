"""Reading captures: complete, partial, open, damaged, resumed."""

from __future__ import annotations

import asyncio
import re
import threading
import uuid
import warnings

import ml_dtypes
import numpy as np
import pytest

import residuum
from tests.client.support.peer import HIDDEN, LAYERS, POST, PRE, rows


async def test_whole_capture_comes_back_exactly(client):
    reply = await client.generate("a bb ccc dddd", max_tokens=7, capture=residuum.Capture(layers="all"))
    acts = await client.activations(reply.request_id)
    assert reply.captured
    assert acts.manifest.is_complete
    assert acts.layers == tuple(range(LAYERS))
    assert acts.positions.tolist() == list(range(10))  # 4 + 7 - 1
    for layer in acts:
        assert acts[layer].dtype == np.float32
        assert np.array_equal(acts[layer], rows(0, POST, layer, range(10)).astype(np.float32))
        assert np.array_equal(acts.raw(layer), rows(0, POST, layer, range(10)))
    assert acts.raw(0).dtype == ml_dtypes.bfloat16
    assert acts.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert acts.prompt_tokens == 4
    assert acts.present.all()


async def test_one_generated_token_gives_only_the_prompts_rows(client):
    reply = await client.generate("a bb", max_tokens=1, capture=residuum.Capture(layers=3))
    acts = await client.activations(reply.request_id)
    assert acts[3].shape == (2, HIDDEN)


async def test_layers_and_positions_can_be_selected_while_reading(client):
    capture = residuum.Capture(layers=[0, 2, 5], sites=("resid_pre", "resid_post"))
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capture, n=2)
    acts = await client.activations(
        reply.request_id, layers=[5, 2], sites="resid_pre", sequences=1, positions=slice(1, 4)
    )
    assert acts.layers == (2, 5)
    assert (acts.sites, acts.sequences) == (("resid_pre",), (1,))
    assert np.array_equal(acts[5], rows(1, PRE, 5, [1, 2, 3]).astype(np.float32))
    assert acts.token_ids.tolist() == [2, 3, 104]


async def test_sites_can_be_selected_by_name_while_reading(client):
    reply = await client.generate("a", max_tokens=2, capture=residuum.Capture(layers=[0], sites="resid_post,resid_pre"))
    for sites in ("all", None, "resid_post, resid_pre", ["resid_pre", "resid_post"]):
        assert set((await client.activations(reply, sites=sites)).sites) == {"resid_post", "resid_pre"}
    with pytest.raises(residuum.UnknownSite, match="'resid' is not a site"):
        await client.activations(reply, sites="resid_post,resid")


async def test_all_sequences_and_sites(client):
    capture = residuum.Capture(layers=[1], sites=("resid_post", "resid_pre"))
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capture, n=3)
    acts = await client.activations(reply.request_id)
    assert acts.sequences == (0, 1, 2)
    assert acts.sites == ("resid_post", "resid_pre")
    chosen = acts.select(sequence=2, site="resid_pre")
    assert np.array_equal(chosen[1], rows(2, PRE, 1, range(6)).astype(np.float32))
    assert chosen.token_ids.tolist() == [1, 2, 3, 204, 205, 206]


async def test_rows_of_a_point(client):
    reply = await client.generate(
        "a bb ccc", max_tokens=1, capture=residuum.Capture([1, 3], sites="resid_post,resid_pre")
    )
    acts = await client.activations(reply)
    assert np.array_equal(acts.at("resid_pre.3"), rows(0, PRE, 3, range(3)).astype(np.float32))
    with pytest.raises(residuum.InvalidRequest, match="'resid_pre' names several layers"):
        acts.at("resid_pre")
    one = await client.activations(reply, layers=[3])
    assert np.array_equal(one.at("resid_pre"), acts.at("resid_pre.3")), "these have no other layer"


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("prompt", [0, 1, 2]),
        ("generated", [3, 4, 5, 6]),
        ("last_prompt", [2]),
        (slice(-2, None, None), [1, 2, 3, 4, 5, 6]),
    ],
)
async def test_positions_of_the_capture(client, positions, expected):
    capture = residuum.Capture(layers=[4], positions=positions)
    reply = await client.generate("a bb ccc", max_tokens=5, capture=capture)
    acts = await client.activations(reply.request_id)
    assert acts.positions.tolist() == expected
    assert np.array_equal(acts[4], rows(0, POST, 4, expected).astype(np.float32))


async def test_rows_past_the_end_are_dropped(client, peer):
    peer.script.extra_rows = 3
    reply = await client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[0]))
    acts = await client.activations(reply.request_id)
    assert acts.positions.tolist() == list(range(6))


async def test_waits_for_the_seal(client, peer):
    peer.script.delay_seal = threading.Event()
    reply = await client.generate("a bb", max_tokens=200, capture=residuum.Capture())
    with pytest.raises(residuum.OpenCapture, match="still being written") as caught:
        await client.activations(reply.request_id, wait=False)
    assert caught.value.manifest.state == "open"
    open_acts = await client.activations(reply.request_id, wait=False, allow_partial=True)
    assert np.array_equal(open_acts[5], rows(0, POST, 5, open_acts.positions).astype(np.float32))
    waiting = asyncio.ensure_future(asyncio.to_thread(asyncio.run, _read(client, reply.request_id)))
    peer.script.delay_seal.set()
    acts = await waiting
    assert acts.manifest.is_complete
    assert np.array_equal(acts[5], rows(0, POST, 5, range(201)).astype(np.float32))


async def _read(face, request_id):
    """Read with a client of the same kind in another thread, because an asyncio client belongs to one loop."""
    if isinstance(face.client, residuum.Client):
        return face.client.activations(request_id)
    async with residuum.AsyncClient(face.client.endpoint) as client:
        return await client.activations(request_id)


async def test_waiting_for_the_seal_times_out(client, peer):
    peer.script.delay_seal = threading.Event()
    reply = await client.generate("a bb", max_tokens=4, capture=residuum.Capture())
    for timeout in (1.5, 20):  # on a busy machine, the store's first answer may take longer than the shorter one
        with pytest.raises(residuum.DeadlineExceeded) as caught:
            await client.activations(reply.request_id, timeout=timeout)
        if "still open" in str(caught.value):
            break
    assert re.search(r"still open.*timeout.*allow_partial=True", str(caught.value))
    peer.script.delay_seal.set()
    assert caught.value.capture_id == reply.request_id
    assert isinstance(caught.value, TimeoutError)


async def test_an_incomplete_capture_raises(client, peer):
    peer.script.lost_layers = (1, 2)
    reply = await client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[0, 1, 2]))
    with pytest.raises(
        residuum.IncompleteCapture, match=r"OVERFLOW.*layers 1-2.*positions 0-5.*allow_partial"
    ) as caught:
        await client.activations(reply.request_id)
    assert caught.value.reason == "OVERFLOW"
    assert caught.value.capture_id == reply.request_id
    assert caught.value.missing[0].layers == (1, 2)
    assert caught.value.manifest.state == "incomplete"


async def test_partial_rows_are_nan_where_missing(client, peer):
    peer.script.lost_layers = (1,)
    reply = await client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[0, 1, 2]))
    acts = await client.activations(reply.request_id, allow_partial=True)
    assert np.array_equal(acts[2], rows(0, POST, 2, range(6)).astype(np.float32))
    assert np.isnan(acts[1]).all()
    assert acts.present.all(axis=1).tolist() == [True, False, True]


async def test_an_aborted_capture_raises(client, peer, endpoint):
    peer.script.hold = threading.Event()
    with residuum.Client(endpoint) as other, other.stream("a bb", max_tokens=9, capture=residuum.Capture()) as stream:
        next(stream)
        other.abort(stream.request_id)
        peer.script.hold.set()
        with pytest.raises(residuum.RequestAborted):
            list(stream)
    manifest = await client.manifest(stream.request_id, wait=True)
    assert manifest.state == "aborted"
    assert manifest.describe_missing() == "no row of its tokens is missing"
    with pytest.raises(residuum.AbortedCapture, match="stopped") as caught:
        await client.activations(stream.request_id)
    assert isinstance(caught.value, residuum.ResiduumError)
    acts = await client.activations(stream.request_id, allow_partial=True)
    assert acts.manifest.state == "aborted"
    assert np.array_equal(acts[0], rows(0, POST, 0, acts.positions).astype(np.float32))


async def test_follow_yields_each_row_once(client, peer):
    peer.script.delay_seal = threading.Event()
    reply = await client.generate("a bb", max_tokens=40, capture=residuum.Capture(layers=[1, 4]))
    peer.script.delay_seal.set()
    pieces = await client.follow(reply.request_id, layers=[4])
    positions = np.concatenate([piece.positions for piece in pieces])
    assert sorted(positions.tolist()) == list(range(41))
    for site, layer, at, values in pieces:
        assert (site, layer, values.dtype) == ("resid_post", 4, np.float32)
        assert np.array_equal(values, rows(0, POST, 4, at).astype(np.float32))


@pytest.mark.parametrize("sequence", [None, [0, 1]])
async def test_follow_takes_one_sequence(client, sequence):
    """A piece does not say of which sequence it is."""
    reply = await client.generate("a bb", n=2, max_tokens=2, capture=residuum.Capture(layers=[0]))
    with pytest.raises(TypeError, match="sequence must be a whole number, not"):
        await client.follow(reply, sequence=sequence)
    assert len(np.concatenate([piece.positions for piece in await client.follow(reply, sequence=1)])) == 3


async def test_follow_ends_with_the_captures_outcome(client, peer):
    peer.script.lost_layers = (1,)
    reply = await client.generate("a bb", max_tokens=4, capture=residuum.Capture(layers=[0, 1]))
    with pytest.raises(residuum.IncompleteCapture):
        await client.follow(reply.request_id)
    assert len(await client.follow(reply.request_id, allow_partial=True)) >= 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"layers": [-1]}, residuum.UnknownLayer),
        ({"layers": []}, residuum.InvalidRequest),
        ({"layers": 5}, residuum.InvalidRequest),  # not captured; the store says so
        ({"sites": "resid_mid"}, residuum.UnknownSite),
        ({"sites": "resid_pre"}, residuum.InvalidRequest),
        ({"positions": "now"}, residuum.InvalidRequest),
    ],
)
async def test_reading_uncaptured_layers_is_refused(client, arguments, error):
    reply = await client.generate("a bb", max_tokens=2, capture=residuum.Capture(layers=[0]))
    with pytest.raises(error):
        await client.activations(reply.request_id, **arguments)


async def test_missing_layers_and_sites_are_named(client):
    reply = await client.generate("a bb", max_tokens=2, capture=residuum.Capture(layers=[3, 5]))
    with pytest.raises(residuum.UnknownLayer, match=r"no layer 4\. Choose among its layers: 3, 5"):
        await client.activations(reply.request_id, layers=4)
    with pytest.raises(residuum.UnknownSite, match=r"no site resid_pre\. Choose among its sites: resid_post\."):
        await client.activations(reply.request_id, sites="resid_pre")


async def test_any_object_with_a_request_id_is_accepted(client):
    reply = await client.generate("a bb", max_tokens=2, capture=residuum.Capture(layers=[0]))
    manifest = await client.manifest(reply, wait=True)
    assert manifest.capture_id == reply.request_id
    for named in (reply, manifest, reply.request_id):
        assert len((await client.activations(named))[0]) == 3
    assert len(await client.follow(reply)) >= 1
    await client.abort(reply)
    assert await client.delete(manifest) > 0
    for nameless in (None, 5, object()):
        with pytest.raises(TypeError, match="Reply"):
            await client.activations(nameless)


@pytest.mark.parametrize("positions", [5000, -20])
async def test_an_impossible_position_causes_a_warning(client, positions):
    reply = await client.generate("a bb", max_tokens=4, capture=residuum.Capture(layers=[0], positions=positions))
    with pytest.warns(residuum.EmptyCaptureWarning, match=r"0 positions.*0 to 4.*prompt has 2 tokens") as caught:
        acts = await client.activations(reply.request_id)
    assert caught[0].filename.endswith(("conftest.py", "test_activations.py"))  # the caller, not the client
    assert acts[0].shape == (0, HIDDEN)
    assert acts.manifest.is_complete


@pytest.mark.parametrize("count", [1, 3])
async def test_rows_of_impossible_positions_cause_a_warning(client, count):
    capture = residuum.Capture(layers=[0])
    ids = [(await client.generate("a bb", max_tokens=4, capture=capture)).request_id for _ in range(count)]
    which = f"The capture {ids[0]} has none" if count == 1 else "None of the 3 captures has any"
    with pytest.warns(residuum.EmptyCaptureWarning, match=f"{which} of the selected positions, so the result has 0"):
        found = await client.rows(ids, layer=0, positions=5000)
    assert (found.captures, found.values.shape) == (tuple(ids), (0, HIDDEN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        longer = await client.generate("a bb ccc", max_tokens=4, capture=capture)
        assert len(await client.rows([*ids, longer], layer=0, positions=5)) == 1


async def test_following_impossible_positions_causes_a_warning(client):
    reply = await client.generate("a bb", max_tokens=4, capture=residuum.Capture(layers=[0]))
    what = "none of the selected positions, so there is nothing to follow"
    with pytest.warns(residuum.EmptyCaptureWarning, match=what) as caught:
        assert await client.follow(reply, positions=5000) == []
    assert caught[0].filename.endswith("conftest.py")  # the caller, not the client


async def test_missing_rows_are_described(client, peer):
    peer.script.delay_seal = threading.Event()
    reply = await client.generate("a bb", max_tokens=2, capture=residuum.Capture(layers=[0]))
    assert "still open" in (await client.manifest(reply)).describe_missing()
    peer.script.delay_seal.set()
    assert (await client.manifest(reply, wait=True)).describe_missing() == "nothing is missing"


async def test_an_unknown_capture_is_reported(client):
    for call in (client.activations, client.manifest, client.delete, client.follow):
        with pytest.raises(residuum.UnknownCapture) as caught:
            await call("never-was")
        assert caught.value.capture_id == "never-was"
        assert caught.value.reason == "UNKNOWN_CAPTURE"


async def test_an_invalid_id_is_refused_by_the_client(client, peer):
    with pytest.raises(residuum.InvalidRequest, match="is not a valid request ID"):
        await client.activations("../etc")
    assert peer.calls == []


async def test_a_long_invalid_id_is_not_echoed_whole(client):
    with pytest.raises(residuum.InvalidRequest, match=r"'x{32}'… \(5000 characters\) is not a valid") as caught:
        await client.activations("x" * 5000)
    assert len(str(caught.value)) < 300


async def test_a_reply_without_a_capture_says_how_to_capture(client):
    reply = await client.generate("a bb", max_tokens=2)
    for call in (client.activations, client.manifest, client.delete, client.follow):
        with pytest.raises(
            residuum.UnknownCapture, match=f"{reply.request_id} captured nothing.*pass capture="
        ) as caught:
            await call(reply)
        assert (caught.value.capture_id, caught.value.reason) == (reply.request_id, "UNKNOWN_CAPTURE")


async def test_manifest_describes_the_capture(client):
    joy = residuum.Vector.from_array(np.ones(HIDDEN))
    reply = await client.generate(
        "a bb", max_tokens=3, capture=residuum.Capture(layers=[1]), steer=residuum.Add(joy, layer=1)
    )
    manifest = await client.manifest(reply.request_id, wait=5.0)
    assert (manifest.state, manifest.model, manifest.dtype) == ("complete", "peer", "bfloat16")
    assert (manifest.layers, manifest.sites, manifest.hidden_size) == ((1,), ("resid_post",), HIDDEN)
    assert manifest.prompt_token_ids == (1, 2)
    assert manifest.sequences[0].generated_token_ids == (3, 4, 5)
    assert manifest.steered
    assert not manifest.before_steering
    assert manifest.open_time.tzinfo is not None
    assert residuum.Manifest.from_json(manifest.to_json()) == manifest


async def test_rows_before_steering_are_marked(client):
    capture = residuum.Capture(layers=[1], before_steering=True)
    reply = await client.generate("a bb", max_tokens=3, capture=capture)
    acts = await client.activations(reply)
    assert acts.manifest.before_steering
    assert residuum.Manifest.from_json(acts.manifest.to_json()).before_steering
    assert "before steering" in repr(acts)
    assert "before_steering=True" in repr(acts.manifest)


async def test_list_and_delete(client):
    ids = [f"stored-{i}-{uuid.uuid4().hex}" for i in range(3)]
    for name in ids:
        await client.generate("a", max_tokens=2, capture=residuum.Capture(layers=[0]), request_id=name)
        await client.manifest(name, wait=True)
    found = await client.captures(prefix="stored-", states=["complete"])
    assert {summary.capture_id for summary in found} >= set(ids)
    assert all(summary.num_rows == 2 for summary in found)
    assert await client.delete(ids[0]) > 0
    assert ids[0] not in {summary.capture_id for summary in await client.captures()}
    with pytest.raises(residuum.InvalidRequest, match="not a state"):
        await client.captures(states="done")


async def test_stats(client, store):
    await client.generate("a", max_tokens=2, capture=residuum.Capture(layers=[0]))
    stats = (await client.stats())[0]
    assert stats.endpoint == store.endpoint
    assert stats.num_chunks >= 1
