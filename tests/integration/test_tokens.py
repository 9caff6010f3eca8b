"""Texts of tokens and positions of messages of real requests, compared with transformers' own tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import transformers

import residuum

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

SOME = residuum.Capture(layers=[3, 29])
CHAT = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the capital of France? 😀"},
    {"role": "assistant", "content": "It is Paris."},
    {"role": "user", "content": "And of 日本?"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2)


def positions_of(tokenizer: Any, chat: list[dict[str, str]], **options: bool) -> list[tuple[str, int, int]]:
    """Return (role, first, last) of each message, from the characters of the rendered chat and its tokens' offsets."""
    text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    spans, end = [], 0
    for message in chat:
        start = text.index(message["content"], end)
        end = start + len(message["content"])
        inside = [at for at, (first, last) in enumerate(offsets) if first < end and last > start]
        spans.append((message["role"], inside[0], inside[-1]))
    return spans


def test_messages_are_where_transformers_says(client: residuum.Client, tokenizer: Any) -> None:
    reply = client.generate(CHAT, max_tokens=12, ignore_eos=True, capture=SOME)
    acts = client.activations(reply)
    prompt = len(reply.prompt_token_ids)
    expected = [*positions_of(tokenizer, CHAT, add_generation_prompt=True), ("assistant", prompt, prompt + 11)]
    assert [(span.role, span.first, span.last) for span in acts.spans] == expected
    rows = acts[29].astype(np.float64)
    assert np.allclose(acts.mean(29, span="reply"), rows[prompt:].mean(axis=0), rtol=1e-5)
    theirs = np.concatenate([rows[first : last + 1] for role, first, last in expected if role == "assistant"])
    assert np.allclose(acts.mean(29, span="assistant"), theirs.mean(axis=0), rtol=1e-5)
    assert "".join(acts.select(span="system").tokens) == CHAT[0]["content"]


def test_a_continued_message_and_its_reply_are_one_span(client: residuum.Client, tokenizer: Any) -> None:
    chat = [*CHAT[:3], CHAT[3], {"role": "assistant", "content": "The capital of Japan is"}]
    reply = client.generate(chat, max_tokens=5, ignore_eos=True, capture=SOME)
    acts = client.activations(reply)
    *_, (role, first, _) = positions_of(tokenizer, chat, continue_final_message=True)
    assert acts.spans[-1] == residuum.MessageSpan(role, first, len(reply.prompt_token_ids) + 4)
    assert len(acts.spans) == len(chat)
    assert "".join(acts.select(span=-1).tokens).startswith("The capital of Japan is")


def test_texts_are_those_of_the_tokens(client: residuum.Client, tokenizer: Any) -> None:
    reply = client.generate(CHAT, max_tokens=12, n=2, temperature=1.0, seed=3, capture=SOME)
    acts = client.activations(reply)
    for index, sequence in enumerate(reply.sequences):
        one = acts.select(sequence=index)
        token_ids = [*reply.prompt_token_ids, *sequence.token_ids]
        assert one.text == tokenizer.decode(token_ids).rstrip("\ufffd")
        assert len(sequence.tokens) == len(sequence.token_ids)
        assert one.text.endswith("".join(sequence.tokens))
        assert "".join(sequence.tokens).startswith(sequence.text)
        assert [one.text[start:end] for start, end in one.offsets] == list(one.tokens)
        assert one.tokens[:3] == ("<|im_start|>", "system", "\n")
        assert one.spans[-1].last == len(token_ids) - 1


def test_texts_show_what_ended_the_reply(client: residuum.Client) -> None:
    reply = client.generate("Count: 1, 2, 3,", max_tokens=40, stop=["7"], capture=SOME)
    assert "7" not in reply.text
    assert "".join(reply.tokens).endswith("7")
    chat = client.generate([{"role": "user", "content": "Say only: yes"}], max_tokens=40)
    assert chat.finish_reason == "stop"
    assert chat.tokens[-1] == "<|im_end|>"


def test_a_text_has_tokens_but_no_messages(client: residuum.Client) -> None:
    reply = client.generate("The capital of France is", max_tokens=0, capture=SOME)
    assert reply.tokens == ()
    acts = client.activations(reply)
    assert acts.text == "The capital of France is"
    assert acts.select(span="prompt").tokens == ("The", " capital", " of", " France", " is")
    with pytest.raises(residuum.NoMessageSpans, match="The prompt is not a conversation: it came as a text"):
        acts.mean(29, span="assistant")
    with pytest.raises(residuum.InvalidRequest, match="there is no mean"):
        acts.mean(29, span="reply")


def test_a_skipped_request_has_the_same_texts(client: residuum.Client) -> None:
    asked: dict[str, Any] = {"request_id": "tokens-skipped", "if_exists": "skip", "capture": SOME, "max_tokens": 6}
    first, again = (client.generate(CHAT, **asked) for _ in range(2))
    assert again.skipped
    assert again.tokens == first.tokens
    assert client.activations(again).spans == client.activations(first).spans


def test_an_aborted_request_has_the_texts_of_its_tokens(client: residuum.Client, tokenizer: Any) -> None:
    with client.stream(CHAT, max_tokens=900, ignore_eos=True, capture=SOME) as stream:
        next(iter(stream))
        client.abort(stream.request_id)
        with pytest.raises(residuum.RequestAborted):
            list(stream)
    acts = client.activations(stream.request_id, allow_partial=True)
    token_ids = [*acts.manifest.prompt_token_ids, *acts.manifest.sequences[0].generated_token_ids]
    assert acts.text == tokenizer.decode(token_ids).rstrip("\ufffd")
    assert acts.spans[-1].last == len(token_ids) - 1
