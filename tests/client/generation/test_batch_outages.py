"""`generate_many` while the inference service or its store does not answer."""

from __future__ import annotations

import re
import threading
import time
import uuid

import grpc
import pytest

import residuum
from residuum.rpc.errors import Failure, Reason
from tests.client.support.peer import RunningPeer
from tests.waiting import wait_for

AWAY = Failure(Reason.ERROR_REASON_STORE_UNREACHABLE, "The store does not answer.")
STOPPING = Failure(Reason.ERROR_REASON_NOT_SERVING, "The service is stopping.")


def generations(peer):
    return peer.calls.count("Generate")


async def test_a_batch_waits_for_a_store_that_is_away(client, peer):
    """The first three calls fail. During the outage one prompt at a time is tried, so few calls are wasted."""
    peer.script.failures = [AWAY] * 3
    with pytest.warns(residuum.OutageWarning, match=r"waits up to 300 s .*The store does not answer") as warned:
        replies = await client.generate_many(["a"] * 40, max_tokens=1, max_concurrency=2)
    assert len(warned) == 1
    assert [reply.text for reply in replies] == [" 2"] * 40
    assert generations(peer) == 43


async def test_replies_come_as_they_complete_after_an_outage(client, peer):
    peer.script.failures = [AWAY] * 3
    with pytest.warns(residuum.OutageWarning):
        replies = await client.generate_as_completed(["a", "bb", "ccc"], max_tokens=1)
    assert sorted(index for index, _ in replies) == [0, 1, 2]


async def test_the_warning_is_where_the_user_starts_the_batch(endpoint, peer):
    """Not in the threads and tasks that generate."""
    with residuum.Client(endpoint) as client:
        for call in (client.generate_many, client.generate_as_completed):
            peer.script.failures = [AWAY]
            with pytest.warns(residuum.OutageWarning) as warned:
                list(call(["a", "bb"], max_tokens=1))
            assert [item.filename for item in warned] == [__file__]
    async with residuum.AsyncClient(endpoint) as client:
        peer.script.failures = [AWAY]
        with pytest.warns(residuum.OutageWarning) as warned:
            await client.generate_many(["a", "bb"], max_tokens=1)
        assert [item.filename for item in warned] == [__file__]


async def test_no_prompt_starts_during_an_outage(client, peer):
    peer.script.failures = [AWAY] * 4
    began = time.monotonic()
    with pytest.warns(residuum.OutageWarning):
        await client.generate_many(["a"] * 200, max_tokens=1, max_concurrency=1)
    assert time.monotonic() - began > 0.1 + 0.2 + 0.4 + 0.8
    assert generations(peer) == 204


async def test_a_batch_waits_for_a_service_that_restarts(make, store):
    first = RunningPeer(store.endpoint)
    client = make(first.endpoint, timeout=10)
    await client.info()
    first.stop()
    warned, started = pytest.warns(residuum.OutageWarning, match="does not answer now"), []

    def restart():
        wait_for(lambda: len(warned), "the batch notices that the service is away")
        started.append(RunningPeer(store.endpoint, int(first.endpoint.rpartition(":")[2])))

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        with warned:
            replies = await client.generate_many(["a"] * 8, max_tokens=1)
        assert [reply.text for reply in replies] == [" 2"] * 8
    finally:
        thread.join()
        for again in started:
            again.stop()


@pytest.mark.parametrize("timeout", [10, None])
async def test_a_batch_gives_up_after_its_timeout(make, endpoint, peer, clock, timeout):
    """Without a timeout, the client's own counts for a service that it has never reached."""
    clock.speed = 10  # the retries take 1 s, or 30 s if they wait too long; and each call may take 10 s
    client = make(endpoint if timeout else "127.0.0.1:1", timeout=10)
    peer.script.failures = [AWAY] * 100
    began = time.monotonic()
    with (
        pytest.warns(residuum.OutageWarning, match="waits up to 10 s"),
        pytest.raises(residuum.BatchFailed, match=r"50 of 50 .*tried again for [\d.]+ s") as caught,
    ):
        await client.generate_many(["a"] * 50, max_tokens=1, timeout=timeout)
    took = clock.speed * (time.monotonic() - began)
    assert took < 250, "it did not wait as long as without a timeout, 300 s"
    tried = float(re.search(r"tried again for ([\d.]+) s", str(caught.value))[1])
    assert 10 <= tried <= took + 0.05, "the message is rounded"
    assert all(isinstance(error, residuum.Unavailable) for error in caught.value.errors.values())


def break_once(peer, monkeypatch):
    """Let the first generation break off after its first token."""
    deltas, broken = peer._deltas, []

    def broken_once(*arguments):
        for delta in deltas(*arguments):
            yield delta
            if not broken:
                broken.append(True)
                raise STOPPING

    monkeypatch.setattr(peer, "_deltas", broken_once)


