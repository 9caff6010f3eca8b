"""Prompts of which only the first tokens are used (`truncate_prompt`), with SmolLM2's tokenizer."""

from __future__ import annotations

import asyncio

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.admission.sampling import check_sampling
from inference_svc.requests.prompts import PromptReader
from inference_svc.requests.tokenizer_thread import TokenizerThread
from residuum.rpc.errors import Failure
from residuum.v1 import inference_pb2
from tests.inference.service_support import FACTS


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return transformers.AutoTokenizer.from_pretrained(smollm2)


def read(tokenizer, limit, **prompt):
    sampling = inference_pb2.SamplingParameters(truncate_prompt=limit)
    request = inference_pb2.GenerateRequest(sampling=sampling, **prompt)
    reader = PromptReader(TokenizerThread(tokenizer), FACTS)

    async def ids_and_text():
        ids = await reader.read(request)
        return ids, (await reader.text(request, ids) if "token_ids" not in prompt else "")

    return asyncio.run(ids_and_text())


@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", " sea", "\n\n", "é", "😀", "12", "antidisestablishment"])),
    limit=st.integers(1, 30),
)
def test_a_truncated_text_has_the_first_tokens_of_the_whole(tokenizer, words, limit):
    text = "x" + "".join(words)
    whole = tokenizer.encode(text)
    ids, kept = read(tokenizer, limit, text=text)
    assert ids == whole[:limit]
    assert kept == (tokenizer.decode(ids) if len(ids) == limit else text)


def test_a_text_that_is_far_too_long_is_cut_before_it_is_tokenized(tokenizer):
    text = "The capital of France is Paris. " * 100_000
    ids, _ = read(tokenizer, 5, text=text)
    assert ids == tokenizer.encode(text[:200])[:5]


def test_token_ids_are_truncated_and_conversations_are_refused(tokenizer):
    ids = inference_pb2.TokenIds(ids=[5, 6, 7])
    assert read(tokenizer, 2, token_ids=ids)[0] == [5, 6]
    assert read(tokenizer, 9, token_ids=ids)[0] == [5, 6, 7]
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
    with pytest.raises(Failure, match="cannot be truncated"):
        read(tokenizer, 2, chat=chat)


def test_the_text_of_a_conversation_is_that_of_the_template_though_the_tokenizer_changes_it(tokenizer):
    """Qwen's composes characters. Those in the style of SentencePiece add a space after special tokens."""
    changing = transformers.AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    changing.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="cafe\u0301")])
    ids, text = read(changing, None, chat=chat)
    assert text.endswith("<|im_start|>user\ncafe\u0301<|im_end|>\n<|im_start|>assistant\n")
    assert changing.decode(ids) != text


def test_a_limit_of_zero_is_refused():
    with pytest.raises(Failure, match="truncate_prompt must be at least 1"):
        check_sampling(inference_pb2.SamplingParameters(truncate_prompt=0), FACTS)
