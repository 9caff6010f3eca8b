"""Replies to prompts: their tokens, texts and scores; and registrations."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from residuum.exceptions import NoTokenTexts
from residuum.values.probes.probe import Probe
from residuum.values.probes.rules import RuleEvent
from residuum.values.probes.scores import Scores
from residuum.values.replies.logprobs import Logprobs
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one sequence.

    Attributes:
        text: The new text. It may come later than its tokens: while a character is incomplete, or while the text could
            be the start of a stop string.
        token_ids: The new token IDs.
        sequence: The sequence; 0 unless n > 1.
        logprobs: The log-probabilities of the new tokens; None unless `logprobs` was given.
        scores: The scores of the new tokens by the names of the request's probes: float32 [tokens], or [tokens,
            outputs] if the probe has several outputs. See `Sequence.scores`.
        prompt_scores: The same for the next positions of the prompt; None if there are none. With `score_prompt`, they
            come in deltas before the first token, or with it. These deltas continue each other, and may have no tokens.
        events: The rules that fired at the new tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    sequence: int = 0
    logprobs: Logprobs | None = field(default=None, repr=False, compare=False)
    scores: Scores | None = field(default=None, repr=False, compare=False)
    prompt_scores: Scores | None = field(default=None, repr=False, compare=False)
    events: tuple[RuleEvent, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Usage:
    """The token counts of a request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        generated_tokens: Generated tokens of all sequences together.
    """

    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Sequence:
    """One of the sequences generated for a prompt.

    Attributes:
        text: The generated text.
        token_ids: The generated token IDs.
        finish_reason: "stop" (end of sequence, a stop token, a stop string, or the end of a structured output),
            "length", or "rule".
        stop_reason: The stop string or the name of the rule that ended the sequence; empty if none did.
        stop_token_id: The stop token that ended the sequence, which is its last token; None if none did.
        logprobs: The log-probabilities of the generated tokens; None unless `logprobs` was given.
        token_texts: As `tokens`; None if the server did not send them.
        scores: The scores of the generated tokens by the names of the request's probes: float32 [tokens], or [tokens,
            outputs] if the probe has several outputs. The score of a token is that of the row from which the model
            predicted it, which is the row of the position before. None without `probes`, for a registration that was
            given as an ID, whose probes the client does not know, and if nothing was generated because a capture
            existed that has no scores.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str = ""
    stop_token_id: int | None = None
    logprobs: Logprobs | None = field(default=None, repr=False, compare=False)
    token_texts: tuple[str, ...] | None = field(default=None, repr=False)
    scores: Scores | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of each generated token.

        A token's text is what it adds to the text of the tokens before it. If a character takes several tokens, the
        last of them has it, and the others have an empty text. Special tokens, stop tokens and stop strings are shown,
        so the texts joined may be longer than `text`.

        Raises:
            NoTokenTexts: The server did not send them.
        """
        if self.token_texts is None:
            raise NoTokenTexts(
                "The reply has no texts of its tokens: the server is older than this feature, its engine has no "
                "tokenizer, or the texts of all sequences are too long for one message. The token IDs are in token_ids."
            )
        return self.token_texts


@dataclass(frozen=True)
class Reply:
    """The reply to a prompt.

    Attributes:
        request_id: The ID of the request and of its capture: `client.activations(reply.request_id)`.
        prompt_token_ids: The prompt as the model saw it.
        sequences: The generated sequences, `n` of them.
        usage: The token counts.
        captured: Whether the request has a capture.
        store_endpoint: The address of the store that holds the capture.
        skipped: Whether nothing was generated, because the capture existed already (`if_exists="skip"`).
        prompt_logprobs: The log-probabilities of the prompt's tokens; None unless `prompt_logprobs` was given.
        prompt_scores: The scores of the prompt's positions by the names of the request's probes: float32 [positions],
            or [positions, outputs] if the probe has several outputs. The last one is also the score of the first
            generated token. None unless `score_prompt` was given.
        events: The rules that fired, in all sequences: by sequence, in the order of the tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sequences: tuple[Sequence, ...]
    usage: Usage
    captured: bool = False
    store_endpoint: str = ""
    skipped: bool = False
    prompt_logprobs: Logprobs | None = field(default=None, repr=False, compare=False)
    prompt_scores: Scores | None = field(default=None, repr=False, compare=False)
    events: tuple[RuleEvent, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated token IDs of the first sequence."""
        return self.sequences[0].token_ids

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of each generated token of the first sequence; see `Sequence.tokens`.

        Raises:
            NoTokenTexts: The server did not send them.

        Example:
            >>> client.generate("The capital of France is", max_tokens=3).tokens
            (' Paris', '.', ' It')
        """
        return self.sequences[0].tokens

    @property
    def finish_reason(self) -> str:
        """Why the first sequence ended: "stop", "length" or "rule"."""
        return self.sequences[0].finish_reason

    @property
    def stop_reason(self) -> str:
        """The stop string or the name of the rule that ended the first sequence; empty if none did."""
        return self.sequences[0].stop_reason

    @property
    def logprobs(self) -> Logprobs | None:
        """The log-probabilities of the generated tokens of the first sequence; None unless `logprobs` was given."""
        return self.sequences[0].logprobs

    @property
    def scores(self) -> Scores | None:
        """The scores of the generated tokens of the first sequence; see `Sequence.scores`.

        Example:
            >>> client.generate("Once upon a time", max_tokens=3, probes=[probe]).scores["question"]
            array([0.02, 0.91, 0.33], dtype=float32)
        """
        return self.sequences[0].scores

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Registration:
    """A validated request that waits for its prompt.

    Attributes:
        request_id: The ID of the request.
        expire_time: When the registration expires if it is not used.
        time_to_live: Seconds from the server's answer until then.
        vectors: The request's vectors. The client sends them again if the server has dropped them.
        probes: The request's probes, which name the scores.
        sae: The sparse autoencoder whose features it captures. The client sends it again if the server has dropped it.
    """

    request_id: str
    expire_time: datetime.datetime | None
    time_to_live: float
    vectors: tuple[Vector, ...] = field(default=(), repr=False)
    probes: tuple[Probe, ...] = field(default=(), repr=False)
    sae: SAE | None = field(default=None, repr=False)
