"""The texts of single tokens, and the positions of messages, with the tokenizer of SmolLM2 and others made here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_svc.requests import replies
from inference_svc.requests.prompts import PromptReader
from inference_svc.requests.replies import ReplyReader
from inference_svc.requests.token_texts import TokenTexts
from inference_svc.requests.tokenizer_thread import TokenizerThread
from residuum.v1 import inference_pb2, store_pb2
from residuum.values.captures.tokens import split_texts
from tests.inference.service_support import FACTS

HELLO = "Hello 😀, 日本語 e\u0301\n\n  x"


@pytest.fixture(scope="session")
def smol(smollm2):
    return transformers.AutoTokenizer.from_pretrained(smollm2)


def metaspace():
    """A tokenizer in the style of SentencePiece, with bytes for what it does not know."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Hello,xyz", "▁He", "llo", "▁x"]
    model = tokenizers.models.Unigram([(piece, -float(at)) for at, piece in enumerate(dict.fromkeys(pieces))], 0, True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def texts_of(tokenizer, token_ids, before=()):
    collected = TokenTexts(tokenizer, before)
    collected.add(token_ids)
    message = collected.message()
    assert not message.unknown_detail
    assert list(split_texts(message)) == collected.texts
    return collected.texts


def check_joined(joined, whole):
    """The texts of tokens are their whole text, except that tokens of a character that is never completed have none."""
    assert whole.startswith(joined)
    assert whole == joined or whole.endswith("\ufffd")


def slow(tokenizer):
    """The same tokenizer for whom knows only its `decode`."""
    return SimpleNamespace(decode=tokenizer.decode)


@given(text=st.text(max_size=40))
@example(text=HELLO)
@example(
    text="\x88\U00052000"
)  # SmolLM2's vocabulary lacks a byte of the second character, so the first stays incomplete
@settings(deadline=None, max_examples=200)
def test_the_texts_of_a_prompt_are_the_prompt(smol, text):
    token_ids = smol.encode(text)
    texts = texts_of(smol, token_ids)
    check_joined("".join(texts), smol.decode(token_ids))
    assert text != HELLO or "".join(texts) == HELLO
    assert len(texts) == len(token_ids)
    assert texts_of(slow(smol), token_ids) == texts


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_the_texts_of_any_tokens_are_their_text(smol, data):
    """Also of tokens that are no text: of bytes that are no character, and of characters that are never completed."""
    known = st.one_of(st.integers(0, len(smol) - 1), st.sampled_from(smol.encode("😀日本語 é" * 2)))
    token_ids = data.draw(st.lists(known, max_size=24))
    split = data.draw(st.integers(0, len(token_ids)))
    prompt, reply = token_ids[:split], token_ids[split:]
    check_joined("".join(texts_of(smol, token_ids)), smol.decode(token_ids))
    assert texts_of(smol, prompt) + texts_of(smol, reply, prompt) == texts_of(smol, token_ids)


@pytest.mark.parametrize("form", [lambda tokenizer: tokenizer, slow], ids=["fast", "slow"])
def test_a_reply_keeps_its_first_space(form):
    tokenizer = metaspace()
    token_ids = tokenizer.encode("Hello x 😀 Hello")
    texts = texts_of(form(tokenizer), token_ids)
    assert "".join(texts) == "Hello x 😀 Hello"
    first = texts.index(" x")
    assert texts_of(form(tokenizer), token_ids[first:], token_ids[:first]) == texts[first:]
    emoji = texts.index("😀")
    assert texts[emoji - 3 : emoji] == ["", "", ""]
    assert texts_of(form(tokenizer), token_ids[emoji - 1 :], token_ids[: emoji - 1]) == texts[emoji - 1 :]


def test_special_tokens_are_shown(smol):
    token_ids = smol.encode("<|im_start|>user\nHi<|im_end|>")
    assert texts_of(smol, token_ids) == ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>"]


def test_a_tokenizer_that_fails_makes_no_request_fail():
    def decode(token_ids, **options):
        raise TypeError("scripted")

    collected = TokenTexts(SimpleNamespace(decode=decode), before=[1])
    collected.add([2, 3])
    assert "cannot decode token 1: scripted" in collected.message().unknown_detail


# -------------------------------------------------------------------------------------------- the messages of a prompt

TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
IN_ONE = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST] {% if system is defined and loop.last %}"
    "<<SYS>>{{ system }}<</SYS>> {% endif %}{{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
CHATS = {
    "one": [("user", "Hello there!")],
    "three": [("system", "Be brief."), ("user", "Say a 😀."), ("assistant", "A 😀!"), ("user", "And 日本語 é?")],
    "equal": [("user", "again"), ("assistant", "again"), ("user", "again")],
    "space": [("user", "  \n two words  \n\n"), ("assistant", "\tyes "), ("user", "x")],
    "template's text": [("user", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), ("user", "user")],
    "continued": [("user", "Count."), ("assistant", "One, two,")],
    "continued after a space": [("user", "Count."), ("assistant", "One, two, ")],
}


def chat_of(messages):
    return inference_pb2.Chat(messages=[{"role": role, "content": content} for role, content in messages])


async def described(tokenizer, messages):
    """The tokens of a chat's prompt, and the seal that describes them."""
    thread, chat = TokenizerThread(tokenizer), chat_of(messages)
    token_ids = await PromptReader(thread, FACTS).read(inference_pb2.GenerateRequest(chat=chat))
    seal = store_pb2.SealCaptureRequest()
    await ReplyReader(thread).describe(token_ids, chat, seal)
    return token_ids, seal


