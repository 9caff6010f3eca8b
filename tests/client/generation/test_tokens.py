"""The texts of tokens and the positions of messages, as a client offers them."""

from __future__ import annotations

import re

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import residuum
from residuum.protocol.generation.events import ReplyBuilder
from residuum.v1 import capture_pb2, inference_pb2
from residuum.values.captures.tokens import offsets_of, split_texts
from tests.client.captures.test_manifest_json import SCHEMA
from tests.client.support.captured import activations, token_texts

WIDTH = 5
TEXTS = ("<s>", "user:", " Hello", " ", "", "😀", "<e>", "bot:", " So", " what", "?", "<e>")
PROMPT = 8
SPANS = (("user", 2, 4),)
ROWS = len(TEXTS) - 1
VALUES = np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


def chat(**changes):
    fields = {"prompt": PROMPT, "generated": len(TEXTS) - PROMPT, "texts": TEXTS, "spans": SPANS, "dtype": np.float32}
    return activations(VALUES, **{**fields, **changes})


def test_the_last_generated_token_is_in_the_span_of_the_reply_but_has_no_row():
    acts = chat()
    reply = acts.spans[-1]
    assert (reply.first, reply.last) == (PROMPT, len(TEXTS) - 1)
    assert len(acts.select(span=reply).positions) == len(reply) - 1


@given(st.lists(st.text(max_size=4)))
def test_texts_and_offsets_are_those_that_were_sent(texts):
    again = split_texts(capture_pb2.TokenTexts.FromString(token_texts(texts).SerializeToString()))
    assert again == tuple(texts)
    whole = "".join(texts)
    assert [whole[start:end] for start, end in offsets_of(texts)] == texts
    assert offsets_of(texts).shape == (len(texts), 2)
    assert offsets_of(texts).dtype == np.int64


def test_rows_have_the_texts_of_their_tokens():
    acts = chat()
    assert acts.tokens == TEXTS[:-1]
    assert acts.text == "".join(TEXTS)
    assert tuple(acts.text[start:end] for start, end in acts.offsets) == acts.tokens
    part = acts.select(span="reply")
    assert part.tokens == (" So", " what", "?")
    assert [part.text[start:end] for start, end in part.offsets] == [" So", " what", "?"]
    assert part.token_ids.tolist() == acts.token_ids[PROMPT:].tolist()


def test_the_reply_is_the_last_message():
    assert chat().spans == (
        residuum.MessageSpan("user", 2, 5),
        residuum.MessageSpan("assistant", PROMPT, len(TEXTS) - 1),
    )


def test_a_reply_that_continues_a_message_is_one_span_with_it():
    acts = chat(spans=(*SPANS, ("assistant", 7, 1)))
    assert acts.spans == (residuum.MessageSpan("user", 2, 5), residuum.MessageSpan("assistant", 7, len(TEXTS) - 1))
    assert len(acts.spans[1]) == len(TEXTS) - 7
    assert acts.select(span="assistant").positions.tolist() == list(range(7, ROWS))
    assert acts.select(span="reply").positions.tolist() == list(range(PROMPT, ROWS))


@pytest.mark.parametrize(
    ("span", "positions"),
    [
        ("prompt", range(PROMPT)),
        ("reply", range(PROMPT, ROWS)),
        ("user", range(2, 6)),
        ("assistant", range(PROMPT, ROWS)),
        (0, range(2, 6)),
        (-1, range(PROMPT, ROWS)),
        (np.int64(1), range(PROMPT, ROWS)),
        (residuum.MessageSpan("any", 3, 4), (3, 4)),
    ],
)
def test_a_span_has_the_rows_of_its_positions(span, positions):
    acts, expected = chat(sites=("resid_post", "resid_pre")), list(positions)
    part = acts.select(span=span)
    assert part.positions.tolist() == expected
    for layer in part:
        assert np.array_equal(part[layer], VALUES[layer, expected])
        assert np.array_equal(part.raw(layer), VALUES[layer, expected])
        assert np.array_equal(part.encoded(layer)["x"], VALUES[layer, expected])
        assert np.allclose(acts.mean(layer, span=span), VALUES[layer, expected].mean(0), atol=1e-6)
    assert np.array_equal(part.stack(), VALUES[:, expected])
    assert np.array_equal(part.select(site="resid_pre")[1], 2 * VALUES[1, expected])
    assert part.present.shape == (2, len(expected))


