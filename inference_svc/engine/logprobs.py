"""Log-probabilities of tokens, as vLLM's outputs give them and as the contract sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from residuum.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

_PART_BYTES = 1 << 20
"""The largest size of the log-probabilities in one message, well below the limit of a message."""

_ELEMENT_BYTES = 9
"""Bytes that one of the most likely tokens takes in a message: a float, and a token ID as a varint."""


class TokenLogprobs(NamedTuple):
    """The log-probabilities of consecutive tokens, and of the k most likely tokens in place of each."""

    tokens: npt.NDArray[np.float32]
    """float32 [tokens]."""
    top_ids: npt.NDArray[np.uint32]
    """uint32 [tokens, k], the most likely first."""
    top: npt.NDArray[np.float32]
    """float32 [tokens, k]."""

    @classmethod
    def from_vllm(cls, token_ids: Sequence[int], positions: Sequence[Mapping[int, Any]], num_top: int) -> TokenLogprobs:
        """Return the log-probabilities of tokens.

        Args:
            token_ids: The tokens.
            positions: For each token, vLLM's log-probabilities: the token's own and the most likely ones, by token ID.
            num_top: How many of the most likely tokens are listed.
        """
        made = cls(
            np.empty(len(token_ids), np.float32),
            np.empty((len(token_ids), num_top), np.uint32),
            np.empty((len(token_ids), num_top), np.float32),
        )
        for at, (token_id, found) in enumerate(zip(token_ids, positions, strict=True)):
            made.tokens[at] = found[token_id].logprob
            # The token's own entry has its rank among all tokens, which is above `num_top` if it is not one of these.
            ranked = sorted((entry.rank, key) for key, entry in found.items() if entry.rank <= num_top)
            for rank, (_, key) in enumerate(ranked[:num_top]):
                made.top_ids[at, rank] = key
                made.top[at, rank] = found[key].logprob
        return made

    def followed_by(self, other: TokenLogprobs) -> TokenLogprobs:
        """Return these log-probabilities and later ones together."""
        return TokenLogprobs(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))

    def first(self, count: int) -> TokenLogprobs:
        """Return those of the first `count` tokens."""
        return TokenLogprobs(self.tokens[:count], self.top_ids[:count], self.top[:count])

    def parts(self) -> Iterator[slice]:
        """Yield slices of the tokens, in order, whose log-probabilities fit into one message each. At least one."""
        size = max(_PART_BYTES // (_ELEMENT_BYTES * (self.top.shape[1] + 1)), 1)
        for first in range(0, max(len(self.tokens), 1), size):
            yield slice(first, first + size)

    def part(self, tokens: slice) -> inference_pb2.Logprobs:
        """Return the message with the log-probabilities of some of the tokens."""
        return inference_pb2.Logprobs(
            tokens=self.tokens[tokens].tolist(),
            num_top=self.top.shape[1],
            top_token_ids=self.top_ids[tokens].ravel().tolist(),
            top=self.top[tokens].ravel().tolist(),
        )