def by_hand(tokenizer, messages):
    """The positions that overlap each content, from transformers' own text and offsets of the prompt."""
    turns = [{"role": role, "content": content} for role, content in messages]
    goes_on = messages[-1][0] == "assistant"
    text = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
    )
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    spans, at = [], 0
    for role, content in messages:
        header = f"<|im_start|>{role}\n"
        start = text.index(header, at) + len(header)
        start = text.index(content.strip(), start)
        at = start + len(content.strip())
        kept = len(content) - len(content.lstrip())
        if kept and text[:start].endswith(content[:kept]) and not text[:start].endswith(header):
            start -= kept
        if text.startswith(content[len(content.rstrip()) :], at):
            at += len(content) - len(content.rstrip())
        # These offsets leave out white space around a token's word: the token begins where the one before it ends.
        ends = [0, *(last for _, last in offsets)]
        inside = [
            n for n, (first, last) in enumerate(offsets) if min(first, ends[n]) < at and last > start and last > 0
        ]
        spans.append((role, inside[0], len(inside)))
    return spans


def found(seal):
    assert not seal.message_spans.unknown_detail
    return [(span.role, span.first_position, span.num_positions) for span in seal.message_spans.spans]


@pytest.mark.parametrize("name", [name for name in CHATS if name != "space"])
async def test_messages_are_where_transformers_says(smol, name):
    token_ids, seal = await described(smol, CHATS[name])
    assert found(seal) == by_hand(smol, CHATS[name])
    texts = split_texts(seal.prompt_token_texts)
    assert "".join(texts) == smol.decode(token_ids)
    for (_, first, count), (_, content) in zip(found(seal), CHATS[name], strict=True):
        assert content.strip() in "".join(texts[first : first + count])


async def test_a_long_prompt_gives_other_threads_a_turn_and_has_the_same_texts(smol, monkeypatch):
    token_ids = [number % 40_000 for number in range(3, 3 * replies._TOGETHER + 10)]
    turns = []
    monkeypatch.setattr(replies, "time", SimpleNamespace(sleep=turns.append))
    seal = store_pb2.SealCaptureRequest()
    await ReplyReader(TokenizerThread(smol)).describe(token_ids, replies.NO_CHAT, seal)
    assert turns == [0] * 3, "between four parts"
    assert list(split_texts(seal.prompt_token_texts)) == texts_of(smol, token_ids)


async def test_white_space_of_a_message_counts_if_the_template_keeps_it(smol):
    _, seal = await described(smol, CHATS["space"])
    texts = split_texts(seal.prompt_token_texts)
    words = ["".join(texts[first : first + count]) for _, first, count in found(seal)]
    for (_, content), word in zip(CHATS["space"], words, strict=True):
        before, _, after = word.partition(content)
        assert (before, after) in {("\n", ""), ("", "")}, "a token may hold white space of both content and template"


@pytest.fixture
def templated(smol):
    """A function that sets the chat template of a tokenizer; the tokenizer's own is restored."""
    before = smol.chat_template

    def templated(template):
        smol.chat_template = template
        return smol

    yield templated
    smol.chat_template = before


@pytest.mark.parametrize("name", list(CHATS))
async def test_a_template_may_strip_white_space(templated, name):
    _, seal = await described(templated(TRIMS), CHATS[name])
    texts = split_texts(seal.prompt_token_texts)
    for (_, first, count), (role, content) in zip(found(seal), CHATS[name], strict=True):
        assert "".join(texts[first : first + count]).strip() == content.strip(), role


async def test_a_template_may_put_a_message_into_another(templated):
    messages = [("system", "Be brief."), ("user", "One?"), ("assistant", "Two."), ("user", "Three?")]
    _, seal = await described(templated(IN_ONE), messages)
    texts = split_texts(seal.prompt_token_texts)
    for (_, first, count), (_, content) in zip(found(seal), messages, strict=True):
        assert content in "".join(texts[first : first + count])
    assert found(seal)[0][1] > found(seal)[2][1], "the system's message comes last"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}",
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }} I repeat: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{% if 'brief' in m.content %}Now. {% endif %}{{ m.content }}\n{% endfor %}",
        "{% if 'brief' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}{{ messages }}",
    ],
    ids=["changes", "leaves out", "repeats", "depends on the content", "refuses the markers"],
)
async def test_a_template_that_does_more_hides_the_positions(templated, template):
    token_ids, seal = await described(templated(template), [("system", "Be brief."), ("user", "One?")])
    assert not seal.message_spans.spans
    assert "chat template" in seal.message_spans.unknown_detail
    assert len(seal.prompt_token_texts.lengths) == len(token_ids), "the texts are known all the same"


async def test_a_tokenizer_that_changes_the_text_says_where_its_tokens_are_from(smol):
    changing = transformers.AutoTokenizer.from_pretrained(smol.name_or_path)
    changing.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    messages = [("user", "cafe\u0301 au lait"), ("assistant", "oui"), ("user", "e\u0301")]
    _, seal = await described(changing, messages)
    texts = split_texts(seal.prompt_token_texts)
    assert "caf\u00e9" in "".join(texts), "it has composed the letter"
    spans = ["".join(texts[first : first + count]) for _, first, count in found(seal)]
    assert spans == ["caf\u00e9 au lait", "oui", "\u00e9"]


async def test_without_a_tokenizer_nothing_is_described():
    seal = store_pb2.SealCaptureRequest()
    await ReplyReader(TokenizerThread(None)).describe([1, 2], "no conversation", seal)
    assert seal.prompt_token_texts.unknown_detail == "The engine has no tokenizer."
    assert seal.message_spans.unknown_detail == "no conversation"