def test_two_messages_of_a_role_are_one_selection():
    acts = chat(spans=(("user", 1, 2), ("assistant", 4, 1), ("user", 6, 1)))
    part = acts.select(span="user")
    assert part.positions.tolist() == [1, 2, 6]
    assert part.tokens == ("user:", " Hello", "<e>")
    assert np.array_equal(part[1], VALUES[1, [1, 2, 6]])
    assert acts.select(span="assistant").positions.tolist() == [4, *range(PROMPT, ROWS)]
    assert np.allclose(part.mean(0), VALUES[0, [1, 2, 6]].mean(0), atol=1e-6)


def test_a_mean_is_summed_in_float64():
    rows = np.full((1, 4096, 1), 0.1, dtype=ml_dtypes.bfloat16)
    rows[0, 0] = 8192
    acts = activations(rows, generated=0)
    assert acts.mean(0).dtype == np.float32
    assert acts.mean(0) == np.float32(rows[0].astype(np.float64).mean())


def test_a_mean_leaves_out_rows_that_a_partial_capture_lacks():
    present = np.ones((2, ROWS), dtype=np.bool_)
    present[1, PROMPT + 1] = False
    acts = chat(state="incomplete", present=present)
    assert np.allclose(acts.mean(1, span="assistant"), VALUES[1, [PROMPT, PROMPT + 2]].mean(0), atol=1e-6)
    assert np.allclose(acts.mean(0, span="assistant"), VALUES[0, PROMPT:].mean(0), atol=1e-6)
    present[1, PROMPT:] = False
    with pytest.raises(residuum.InvalidRequest, match="have no row of layer 1 in the span 'assistant'"):
        chat(state="incomplete", present=present).mean(1, span="assistant")


def test_a_span_without_rows_has_no_mean():
    acts = chat(spans=(("system", 2, 0), *SPANS))
    assert acts.spans[0] == residuum.MessageSpan("system", 2, 1)
    assert len(acts.spans[0]) == 0
    assert acts.select(span="system").stack().shape == (2, 0, WIDTH)
    with pytest.raises(residuum.InvalidRequest, match="no row of layer 0 in the span 'system', so there is no mean"):
        acts.mean(0, span="system")


@pytest.mark.parametrize(
    ("span", "error", "match"),
    [
        ("system", residuum.InvalidRequest, "no message of 'system': you sent none. The chat template may have added"),
        ("system", residuum.InvalidRequest, "Use 'user', 'assistant', 'prompt' or 'reply'"),
        ("tool", residuum.InvalidRequest, "no message of 'tool'. Use 'user', 'assistant', 'prompt' or 'reply'"),
        (2, residuum.InvalidRequest, "Message 2 does not exist: the conversation has the messages 0 to 1"),
        (True, TypeError, "span= takes 'prompt', 'reply', a role, an index or a MessageSpan, not True"),
        (1.5, TypeError, "not 1.5"),
    ],
)
def test_a_span_that_does_not_exist_is_refused(span, error, match):
    for use in (chat().select, lambda span: chat().mean(0, span=span)):
        with pytest.raises(error, match=re.escape(match)):
            use(span=span)


def test_layers_that_do_not_exist_have_no_mean():
    with pytest.raises(KeyError, match="layer 9"):
        chat().mean(9, span="reply")


def test_spans_of_a_prompt_that_is_no_conversation_are_an_error():
    acts = chat(spans=())
    acts.manifest.proto.message_spans.unknown_detail = "The prompt is not a conversation."
    for use in (lambda: acts.spans, lambda: acts.select(span="user"), lambda: acts.mean(0, span=0)):
        with pytest.raises(
            residuum.NoMessageSpans, match=r"req has no positions of messages: The prompt is no"
        ) as caught:
            use()
        assert caught.value.capture_id == "req"
    assert acts.select(span="reply").positions.tolist() == list(range(PROMPT, ROWS)), "any prompt has a reply"


@pytest.mark.parametrize(
    ("state", "match"),
    [("complete", "made by an older version of residuum"), ("open", "still runs. They are known when it has ended")],
)
def test_what_a_capture_does_not_know_is_an_error(state, match):
    acts = chat(texts=None, spans=None, state=state)
    for use in (lambda: acts.tokens, lambda: acts.text, lambda: acts.offsets):
        with pytest.raises(residuum.NoTokenTexts, match=match):
            use()
    with pytest.raises(residuum.NoMessageSpans, match=match):
        _ = acts.spans
    assert acts.select(span="prompt").positions.tolist() == list(range(PROMPT))


