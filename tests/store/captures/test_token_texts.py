"""The texts of tokens and the positions of messages arrive with the seal and are kept in the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_MESSAGE_SPANS
from tests.store.support import ABORTED, COMPLETE, OPEN, Client, describe, failing_with, make_chunk, serving

INVALID = Reason.ERROR_REASON_INVALID_FIELD


def texts(*parts: str) -> capture_pb2.TokenTexts:
    return capture_pb2.TokenTexts(text="".join(parts), lengths=map(len, parts))


def seal(outcome: int = COMPLETE, **changes: object) -> store_pb2.SealCaptureRequest:
    """Return a seal of a prompt of three tokens and a reply of two."""
    span = capture_pb2.MessageSpan(role="user", first_position=1, num_positions=2)
    reply = changes.pop("reply", texts("", "日"))
    sequence = capture_pb2.SequenceOutcome(generated_token_ids=[7, 8], finish_reason="stop", token_texts=reply)
    fields = {
        "prompt_token_texts": texts("<s>", " Hi", "!"),
        "message_spans": capture_pb2.MessageSpans(spans=[span]),
        **changes,
    }
    return store_pb2.SealCaptureRequest(capture_id="a", sequences=[sequence], outcome=outcome, **fields)


def check(manifest: capture_pb2.CaptureManifest) -> None:
    sent = seal()
    assert manifest.prompt_token_texts == sent.prompt_token_texts
    assert manifest.message_spans == sent.message_spans
    assert list(manifest.sequences) == list(sent.sequences)


@pytest.mark.parametrize("rows", ["all there", "some missing"])
def test_they_outlive_a_restart(tmp_path: Path, rows: str) -> None:
    with serving(tmp_path / "store") as (_, client):
        client.open(describe(layers=[0], prompt=3))
        assert not client.get().HasField("prompt_token_texts"), "they are known when the capture is sealed"
        if rows == "all there":
            client.append([make_chunk([0], range(4))])
        state = client.stub.SealCapture(seal()).manifest.state
        assert state == (COMPLETE if rows == "all there" else OPEN)
        check(client.get())
    with serving(tmp_path / "store") as (_, client):
        check(client.get())
        check(client.stub.SealCapture(seal()).manifest)  # a repeated seal succeeds
        client.append([make_chunk([0], range(4))])
        check(client.read()[1])


def test_a_capture_that_was_aborted_has_what_is_known(client: Client) -> None:
    client.open(describe(layers=[0], prompt=3))
    client.append([make_chunk([0], range(4))])
    client.stub.SealCapture(seal(ABORTED))
    assert client.get(wait=30).state == ABORTED
    check(client.get())


def test_a_seal_of_an_older_service_has_none(client: Client) -> None:
    client.open()
    client.seal()
    manifest = client.get()
    assert not manifest.HasField("prompt_token_texts")
    assert not manifest.HasField("message_spans")
    assert not manifest.sequences[0].HasField("token_texts")


def test_why_they_are_not_known_is_kept(client: Client) -> None:
    client.open(describe(prompt=3))
    unknown = capture_pb2.TokenTexts(unknown_detail="no tokenizer")
    spans = capture_pb2.MessageSpans(unknown_detail="no conversation")
    manifest = client.stub.SealCapture(seal(prompt_token_texts=unknown, reply=unknown, message_spans=spans)).manifest
    assert manifest.prompt_token_texts == manifest.sequences[0].token_texts == unknown
    assert manifest.message_spans == spans


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_token_texts": texts("<s>", "Hi")}, "prompt_token_texts"),
        ({"prompt_token_texts": capture_pb2.TokenTexts(text="<s>Hi!", lengths=[3, 2, 2])}, "prompt_token_texts"),
        ({"prompt_token_texts": capture_pb2.TokenTexts(text="x")}, "prompt_token_texts"),
        ({"reply": texts("a", "b", "c")}, "sequences.token_texts"),
        (
            {
                "message_spans": capture_pb2.MessageSpans(
                    spans=[capture_pb2.MessageSpan(role="user", first_position=2, num_positions=2)]
                )
            },
            "message_spans",
        ),
        (
            {"message_spans": capture_pb2.MessageSpans(spans=[capture_pb2.MessageSpan()] * (MAX_MESSAGE_SPANS + 1))},
            "message_spans",
        ),
    ],
    ids=["too few", "other lengths", "no lengths", "too many", "a message beyond the prompt", "too many messages"],
)
def test_texts_that_do_not_fit_the_tokens_are_refused(client: Client, changes: dict[str, object], field: str) -> None:
    client.open(describe(prompt=3))
    with failing_with(INVALID) as caught:
        client.stub.SealCapture(seal(**changes))
    assert caught[0].metadata == {"field": field}
    assert client.get().state == OPEN
