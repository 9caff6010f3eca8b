"""Turns tokens into text: replies, single tokens, and what a seal says about a prompt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from inference_svc.requests.message_spans import UnknownSpansError, find_spans
from inference_svc.requests.token_texts import TokenTexts, texts_of
from inference_svc.requests.tokenizer_thread import messages_of, render
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.requests.tokenizer_thread import TokenizerThread
    from residuum.v1 import inference_pb2, store_pb2

NO_CHAT = "The prompt is not a conversation: it came as a text or as token IDs, which have no messages."
"""Why the positions of messages are not known."""

_TOGETHER = 256
"""How many tokens of a prompt are decoded before another thread gets a turn."""


class ReplyReader:
    """Decodes tokens. Without a tokenizer, texts are empty or unknown."""

    def __init__(self, thread: TokenizerThread) -> None:
        """Decode with the tokenizer of this thread."""
        self._thread = thread
        self._tokenizer = thread.tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """The model's own EOS token, at which vLLM stops; None without a tokenizer."""
        return getattr(self._tokenizer, "eos_token_id", None)

    async def text(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of a reply's tokens, as vLLM streams it; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return await self._thread.do(self._decode, prompt_token_ids, token_ids, skip_special_tokens)

    async def token_texts(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> capture_pb2.TokenTexts:
        """Return the text of each token of a reply."""
        return await self._thread.do(self._token_texts, prompt_token_ids, token_ids)

    async def vocabulary_texts(self, token_ids: Sequence[int]) -> dict[int, str]:
        """Return the text of each token as it stands within a text; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        return await self._thread.do(self._vocabulary_texts, token_ids)

    def _vocabulary_texts(self, token_ids: Sequence[int]) -> dict[int, str]:
        # Some tokenizers drop the space of the first token, so each token is decoded after itself.
        decode = self._tokenizer.decode
        return {token_id: decode([token_id] * 2)[len(decode([token_id])) :] for token_id in token_ids}

    def new_texts(self, before: Sequence[int] = ()) -> TokenTexts | None:
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
        if self._tokenizer is None:
            self._describe(token_ids, chat, seal)
        else:
            await self._thread.do(self._describe, token_ids, chat, seal)

    def _describe(
        self, token_ids: Sequence[int], chat: inference_pb2.Chat | str, seal: store_pb2.SealCaptureRequest
    ) -> None:
        texts = self.new_texts()
        if texts is not None:
            for first in range(0, len(token_ids), _TOGETHER):
                if first:
                    time.sleep(0)  # gives up the interpreter's lock, for which the event loop would wait 5 ms each time
                texts.add(token_ids[first : first + _TOGETHER])
        seal.prompt_token_texts.CopyFrom(texts_of(texts))
        if texts is None or isinstance(chat, str):
            seal.message_spans.unknown_detail = str(chat)
            return
        try:
            spans = find_spans(messages_of(chat), self._chat_text, token_ids, texts.texts, self._tokenizer)
        except (UnknownSpansError, Failure) as error:  # a Failure: the template refuses markers
            spans = capture_pb2.MessageSpans(unknown_detail=str(error))
        seal.message_spans.CopyFrom(spans)

    def _chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        return str(render(self._tokenizer, messages, tokenize=False))

    def _token_texts(self, prompt: Sequence[int], reply: Sequence[int]) -> capture_pb2.TokenTexts:
        texts = self.new_texts(prompt)
        if texts is not None:
            texts.add(reply)
        return texts_of(texts)

    def _decode(self, prompt: Sequence[int], reply: Sequence[int], skips: bool) -> str:  # noqa: FBT001 - for `do`
        # vLLM decodes token by token behind the prompt. It neither cleans spaces up nor shows incomplete characters.
        texts = TokenTexts(self._tokenizer, prompt, skip_special_tokens=skips)
        texts.add(reply)
        return "".join(texts.texts)