def test_the_servers_reason_is_in_the_error():
    acts = chat()
    acts.manifest.proto.sequences[0].token_texts.CopyFrom(capture_pb2.TokenTexts(unknown_detail="They are too long."))
    with pytest.raises(residuum.NoTokenTexts, match=r"no texts of its tokens: They are too long\. Its"):
        _ = acts.tokens


def test_an_unsealed_capture_says_why_it_has_no_texts():
    acts = chat(texts=None, state="incomplete")
    acts.manifest.proto.ClearField("sequences")
    unsealed = residuum.Manifest.from_proto(acts.manifest.proto)
    with pytest.raises(residuum.NoTokenTexts, match="it was never sealed"):
        unsealed.tokens()
    with pytest.raises(KeyError, match="sequence 1 does not exist"):
        unsealed.spans(1)


def test_a_reduced_capture_has_no_spans():
    acts = chat()
    acts.manifest.proto.description.spec.reduction = capture_pb2.REDUCTION_MEAN
    layers = {"resid_post": acts.layers}
    reduced = residuum.Activations(residuum.Manifest.from_proto(acts.manifest.proto), layers, acts.blocks())
    for use in (reduced.mean, lambda _: reduced.select(span="reply")):
        with pytest.raises(residuum.InvalidRequest, match="is reduced: each row is the mean of all selected positions"):
            use(0)


def test_json_has_texts_and_spans():
    manifest = chat().manifest
    document = manifest.to_dict()
    assert document["prompt_token_texts"]["text"] == "".join(TEXTS[:PROMPT])
    assert document["sequences"]["0"]["token_texts"]["lengths"] == [len(text) for text in TEXTS[PROMPT:]]
    assert document["message_spans"]["spans"] == [{"role": "user", "first_position": 2, "num_positions": 4}]
    for name in ("prompt_token_texts", "message_spans"):
        jsonschema.validate(document[name], {**SCHEMA["properties"][name], "$defs": SCHEMA["$defs"]})
    jsonschema.validate(document["sequences"]["0"], {"$ref": "#/$defs/sequence", "$defs": SCHEMA["$defs"]})
    again = residuum.Manifest.from_json(manifest.to_json())
    assert again.tokens() == TEXTS
    assert again.spans() == manifest.spans()


def test_exports_keep_the_texts(tmp_path):
    acts = chat()
    acts.to_safetensors(tmp_path / "x.safetensors")
    again = residuum.Activations.from_safetensors(tmp_path / "x.safetensors")
    assert (again.tokens, again.spans) == (acts.tokens, acts.spans)


@pytest.mark.parametrize("texts", [TEXTS, None])
def test_parquet_has_a_column_of_texts(tmp_path, texts):
    parquet = pytest.importorskip("pyarrow.parquet")
    chat(texts=texts).select(span="reply").export(tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet", filters=[("layer", "=", 1)])
    assert table["token"].to_pylist() == (list(TEXTS[PROMPT:-1]) if texts else [None] * 3)
    assert table["position"].to_pylist() == list(range(PROMPT, ROWS))


def ended(**fields):
    builder = ReplyBuilder()
    delta = inference_pb2.TokenDelta(text=" So", token_ids=[7, 8])
    finish = inference_pb2.SequenceFinish(finish_reason="stop", **fields)
    for event in (
        {"started": inference_pb2.GenerationStarted(request_id="r")},
        {"delta": delta},
        {"finished": inference_pb2.GenerationFinished(sequences=[finish])},
    ):
        builder.add(inference_pb2.GenerateResponse(**event))
    return builder.reply()


def test_a_reply_has_the_texts_of_its_tokens():
    reply = ended(token_texts=token_texts([" So", "<e>"]))
    assert reply.tokens == reply.sequences[0].tokens == (" So", "<e>")
    assert len(reply.tokens) == len(reply.token_ids)


@pytest.mark.parametrize("fields", [{}, {"token_texts": capture_pb2.TokenTexts(unknown_detail="no tokenizer")}])
def test_a_reply_without_texts_is_an_error(fields):
    with pytest.raises(residuum.NoTokenTexts, match="The token IDs are in token_ids"):
        _ = ended(**fields).tokens


def test_a_reply_with_too_few_texts_is_a_fault_of_the_server():
    with pytest.raises(residuum.ServerFault, match="1 texts for 2 tokens"):
        ended(token_texts=token_texts([" So"]))
