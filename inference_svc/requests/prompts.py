"""Prompts as the caller gave them, to token ids: in a thread, because a long text takes longer than a step."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from inference_svc.admission.fields import invalid
from residuum.rpc.errors import Failure, Reason

if TYPE_CHECKING:
    from inference_svc.engine.facts import ModelFacts
    from residuum.v1 import inference_pb2


class PromptReader:
    """Turns prompts into token ids.

    Texts are read by one thread, one after the other: a tokenizer may be used by one at a time. What cannot fit the
    model, however few tokens it makes, is refused before it is read.
    """

    def __init__(self, tokenizer: Any, facts: ModelFacts) -> None:
        """Read for a model; without a tokenizer (None) token ids alone are taken."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._max_characters = facts.max_model_len * _longest_token(tokenizer) if tokenizer is not None else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def read(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Return the token ids of a request's prompt.

        Raises:
            Failure: The prompt is missing, malformed, or longer than any that the model takes.
        """
        kind = request.WhichOneof("prompt")
        if self._tokenizer is None:
            _refuse_text(request)
        if kind == "token_ids":
            return self._checked_ids(list(request.token_ids.ids))
        if kind == "text":
            self._check_characters(len(request.text))
            return await self._in_thread(self._encode, request.text)
        if kind == "chat":
            self._check_chat(request.chat)
            return await self._in_thread(self._apply_chat_template, request.chat)
        raise invalid("prompt", "Set a prompt: text, token_ids or chat.")

    async def _in_thread(self, work: Any, argument: Any) -> list[int]:
        ids: list[int] = await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text)) if text else []

    def _checked_ids(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self._facts.vocab_size:
            raise invalid(
                "token_ids",
                f"Token id {max(ids)} is not below the size of the vocabulary, {self._facts.vocab_size}.",
            )
        return ids

    def _check_characters(self, count: int) -> None:
        if count > self._max_characters:
            raise Failure(
                Reason.ERROR_REASON_PROMPT_TOO_LONG,
                f"The prompt has {count} characters; none of more than {self._max_characters} fits the "
                f"{self._facts.max_model_len} tokens that the model takes. Shorten it.",
                prompt_characters=count,
                limit=self._max_characters,
            )

    def _check_chat(self, chat: inference_pb2.Chat) -> None:
        if len(chat.messages) > self._facts.max_model_len:
            raise Failure(
                Reason.ERROR_REASON_PROMPT_TOO_LONG,
                f"The chat has {len(chat.messages)} messages; the model takes {self._facts.max_model_len} tokens.",
                prompt_messages=len(chat.messages),
                limit=self._facts.max_model_len,
            )
        self._check_characters(sum(len(message.role) + len(message.content) for message in chat.messages))

    def _apply_chat_template(self, chat: inference_pb2.Chat) -> list[int]:
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        if not messages:
            return []
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # jinja and transformers raise what a template finds wrong, without a common class
            raise invalid("chat", f"The model's chat template refuses this: {error}") from error
        return list(ids)


def _longest_token(tokenizer: Any) -> int:
    """Return how many characters a token stands for at most. vLLM's tokenizers know."""
    known = getattr(tokenizer, "max_chars_per_token", None)
    return max(int(known) if known else max(map(len, tokenizer.get_vocab())), 1)


def _refuse_text(request: inference_pb2.GenerateRequest) -> None:
    """Refuse what needs a tokenizer: a prompt that is text, and texts to stop at, which would never be found."""
    kind = request.WhichOneof("prompt")
    if kind in {"text", "chat"}:
        raise invalid(kind, "This engine has no tokenizer; send token_ids.")
    if request.sampling.stop:
        raise invalid("sampling.stop", "This engine has no tokenizer, so it cannot stop at a text.")
