"""Log-probabilities of tokens, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from residuum.v1 import inference_pb2


@dataclass(frozen=True, eq=False)
class Logprobs:
    """The log-probabilities of tokens, and of the k tokens that were most likely in place of each.

    They are natural logarithms of the probabilities that the model gave, before temperature, penalties, biases and all
    other sampling parameters. A token that may not be sampled still has its own.

    Attributes:
        tokens: float32 [tokens]: the log-probability of each token. NaN for the first token of a prompt: nothing
            predicts it.
        top_ids: int64 [tokens, k]: the IDs of the most likely tokens in place of each token, the most likely first. -1
            for the first token of a prompt.
        top: float32 [tokens, k]: their log-probabilities. NaN for the first token of a prompt.

    Example:
        >>> reply = client.generate("The capital of France is", max_tokens=3, logprobs=2)
        >>> reply.logprobs.tokens.shape, reply.logprobs.top.shape
        ((3,), (3, 2))
    """

    tokens: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int64]
    top: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_protos(cls, protos: Iterable[inference_pb2.Logprobs], *, of_prompt: bool = False) -> Logprobs:
        """Return the value of messages that continue each other, at least one.

        Raises:
            ValueError: The lengths in a message do not fit each other.
        """
        parts = [_arrays(proto) for proto in protos]
        if of_prompt:
            k = parts[0][1].shape[1]
            parts.insert(0, (_nans(1), np.full((1, k), -1, np.int64), _nans(1, k)))
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _nans(*shape: int) -> npt.NDArray[np.float32]:
    return np.full(shape, np.nan, np.float32)


def _arrays(
    proto: inference_pb2.Logprobs,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    shape = len(proto.tokens), proto.num_top
    return (
        np.array(proto.tokens, np.float32),
        np.array(proto.top_token_ids, np.int64).reshape(shape),
        np.array(proto.top, np.float32).reshape(shape),
    )
