"""Turns prompts into token IDs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inference_svc.admission.fields import invalid
from inference_svc.requests.tokenizer_thread import messages_of, render
from residuum.rpc.errors import Failure, Reason

if TYPE_CHECKING:
    from inference_svc.model_facts import ModelFacts
    from inference_svc.requests.tokenizer_thread import TokenizerThread
    from residuum.v1 import inference_pb2

_NEED_TOKENIZER = {
    "stop": "detect stop strings",
    "bad_words": "find bad words",
    "json_schema": "follow a JSON schema",
    "regex": "follow a regular expression",
}
"""Sampling parameters that are texts, and what an engine without a tokenizer cannot do."""


_MARGIN = 64
"""Tokens at the end of a text whose tokens may depend on where the text ends."""


class PromptReader:
    """Turns prompts into token IDs.

    A text is refused before it is tokenized if it would be too long even with the longest tokens.
    """

    def __init__(self, thread: TokenizerThread, facts: ModelFacts) -> None:
        """Read prompts for a model. Without a tokenizer, only token IDs are accepted."""
        self._thread = thread
        self._tokenizer = tokenizer = thread.tokenizer
        self._facts = facts
        self._longest_token = _longest_token(tokenizer) if tokenizer is not None else 0
        self._max_characters = facts.max_model_len * self._longest_token

    async def read(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Return the token IDs of a request's prompt.

        Raises:
            Failure: The prompt is missing, malformed, or certainly longer than the model's context.
        """
        kind = request.WhichOneof("prompt")
        limit = request.sampling.truncate_prompt or None
        if self._tokenizer is None:
            _refuse_text(request)
        if kind == "token_ids":
            return self._checked_ids(list(request.token_ids.ids[:limit]))
        if kind == "text":
            text = request.text if limit is None else self._start(request.text, limit)
            self._check_characters(len(text))
            return (await self._thread.do(self._encode, text))[:limit]
        if kind == "chat":
            if limit is not None:
                raise invalid(
                    "sampling.truncate_prompt",
                    "A conversation cannot be truncated: it would lose the place where the reply begins. Leave "
                    "truncate_prompt out, or send the conversation's token IDs.",
                )
            self._check_chat(request.chat)
            return await self._thread.do(self._apply_chat_template, request.chat)
        raise invalid("prompt", "Set a prompt: text, token_ids or chat.")

    async def text(self, request: inference_pb2.GenerateRequest, token_ids: list[int]) -> str:
        """Return the text of a request's prompt: a text as it was sent, a chat in the model's template.

        Raises:
            Failure: The prompt is token IDs.
        """
        kind = request.WhichOneof("prompt")
        if kind == "text" and len(token_ids) != request.sampling.truncate_prompt:
            return request.text
        if kind == "text":
            return str(await self._thread.do(self._tokenizer.decode, token_ids))
        if kind == "chat":  # not decoded: some tokenizers change the text, or add spaces after special tokens
            made = await self._thread.do(partial(render, tokenize=False), self._tokenizer, messages_of(request.chat))
            return str(made)
        raise no_prompt_text()

    def _start(self, text: str, limit: int) -> str:
        """Return as much of a text as surely has `limit` tokens, and some more: the cut may change the last ones."""
        return text[: min(limit + _MARGIN, self._facts.max_model_len) * self._longest_token]

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
        messages = messages_of(chat)
        if not messages:
            return []
        if messages[-1]["role"] != "assistant":
            return list(render(self._tokenizer, messages, tokenize=True))
        # The model continues the assistant's message. Some tokenizers ignore what they are asked to continue, and would
        # let the model begin another message.
        begun = messages[-1]["content"].strip()
        if not begun:
            raise invalid("chat", "The assistant's last message is empty, so it cannot be continued. Leave it out.")
        if not str(render(self._tokenizer, messages, tokenize=False)).rstrip().endswith(begun):
            raise invalid(
                "chat",
                "The chat ends with a message of the assistant, which this model's tokenizer cannot continue. End the "
                "chat with a message of the user, or send the prompt as a text that ends where the reply begins.",
            )
        return list(render(self._tokenizer, messages, tokenize=True))


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
