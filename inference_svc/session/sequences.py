"""The record of each sequence of a request: its tokens and how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference_svc.engine.finish_reasons import ABORTED, FAILED
from inference_svc.requests.token_texts import texts_of
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.requests.token_texts import TokenTexts
    from residuum.v1 import rule_pb2


@dataclass
class GeneratedSequence:
    """One sequence, with the tokens generated until now."""

    token_ids: list[int] = field(default_factory=list)
    """The tokens that were passed on to the caller."""
    texts: TokenTexts | None = None
    """Their texts; None without a tokenizer."""
    finish_reason: str = ""
    """Empty while the sequence generates."""
    stop_reason: str = ""
    """The stop string, or the name of the rule, that ended the sequence."""
    stop_token_id: int | None = None
    """The stop token that ended the sequence."""
    rule_events: list[rule_pb2.RuleEvent] = field(default_factory=list)
    """The rules that fired at its tokens."""
    engine_tokens: int = 0
    """The number of tokens that the engine has generated. Some of them may not have reached the caller yet."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine generates no more tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether the sequence ended normally and all its tokens were passed on."""
        return self.finish_reason not in {"", ABORTED, FAILED}

    def add(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: str = "",
        stop_token_id: int | None = None,
    ) -> None:
        """Add the tokens of one step. The last step has a finish reason."""
        self.token_ids.extend(token_ids)
        if self.texts is not None:
            self.texts.add(token_ids)
        self.finish_reason = finish_reason or ""
        self.stop_reason = stop_reason
        self.stop_token_id = stop_token_id

    def outcome(self) -> capture_pb2.SequenceOutcome:
        """Return how the sequence ended, in the store's form. A sequence that has not ended counts as aborted."""
        return capture_pb2.SequenceOutcome(
            generated_token_ids=self.token_ids,
            finish_reason=self.finish_reason or ABORTED,
            token_texts=texts_of(self.texts),
        )
