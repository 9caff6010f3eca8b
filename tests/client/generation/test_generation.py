"""Prompts and their replies, with both clients."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

import residuum
from residuum.protocol.generation.events import ReplyBuilder
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2
from tests.client.support.peer import LAYERS


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
    with pytest.raises(TypeError, match="A prompt must be"):
        await client.generate(prompt)


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 70, np.int64(-4)])
async def test_a_number_that_is_no_token_id_is_refused_by_name(client, wrong):
    with pytest.raises(residuum.InvalidRequest, match=rf"^{wrong} is not a token ID\. Token IDs are 0 to 4294967295"):
        await client.generate([5, wrong, 6])


@pytest.mark.parametrize("prompt", [[{"role": "user"}], [{"role": "user", "content": 3}]])
async def test_a_message_with_an_invalid_part_is_refused(client, prompt):
    with pytest.raises(residuum.InvalidRequest):
        await client.generate(prompt)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": -3},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"top_k": 1 << 31},
        {"seed": 1 << 63},
        {"n": 0},
        {"n": 65},
        {"stop": ""},
        {"stop": ["x"] * 17},
        {"min_tokens": 5, "max_tokens": 4},
        {"min_tokens": 17},
        {"min_tokens": 1, "max_tokens": 0},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": list(range(65))},
        {"min_p": 1.5},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"bad_words": [""]},
        {"bad_words": ["x"] * 129},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": {"enum": ["x" * 65536]}},
        {"regex": ""},
        {"regex": "a", "json_schema": {}},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
    ],
)
async def test_sampling_out_of_range_is_refused(client, sampling, peer):
    with pytest.raises(residuum.InvalidRequest) as caught:
        await client.generate("a", **sampling)
    assert caught.value.metadata["field"] in sampling
    assert peer.calls == []


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_token": 3},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"top_p": "1"},
        {"stop_token_ids": [1.5]},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1.0}},
        {"json_schema": 5},
        {"regex": 5},
        {"logprobs": True},
    ],
)
async def test_sampling_of_the_wrong_type_is_refused(client, sampling):
    with pytest.raises(TypeError):
        await client.generate("a", **sampling)


async def test_sampling_is_sent_as_given(client, peer):
    sampling = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": "x", "min_tokens": 2}
    await client.generate("a", ignore_eos=True, n=2, **sampling)
    sent = peer.requests[-1].sampling
    assert (sent.max_tokens, sent.top_k, sent.seed, list(sent.stop), sent.min_tokens) == (4, 5, 7, ["x"], 2)
    assert (sent.ignore_eos, sent.num_sequences, sent.temperature) == (True, 2, 0.5)


async def test_every_sampling_parameter_is_sent(client, peer):
    await client.generate(
        "a", max_tokens=1, stop_token_ids=(7, np.int64(8)), min_p=0.25, presence_penalty=-1.5, frequency_penalty=0.5,
        repetition_penalty=1.25, logit_bias={3: -2, np.int64(4): 0.5}, bad_words="no", json_schema={"type": "object"},
        logprobs=0, prompt_logprobs=2,
    )  # fmt: skip
    assert peer.requests[-1].sampling == inference_pb2.SamplingParameters(
        max_tokens=1, stop_token_ids=[7, 8], min_p=0.25, presence_penalty=-1.5, frequency_penalty=0.5,
        repetition_penalty=1.25, bad_words=["no"], json_schema='{"type": "object"}',
        logit_bias=[inference_pb2.LogitBias(token_id=3, bias=-2.0), inference_pb2.LogitBias(token_id=4, bias=0.5)],
        logprobs=0, prompt_logprobs=2,
    )  # fmt: skip
    await client.generate("a", max_tokens=1, regex="[ab]+")
    assert peer.requests[-1].sampling.regex == "[ab]+"
    await client.generate("a", max_tokens=1, json_schema=' {"type": "object"}')
    assert peer.requests[-1].sampling.json_schema == ' {"type": "object"}'


async def test_log_probabilities_are_arrays(client):
    reply = await client.generate("a bb ccc", max_tokens=2, n=2, logprobs=3, prompt_logprobs=1)
    for sequence in reply.sequences:
        found = sequence.logprobs
        assert (found.tokens.dtype, found.top_ids.dtype, found.top.dtype) == (np.float32, np.int64, np.float32)
        np.testing.assert_array_equal(found.tokens, -np.array(sequence.token_ids) / 8)
        np.testing.assert_array_equal(found.top_ids, np.add.outer(sequence.token_ids, range(3)))
        np.testing.assert_array_equal(found.top, -found.top_ids / 8)
    assert reply.logprobs is reply.sequences[0].logprobs
    np.testing.assert_array_equal(reply.prompt_logprobs.tokens, [np.nan, -2 / 8, -3 / 8])
    np.testing.assert_array_equal(reply.prompt_logprobs.top_ids, [[-1], [2], [3]])
    np.testing.assert_array_equal(reply.prompt_logprobs.top, [[np.nan], [-2 / 8], [-3 / 8]])


def test_log_probabilities_come_with_their_tokens(endpoint, peer):
    with (
        residuum.Client(endpoint) as client,
        client.stream("a", max_tokens=2, logprobs=0, prompt_logprobs=2) as stream,
    ):
        deltas = list(stream)
    assert [delta.token_ids for delta in deltas] == [(2,), (3,)]
    assert [delta.logprobs.tokens.tolist() for delta in deltas] == [[-2 / 8], [-3 / 8]]
    assert deltas[0].logprobs.top.shape == (1, 0)
    assert stream.reply.prompt_logprobs.top.shape == (1, 2), "nothing predicts the only token"


async def test_log_probabilities_are_none_by_default(client):
    reply = await client.generate("a", max_tokens=2)
    assert (reply.logprobs, reply.prompt_logprobs, reply.sequences[0].logprobs) == (None, None, None)


async def test_log_probabilities_that_contradict_themselves_are_reported():
    delta = inference_pb2.TokenDelta(token_ids=[1])
    delta.logprobs.CopyFrom(inference_pb2.Logprobs(tokens=[-1.0], num_top=2, top_token_ids=[1], top=[-1.0]))
    builder = ReplyBuilder()
    builder.add(inference_pb2.GenerateResponse(started=inference_pb2.GenerationStarted(request_id="r")))
    with pytest.raises(residuum.ServerFault, match="inconsistent log-probabilities"):
        builder.add(inference_pb2.GenerateResponse(delta=delta))


async def test_without_tokens_only_the_prompt_is_captured(client, peer):
    reply = await client.generate("a bb ccc", max_tokens=0, capture=residuum.Capture())
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("", (), "length")
    assert peer.requests[-1].sampling.HasField("max_tokens")
    acts = await client.activations(reply)
    assert acts.positions.tolist() == [0, 1, 2]


async def test_unset_sampling_stays_unset(client, peer):
    await client.generate("a")
    assert not peer.requests[-1].HasField("sampling")


async def test_an_unknown_layer_is_refused(client):
    with pytest.raises(residuum.UnknownLayer) as caught:
        await client.generate("a", capture=residuum.Capture(layers=[LAYERS]))
    assert caught.value.metadata == {"layer": str(LAYERS), "layers": str(LAYERS)}


async def test_errors_use_the_short_names_of_sites(client, peer):
    message = "The site SITE_MLP_OUT is not enabled on this server; enabled: SITE_RESID_POST."
    peer.script.failures = [Failure(Reason.ERROR_REASON_UNKNOWN_SITE, message, site="SITE_MLP_OUT")]
    with pytest.raises(
        residuum.UnknownSite, match=r"^The site mlp_out is not enabled on this server; enabled: resid_post\.$"
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
    with pytest.raises(residuum.InvalidRequest, match="is not a valid request ID"):
        await client.generate("a", request_id=name)
    with pytest.raises(residuum.InvalidRequest, match="is not a valid request ID"):
        await client.register(request_id=name)
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
        ({"if_exists": "overwrite"}, "if_exists='overwrite' does not exist. Choose among fail, replace, skip"),
        ({"if_exists": "skip", "request_id": "mine"}, "needs request_id= and capture=. Give both"),
        ({"if_exists": "skip", "capture": residuum.Capture()}, "needs request_id= and capture=. Give both"),
    ],
)
async def test_if_exists_without_its_capture_is_refused(client, peer, given, told):
    for call in (client.generate, lambda _prompt, **given: client.register(**given)):
        with pytest.raises(residuum.InvalidRequest, match=told) as caught:
            await call("a", **given)
        assert caught.value.metadata == {"field": "if_exists"}
    assert not peer.requests
