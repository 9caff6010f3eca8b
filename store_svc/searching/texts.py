"""The tokens of hits, and the text around them."""

from __future__ import annotations

from itertools import accumulate

from residuum.v1 import capture_pb2, store_pb2
from store_svc.searching.hits import Hit

_TOKEN_CHARACTERS = 256
_CONTEXT_CHARACTERS = 1024


class TokenTexts:
    """The tokens of one capture."""

    def __init__(self, manifest: capture_pb2.CaptureManifest) -> None:
        """Read them from the capture's manifest."""
        self._manifest = manifest
        self._prompt = manifest.description.prompt_token_ids
        self._sequences: dict[int, tuple[str, list[int]] | None] = {}

    def message(self, hit: Hit, context: int) -> store_pb2.SearchHit:
        """Return a hit as a message, with the text of up to `context` tokens before and after it."""
        found = store_pb2.SearchHit(
            capture_id=hit.capture_id,
            tenant=hit.tenant,
            sequence=hit.sequence,
            position=hit.position,
            score=hit.score,
        )
        token = self._token(hit.sequence, hit.position)
        if token is not None:
            found.token_id = token
        known = self._texts(hit.sequence)
        if known is not None and hit.position + 1 < len(known[1]):
            text, ends = known
            at, last = hit.position, len(ends) - 1
            found.text = text[ends[at] : ends[at + 1]][:_TOKEN_CHARACTERS]
            before = text[ends[max(at - context, 0)] : ends[at]]
            found.text_before = before[-_CONTEXT_CHARACTERS:]
            found.text_after = text[ends[at + 1] : ends[min(at + 1 + context, last)]][:_CONTEXT_CHARACTERS]
        return found

    def _token(self, sequence: int, position: int) -> int | None:
        if position < len(self._prompt):
            return self._prompt[position]
        if sequence >= len(self._manifest.sequences):
            return None
        generated = self._manifest.sequences[sequence].generated_token_ids
        at = position - len(self._prompt)
        return generated[at] if at < len(generated) else None

    def _texts(self, sequence: int) -> tuple[str, list[int]] | None:
        """Return the text of a sequence with its prompt, and where its tokens begin, with the end; None if unknown."""
        if sequence not in self._sequences:
            self._sequences[sequence] = self._joined(sequence)
        return self._sequences[sequence]

    def _joined(self, sequence: int) -> tuple[str, list[int]] | None:
        prompt = self._manifest.prompt_token_texts
        if not prompt.lengths and self._prompt:
            return None
        text, lengths = prompt.text, list(prompt.lengths)
        if sequence < len(self._manifest.sequences):
            generated = self._manifest.sequences[sequence].token_texts
            text, lengths = text + generated.text, lengths + list(generated.lengths)
        return text, list(accumulate(lengths, initial=0))
