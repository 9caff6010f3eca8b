"""Prompts and their replies, with both clients."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from peer import LAYERS

import residuum
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2


async def test_reply(client):
    reply = await client.generate("a bb ccc", max_tokens=3)
    assert reply.text == " 4 5 6"
    assert str(reply) == reply.text
    assert reply.token_ids == (4, 5, 6)
    assert reply.prompt_token_ids == (1, 2, 3)
    assert reply.finish_reason == "length"
    assert reply.usage == residuum.Usage(prompt_tokens=3, generated_tokens=3)
    assert not reply.captured
    assert reply.request_id


async def test_several_sequences(client):
    reply = await client.generate("a", max_tokens=2, n=3)
    assert [sequence.token_ids for sequence in reply.sequences] == [(2, 3), (102, 103), (202, 203)]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("a bb", (1, 2)),
        ([7, 9], (7, 9)),
        (np.array([7, 9]), (7, 9)),
        ([{"role": "system", "content": "four"}, {"role": "user", "content": "fives"}], (4, 5)),
    ],
)
async def test_prompt_forms(client, prompt, tokens):
    assert (await client.generate(prompt, max_tokens=1)).prompt_token_ids == tokens


@pytest.mark.parametrize("prompt", ["", []])
async def test_an_empty_prompt_is_refused(client, prompt, peer):
    with pytest.raises(residuum.EmptyPrompt):
        await client.generate(prompt)
    assert peer.calls == []


@pytest.mark.parametrize("prompt", [["a", "b"], [1, "b"], [True], [1.5], [[1]], None, 5, b"a", {"role": "user"}])
async def test_a_prompt_of_the_wrong_type_is_refused(client, prompt):
    with pytest.raises(TypeError, match="A prompt is"):
        await client.generate(prompt)


@pytest.mark.parametrize("prompt", [[-1], [1 << 32], [{"role": "user"}], [{"role": "user", "content": 3}]])
async def test_a_prompt_with_an_invalid_part_is_refused(client, prompt):
    with pytest.raises(residuum.InvalidRequest):
        await client.generate(prompt)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"n": 0},
        {"n": 65},
        {"stop": ""},
        {"stop": ["x"] * 17},
        {"min_tokens": 5, "max_tokens": 4},
        {"min_tokens": 17},
    ],
)
async def test_sampling_out_of_range_is_refused(client, sampling, peer):
    with pytest.raises(residuum.InvalidRequest) as caught:
        await client.generate("a", **sampling)
    assert caught.value.metadata["field"] in sampling
    assert peer.calls == []


@pytest.mark.parametrize("sampling", [{"max_token": 3}, {"max_tokens": 1.5}, {"max_tokens": True}, {"top_p": "1"}])
async def test_sampling_of_the_wrong_type_is_refused(client, sampling):
    with pytest.raises(TypeError):
        await client.generate("a", **sampling)


async def test_sampling_is_sent_as_given(client, peer):
    sampling = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": "x", "min_tokens": 2}
    await client.generate("a", ignore_eos=True, n=2, **sampling)
    sent = peer.requests[-1].sampling
    assert (sent.max_tokens, sent.top_k, sent.seed, list(sent.stop), sent.min_tokens) == (4, 5, 7, ["x"], 2)
    assert (sent.ignore_eos, sent.num_sequences, sent.temperature) == (True, 2, 0.5)


async def test_unset_sampling_stays_unset(client, peer):
    await client.generate("a")
    assert not peer.requests[-1].HasField("sampling")


async def test_an_unknown_layer_is_refused(client):
    with pytest.raises(residuum.UnknownLayer) as caught:
        await client.generate("a", capture=residuum.Capture(layers=[LAYERS]))
    assert caught.value.metadata == {"layer": str(LAYERS), "layers": str(LAYERS)}


async def test_errors_use_the_short_names_of_sites(client, peer):
    message = "The site SITE_MLP_OUT is not armed on this server; armed: SITE_RESID_POST."
    peer.script.failures = [Failure(Reason.ERROR_REASON_UNKNOWN_SITE, message, site="SITE_MLP_OUT")]
    with pytest.raises(
        residuum.UnknownSite, match=r"^The site mlp_out is not armed on this server; armed: resid_post\.$"
    ):
        await client.generate("a", capture=residuum.Capture(sites="mlp_out"))


async def test_a_request_for_another_model_is_refused(client):
    with pytest.raises(residuum.UnknownModel):
        await client.generate("a", model="gpt-17")
    with pytest.raises(residuum.UnknownModel):
        await client.register(model="gpt-17")


async def test_a_used_request_id_is_refused(client):
    name = f"used-{uuid.uuid4().hex}"
    await client.generate("a", max_tokens=1, request_id=name)
    with pytest.raises(residuum.RequestExists):
        await client.generate("a", max_tokens=1, request_id=name)


async def test_a_long_prompt_is_refused(client):
    with pytest.raises(residuum.PromptTooLong):
        await client.generate([1] * 5000)


async def test_a_message_over_the_limit_is_refused(client, peer):
    with pytest.raises(residuum.PromptTooLong, match=r"52428\d\d bytes.* at most 4128768") as caught:
        await client.generate("a" * (5 << 20))
    assert caught.value.metadata["limit"] == "4128768"
    assert peer.calls == []


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "x" * 129, "ü"])
async def test_invalid_request_ids_are_refused(client, name):
    if name:
        with pytest.raises(residuum.InvalidRequest, match="cannot name a request"):
            await client.generate("a", request_id=name)
    with pytest.raises(residuum.InvalidRequest):
        await client.abort(name)


async def test_errors_hide_the_transport(client, peer):
    peer.script.failures = [Failure(Reason.ERROR_REASON_ENGINE_DEAD, "The engine has died.")]
    with pytest.raises(residuum.EngineDead) as caught:
        await client.generate("a")
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


async def test_an_internal_error_of_the_server_is_reported(client, peer):
    peer.script.failures = [RuntimeError("secret")]
    with pytest.raises(residuum.ServerFault, match="incident") as caught:
        await client.generate("a")
    assert "secret" not in str(caught.value)
    assert caught.value.metadata["incident"]


@pytest.mark.parametrize("flaw", ["bad_order", "truncate"])
async def test_a_server_that_breaks_the_contract_is_reported(client, peer, flaw):
    setattr(peer.script, flaw, True)
    with pytest.raises(residuum.ServerFault):
        await client.generate("a", max_tokens=2)


@pytest.mark.parametrize("skipped", [False, True])
async def test_a_reply_says_whether_it_was_skipped(client, peer, skipped):
    peer.script.skipped = skipped
    reply = await client.generate("a", capture=residuum.Capture(), request_id=uuid.uuid4().hex, if_exists="skip")
    assert reply.skipped == skipped
    assert peer.requests[-1].spec.if_exists == capture_pb2.IF_EXISTS_SKIP


async def test_a_registration_says_what_to_do_with_a_capture_that_exists(client, peer):
    await client.register(capture=residuum.Capture(), request_id="mine", if_exists="replace")
    assert peer.requests[-1].spec.if_exists == capture_pb2.IF_EXISTS_REPLACE


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"if_exists": "overwrite"}, "'overwrite'; choose among fail, replace, skip"),
        ({"if_exists": "skip", "request_id": "mine"}, "give request_id= and capture= too"),
        ({"if_exists": "skip", "capture": residuum.Capture()}, "give request_id= and capture= too"),
    ],
)
async def test_if_exists_without_its_capture_is_refused(client, peer, given, told):
    for call in (client.generate, lambda _prompt, **given: client.register(**given)):
        with pytest.raises(residuum.InvalidRequest, match=told) as caught:
            await call("a", **given)
        assert caught.value.metadata == {"field": "if_exists"}
    assert not peer.requests
