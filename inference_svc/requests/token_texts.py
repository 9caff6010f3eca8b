"""The texts of single tokens: what each token adds to the text of the tokens before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.decoders import DecodeStream

from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CONTEXT_TOKENS = 8
"""Tokens before the first one that its text may depend on: many tokenizers drop the space at the start of a text."""

_INCOMPLETE = "\ufffd"
"""How decoders show bytes that are not a character, or not one yet."""

_NO_TOKENIZER = "The engine has no tokenizer."


class TokenTexts:
    """Collects the texts of consecutive tokens. A token takes about 1 µs with the tokenizers of the library tokenizers.

    Attributes:
        texts: The text of each token.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), *, skip_special_tokens: bool = False) -> None:
        """Start without tokens.

        Args:
            tokenizer: The tokenizer. The methods read it only, so other threads may use it meanwhile.
            before: The tokens before the first one.
            skip_special_tokens: Whether special tokens have empty texts.
        """
        self._skips_special = skip_special_tokens
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_fast = isinstance(backend, tokenizers.Tokenizer)
        self._tokenizer = backend if self._is_fast else tokenizer
        self._why_unknown = ""
        self._stream = self._new_stream()
        self._context: Sequence[int] = before[-CONTEXT_TOKENS:]
        """The tokens before the first one. They are read when it comes, so the request reaches the engine sooner."""
        self.texts: list[str] = []

    def add(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens."""
        context, self._context = self._context, ()
        # Feed single tokens: a DecodeStream repeats text if a batch ends within a character.
        for token_id in context:
            self._step(token_id)
        self.texts.extend(map(self._step, token_ids))

    def message(self) -> capture_pb2.TokenTexts:
        """Return the texts in the form of the contract."""
        if self._why_unknown:
            return unknown_texts(self._why_unknown)
        return capture_pb2.TokenTexts(text="".join(self.texts), lengths=map(len, self.texts))

    def _step(self, token_id: int) -> str:
        if self._why_unknown:
            return ""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001 - a stream fails if a token changes the text before it, as invalid bytes may do
            return self._restart(token_id)

    def _restart(self, token_id: int) -> str:
        self._stream = self._new_stream()
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # noqa: BLE001 - of any class; texts must never make a request fail
            self._why_unknown = f"The engine's tokenizer cannot decode token {token_id}: {error}"
            return ""

    def _new_stream(self) -> Any:
        stream = DecodeStream if self._is_fast else _SlowStream
        return stream(skip_special_tokens=self._skips_special)


class _SlowStream:
    """Does what a DecodeStream does, with the `decode` of any tokenizer."""

    def __init__(self, *, skip_special_tokens: bool) -> None:
        self._skips_special = skip_special_tokens
        self._token_ids: list[int] = []
        """The tokens of the last text, and those after it."""
        self._num_known = 0
        """How many of them had a complete text."""
        self._known = ""
        """Their text."""

    def step(self, tokenizer: Any, token_id: int) -> str:
        """Add a token and return the text that it adds; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text = str(tokenizer.decode(self._token_ids, skip_special_tokens=self._skips_special))
        if len(text) <= len(self._known) or text.endswith(_INCOMPLETE):
            return ""
        added = text[len(self._known) :]
        self._token_ids = self._token_ids[self._num_known :]
        self._num_known = len(self._token_ids)
        self._known = str(tokenizer.decode(self._token_ids, skip_special_tokens=self._skips_special))
        return added


def texts_of(collected: TokenTexts | None) -> capture_pb2.TokenTexts:
    """Return the message of collected texts. None: the engine has no tokenizer."""
    return unknown_texts(_NO_TOKENIZER) if collected is None else collected.message()


def unknown_texts(why: str) -> capture_pb2.TokenTexts:
    """Return the message for texts that are not known."""
    return capture_pb2.TokenTexts(unknown_detail=why)
