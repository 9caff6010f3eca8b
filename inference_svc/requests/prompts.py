"""Turns prompts into token IDs, and replies into text.

It does so in a thread: tokenizing a long text takes longer than a step of the engine.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from inference_svc.admission.fields import invalid
from inference_svc.requests.message_spans import UnknownSpansError, find_spans
from inference_svc.requests.token_texts import TokenTexts, texts_of
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inference_svc.model_facts import ModelFacts
    from residuum.v1 import inference_pb2, store_pb2

_CONTEXT_TOKENS = 8
"""Tokens of the prompt that a reply is decoded with."""

Result = TypeVar("Result")

_NEED_TOKENIZER = {
    "stop": "detect stop texts",
    "bad_words": "find bad words",
    "json_schema": "follow a JSON schema",
    "regex": "follow a regular expression",
}
"""Sampling parameters that are texts, and what an engine without a tokenizer cannot do."""


class PromptReader:
    """Turns prompts into token IDs.

    One thread tokenizes all texts, because a tokenizer is not thread-safe. A text that is too long for the model, even
    if each of its tokens were the longest there is, is refused before it is tokenized.
    """

    def __init__(self, tokenizer: Any, facts: ModelFacts) -> None:
        """Read prompts for a model. Without a tokenizer (None), only token IDs are accepted."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._max_characters = facts.max_model_len * _longest_token(tokenizer) if tokenizer is not None else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def read(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Return the token IDs of a request's prompt.

        Raises:
            Failure: The prompt is missing, malformed, or certainly longer than the model's context.
        """
        kind = request.WhichOneof("prompt")
        if self._tokenizer is None:
            _refuse_text(request)
        if kind == "token_ids":
            return self._checked_ids(list(request.token_ids.ids))
        if kind == "text":
            self._check_characters(len(request.text))
            return await self.in_thread(self._encode, request.text)
        if kind == "chat":
            self._check_chat(request.chat)
            return await self.in_thread(self._apply_chat_template, request.chat)
        raise invalid("prompt", "Set a prompt: text, token_ids or chat.")

    async def text(self, request: inference_pb2.GenerateRequest, token_ids: list[int]) -> str:
        """Return the text of a request's prompt: a text as it was sent, a chat in the model's template.

        Raises:
            Failure: The prompt is token IDs.
        """
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return request.text
        if kind == "chat":
            return str(await self.in_thread(self._tokenizer.decode, token_ids))
        raise no_prompt_text()

    async def reply_text(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """Return the text of a reply's tokens; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return await self.in_thread(self._decode_reply, list(prompt_token_ids), list(token_ids))

    async def reply_token_texts(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]
    ) -> capture_pb2.TokenTexts:
        """Return the text of each token of a reply."""
        return await self.in_thread(self._reply_token_texts, prompt_token_ids, token_ids)

    def token_texts(self, before: Sequence[int] = ()) -> TokenTexts | None:
        """Return a new collection of the texts of tokens that follow `before`; None without a tokenizer."""
        return None if self._tokenizer is None else TokenTexts(self._tokenizer, before)

    async def describe(
        self, token_ids: Sequence[int], chat: inference_pb2.Chat | str, seal: store_pb2.SealCaptureRequest
    ) -> None:
        """Add to a seal the texts of a prompt's tokens, and the positions of its messages.

        Args:
            token_ids: The tokens of the prompt.
            chat: The conversation that they were made from; or, in words, why there is none.
            seal: The seal.
        """
        await self.in_thread(self._describe, token_ids, chat, seal)

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do work that uses the tokenizer in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _describe(
        self, token_ids: Sequence[int], chat: inference_pb2.Chat | str, seal: store_pb2.SealCaptureRequest
    ) -> None:
        texts = self.token_texts()
        if texts is not None:
            texts.add(token_ids)
        seal.prompt_token_texts.CopyFrom(texts_of(texts))
        if texts is None or isinstance(chat, str):
            seal.message_spans.unknown_detail = str(chat)
            return
        try:
            spans = find_spans(_messages(chat), self._chat_text, token_ids, texts.texts, self._tokenizer)
        except (UnknownSpansError, Failure) as error:  # a Failure: the template refuses markers
            spans = capture_pb2.MessageSpans(unknown_detail=str(error))
        seal.message_spans.CopyFrom(spans)

    def _chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of the prompt that the model's chat template makes of messages."""
        return str(self._render(messages, tokenize=False, **_rendering(messages)))

    def _reply_token_texts(self, prompt: Sequence[int], reply: Sequence[int]) -> capture_pb2.TokenTexts:
        texts = self.token_texts(prompt)
        if texts is not None:
            texts.add(reply)
        return texts_of(texts)

    def _decode_reply(self, prompt: list[int], reply: list[int]) -> str:
        # Decoded behind the prompt: alone, many tokenizers drop the space before the first word.
        before = self._tokenizer.decode(prompt[-_CONTEXT_TOKENS:], skip_special_tokens=True)
        whole = self._tokenizer.decode([*prompt[-_CONTEXT_TOKENS:], *reply], skip_special_tokens=True)
        if whole.startswith(before):
            return str(whole[len(before) :])
        return str(self._tokenizer.decode(reply, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text)) if text else []

    def _checked_ids(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self._facts.vocab_size:
            raise invalid(
                "token_ids",
                f"Token ID {max(ids)} is not in the model's vocabulary. Send IDs below {self._facts.vocab_size}.",
            )
        return ids

    def _check_characters(self, count: int) -> None:
        if count > self._max_characters:
            raise Failure(
                Reason.ERROR_REASON_PROMPT_TOO_LONG,
                f"The prompt has {count} characters. At most {self._max_characters} can fit the model's context of "
                f"{self._facts.max_model_len} tokens. Shorten the prompt.",
                prompt_characters=count,
                limit=self._max_characters,
            )

    def _check_chat(self, chat: inference_pb2.Chat) -> None:
        if len(chat.messages) > self._facts.max_model_len:
            raise Failure(
                Reason.ERROR_REASON_PROMPT_TOO_LONG,
                f"The chat has {len(chat.messages)} messages, more than the model's context has tokens "
                f"({self._facts.max_model_len}). Send fewer messages.",
                prompt_messages=len(chat.messages),
                limit=self._facts.max_model_len,
            )
        self._check_characters(sum(len(message.role) + len(message.content) for message in chat.messages))

    def _apply_chat_template(self, chat: inference_pb2.Chat) -> list[int]:
        messages = _messages(chat)
        if not messages:
            return []
        if messages[-1]["role"] != "assistant":
            return list(self._render(messages, tokenize=True, **_rendering(messages)))
        # The model continues the assistant's message. Some tokenizers ignore what they are asked to continue, and would
        # let the model begin another message.
        begun = messages[-1]["content"].strip()
        if not begun:
            raise invalid("chat", "The assistant's last message is empty, so it cannot be continued. Leave it out.")
        if not self._chat_text(messages).rstrip().endswith(begun):
            raise invalid(
                "chat",
                "The chat ends with a message of the assistant, which this model's tokenizer cannot continue. End the "
                "chat with a message of the user, or send the prompt as a text that ends where the reply begins.",
            )
        return list(self._render(messages, tokenize=True, **_rendering(messages)))

    def _render(self, messages: Sequence[Mapping[str, str]], **options: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, return_dict=False, **options)
        except Exception as error:  # jinja and transformers raise unrelated classes for a template's errors
            raise invalid("chat", f"The model's chat template refuses the chat: {error}") from error


def _messages(chat: inference_pb2.Chat) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _rendering(messages: Sequence[Mapping[str, str]]) -> dict[str, bool]:
    """Return how a chat template is applied: the model continues a last message of the assistant, or begins one."""
    if messages[-1]["role"] == "assistant":
        return {"add_generation_prompt": False, "continue_final_message": True}
    return {"add_generation_prompt": True}


def no_prompt_text() -> Failure:
    """Return the Failure for a capture that is to keep the text of a prompt that has none."""
    return invalid(
        "capture.keep_prompt",
        "capture.keep_prompt: the prompt came as token IDs, so it has no text to keep. Unset it; the capture has the "
        "token IDs.",
    )


def _longest_token(tokenizer: Any) -> int:
    """Return the number of characters in the longest token, at least 1."""
    known = getattr(tokenizer, "max_chars_per_token", None)
    return max(int(known) if known else max(map(len, tokenizer.get_vocab())), 1)


def _refuse_text(request: inference_pb2.GenerateRequest) -> None:
    """Refuse requests that need a tokenizer: prompts of text, and sampling parameters that are texts."""
    kind = request.WhichOneof("prompt")
    if kind in {"text", "chat"}:
        raise invalid(kind, "This engine has no tokenizer; send token_ids.")
    for field, ability in _NEED_TOKENIZER.items():
        if getattr(request.sampling, field):
            raise invalid(
                f"sampling.{field}", f"This engine has no tokenizer, so it cannot {ability}. Leave {field} out."
            )
