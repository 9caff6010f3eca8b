"""The tokenizer of a model's folder. Needs the package tokenizers, which is imported only here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from residuum.exceptions import InvalidRequest
from residuum.rpc.extras import install_extra


class Tokenizer:
    """Makes tokens of texts as the model's own tokenizer does, without special tokens."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Load the tokenizer.

        Args:
            folder: A folder with tokenizer.json, and tokenizer_config.json for the special tokens.

        Raises:
            ImportError: The package tokenizers is not installed.
            InvalidRequest: There is no tokenizer in the folder, or its file is damaged.
        """
        try:
            import tokenizers
        except ImportError:
            raise ImportError(
                f"To pack texts, the client needs the package tokenizers: {install_extra('pack')}."
            ) from None
        self._folder = Path(folder)
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise InvalidRequest(
                f"There is no {file}. Give the folder of the served model, which has its tokenizer.json.",
                reason="INVALID_FIELD",
            )
        content = file.read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        """The digest of tokenizer.json."""
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # noqa: BLE001 - the package raises plain exceptions
            raise _damaged(file, error) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> Sequence[int]:
        """Return the token IDs of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def special(self, name: str) -> int:
        """Return the ID of the token "bos" or "eos"; a model without "bos" has "eos" in its place.

        Raises:
            InvalidRequest: The tokenizer names no such token, or tokenizer_config.json is damaged.
        """
        config = self._folder / "tokenizer_config.json"
        try:
            facts = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        except ValueError as error:
            raise _damaged(config, error) from None
        if not isinstance(facts, dict):
            raise _damaged(config, "it is no JSON object")
        for wanted in dict.fromkeys([name, "eos"]):
            token = facts.get(f"{wanted}_token")
            text = token.get("content") if isinstance(token, dict) else token
            found = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
            if isinstance(found, int):
                return found
        raise InvalidRequest(
            f"The tokenizer in {self._folder} names no {name} token. Give the separator as a token ID.",
            reason="INVALID_FIELD",
        )


def _damaged(file: Path, why: object) -> InvalidRequest:
    return InvalidRequest(f"{file} cannot be read: {why}. Copy the model's folder again.", reason="INVALID_FIELD")