@pytest.mark.parametrize("choice", ["skip", "replace"])
async def test_a_broken_reply_is_generated_again_if_its_capture_may_be_replaced(client, peer, monkeypatch, choice):
    break_once(peer, monkeypatch)
    names = [uuid.uuid4().hex for _ in range(3)]
    with pytest.warns(residuum.OutageWarning, match="is stopping"):
        replies = await client.generate_many(
            ["a"] * 3, capture=residuum.Capture(layers=[1]), request_ids=names, if_exists=choice, max_tokens=3
        )
    assert [len(reply.token_ids) for reply in replies] == [3] * 3
    assert generations(peer) == 4
    for name in names:
        assert (await client.manifest(name, wait=10)).state == "complete"


async def test_a_broken_reply_is_not_generated_twice(client, peer, monkeypatch):
    break_once(peer, monkeypatch)
    with pytest.raises(residuum.BatchFailed, match="1 of 3 prompts failed") as caught:
        await client.generate_many(["a"] * 3, capture=residuum.Capture(layers=[1]), max_tokens=3)
    assert generations(peer) == 3
    assert "if_exists" not in str(caught.value)


async def test_an_id_that_still_counts_as_running_is_tried_again_after_a_break(client, peer, monkeypatch):
    """The store keeps the capture open until the lease of the service that went away runs out."""
    break_once(peer, monkeypatch)
    name, claim, refused = uuid.uuid4().hex, peer._claim, []

    def refuse_once(request):
        if peer.used and not refused:
            refused.append(True)
            raise Failure(Reason.ERROR_REASON_CAPTURE_EXISTS, "Its request is still running.", capture_id=name)
        return claim(request)

    monkeypatch.setattr(peer, "_claim", refuse_once)
    with pytest.warns(residuum.OutageWarning):
        (reply,) = await client.generate_many(
            ["a"], capture=residuum.Capture(layers=[1]), request_ids=[name], if_exists="skip", max_tokens=3
        )
    assert refused
    assert len(reply.token_ids) == 3


async def test_an_id_that_still_counts_as_running_is_tried_again_if_no_answer_came(client, peer, monkeypatch):
    """The service opened the capture, and was killed before it could answer."""
    name, claim, claims = uuid.uuid4().hex, peer._claim, []

    def claim_late(request):
        claims.append(request)
        if len(claims) == 1:
            raise ConnectionError
        if len(claims) == 2:
            raise Failure(Reason.ERROR_REASON_CAPTURE_EXISTS, "Its request is still running.", capture_id=name)
        return claim(request)

    def start(request, context):
        try:
            yield from generate(request, context)
        except ConnectionError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    generate = peer._generate
    monkeypatch.setattr(peer, "_claim", claim_late)
    monkeypatch.setattr(peer, "_generate", start)
    with pytest.warns(residuum.OutageWarning):
        (reply,) = await client.generate_many(
            ["a"], capture=residuum.Capture(layers=[1]), request_ids=[name], if_exists="skip", max_tokens=3
        )
    assert len(claims) == 3
    assert len(reply.token_ids) == 3


async def test_the_error_names_the_way_to_finish_the_rest(client):
    names = [uuid.uuid4().hex for _ in range(2)]
    with pytest.raises(residuum.BatchFailed, match="same call again with if_exists='skip': it repeats only"):
        await client.generate_many(["a", ""], capture=residuum.Capture(layers=[1]), request_ids=names, max_tokens=1)


def test_ctrl_c_ends_the_wait(endpoint, peer, monkeypatch):
    peer.script.failures = [AWAY] * 100

    def interrupted(futures):
        wait_for(lambda: len(warned), "the batch waits for the end of the outage")
        raise KeyboardInterrupt

    monkeypatch.setattr("residuum._sync.batches.as_completed", interrupted)
    names = [uuid.uuid4().hex for _ in range(50)]
    began = time.monotonic()
    with (
        residuum.Client(endpoint) as client,
        pytest.warns(residuum.OutageWarning) as warned,
        pytest.raises(residuum.BatchInterrupted, match="if_exists='skip'"),
    ):
        client.generate_many(["a"] * 50, capture=residuum.Capture(layers=[1]), request_ids=names)
    assert time.monotonic() - began < 60, "it did not wait for the end of the outage, up to 300 s"


def test_the_command_line_prints_an_outage_once_and_continues(cli, peer, tmp_path):
    peer.script.failures = [AWAY] * 2
    path = tmp_path / "prompts.txt"
    path.write_text("a\nbb\n")
    code, out, err = cli("generate", "--file", path, "--max-tokens", 1)
    assert code == 0
    assert out.splitlines() == ["[1] 2", "[2] 3"]
    assert err.count("residuum: The batch waits up to 300 s") == 1
