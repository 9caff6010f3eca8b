"""The independent reference of the conformance suite: rows, logits and hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.conformance import reference
from bench.conformance.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.conformance.reference import Changes, Rows


class Reference(reference.Reference):
    """A Llama run by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        # A hook before this norm can change the stream between attention and MLP.
        super().__init__(replace(ARCHITECTURES["llama"], middle=("post_attention_layernorm",)), folder)

    def hidden_states(self, token_ids: Sequence[int]) -> Rows:
        """Return transformers' hidden_states, [layers + 1, positions, hidden].

        The first are the embeddings; the last have passed the final norm.
        """
        batch = torch.tensor([[int(token) for token in token_ids]])
        with torch.inference_mode():
            output = self.model.base_model(batch, use_cache=False, output_hidden_states=True)
        states: Rows = torch.cat(output.hidden_states).numpy()
        return states

    def final_norm(self, rows: Rows) -> Rows:
        """Return rows after the model's final norm."""
        with torch.inference_mode():
            normed: Rows = self.model.model.norm(torch.from_numpy(rows)).numpy()
        return normed

    def output_weights(self, token: int) -> Rows:
        """Return the output weights of a token, float32 [hidden]. Their product with the hidden state is its logit."""
        weights: Rows = self.model.lm_head.weight[token].detach().numpy().copy()
        return weights

    def all_output_weights(self) -> Rows:
        """Return the output weights of all tokens, float32 [vocabulary, hidden]."""
        weights: Rows = self.model.lm_head.weight.detach().numpy()
        return weights

    def logits(self, token_ids: Sequence[int], changes: Changes | None = None) -> Rows:
        """Return the logits of the token after each position, float64 [positions, vocabulary]."""
        with torch.inference_mode():
            logits: Rows = self.model.lm_head(self.run(token_ids, changes)).double().numpy()
        return logits

    def shortfall(self, prompt: Sequence[int], reply: Sequence[int], changes: Changes | None = None) -> float:
        """Return the largest shortfall of a greedily generated token's logit from the largest logit.

        It is 0 if every token is the most likely one after those before it. Tokens are not compared, because two tokens
        may be equally likely.
        """
        with torch.inference_mode():
            logits = self.model.lm_head(self.run([*prompt, *reply][:-1], changes)[len(prompt) - 1 :])
            chosen = logits.gather(1, torch.tensor([list(reply)]).T)[:, 0]
            return float((logits.amax(dim=1) - chosen).max())


def relative_error(got: Rows, expected: Rows) -> float:
    """Return the largest distance of a row from its reference, relative to the reference's length."""
    return float((np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())
