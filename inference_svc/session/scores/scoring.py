"""The scores of one request: where they come from, and what clients get."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np

from inference_svc.admission.sampling import max_new_tokens, num_sequences
from inference_svc.session.scores.probe_groups import groups_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy.typing as npt

    from inference_svc.admission.specs import SharedSpec
    from inference_svc.engine.streams import Delta, Scored
    from inference_svc.resources.score_board import ScoreBoard
    from inference_svc.session.scores.probe_groups import ProbeGroups
    from inference_svc.taps.plan import ScoreRegion
    from residuum.v1 import inference_pb2


_QUICK_SCORES = 1 << 14
"""Products whose scores take less than about 10 ms."""
_PIECE_SCORES = 1 << 18
"""Products that a thread computes at once. It bounds the memory for float64, and what is left to do after an abort."""


class SequenceScores:
    """The scores of one sequence, in the order of its tokens."""

    def __init__(
        self, board: ScoreBoard, region: ScoreRegion, probes: ProbeGroups, prompt_tokens: int, *, prompt: bool
    ) -> None:
        """Read the scores of a sequence.

        Args:
            board: The board with the scores.
            region: The sequence's place on it.
            probes: Computes the scores.
            prompt_tokens: The number of tokens in the prompt.
            prompt: Whether the scores of the prompt go to the caller with this sequence.
        """
        self._board = board
        self.region = region
        self.is_used = False
        """Whether the engine knows the region, so that its steps may write to it."""
        self._probes = probes
        self._next = prompt_tokens - 1
        self._prompt_tokens = prompt_tokens if prompt else 0
        self._reply = probes.begin()
        self._has_pooled_prompt = not probes.has_pools

    async def add_to(self, delta: Delta) -> Delta:
        """Return a delta with the scores of its tokens, and those of the prompt if it is the first."""
        count, first = len(delta.token_ids), self._next
        self._next += count
        if count and not self._has_pooled_prompt:
            await self._pool_prompt(first)
        if count:
            products = await self._board.read(self.region, first, count)
            delta = delta.with_scores(self._probes.scores(products, self._reply))
        if self._prompt_tokens:
            prompt = await self._board.read(self.region, 0, self._prompt_tokens)
            self._prompt_tokens = 0
            delta = delta._replace(prompt_scores=await self._of_prompt(prompt))
        return delta

    async def _of_prompt(self, products: npt.NDArray[np.float32]) -> Scored:
        """Return the scores of the prompt. Those of a long one take a thread, so that no other request waits."""
        phase = self._probes.begin()
        if products.size <= _QUICK_SCORES:
            return self._probes.scores(products, phase)
        parts = [await asyncio.to_thread(self._probes.scores, piece, phase) for piece in _pieces(products)]
        return tuple(map(np.concatenate, zip(*parts, strict=True)))

    async def _pool_prompt(self, count: int) -> None:
        """Add the prompt's positions before the last one, which is the reply's first, to the reply's pools."""
        self._has_pooled_prompt = True
        products = await self._board.read(self.region, 0, count)
        if products.size <= _QUICK_SCORES:
            self._probes.pool(products, self._reply)
            return
        for piece in _pieces(products):
            await asyncio.to_thread(self._probes.pool, piece, self._reply)


def _pieces(products: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """Divide the products of a prompt, float32 [positions, columns], into what a thread computes at once."""
    rows = max(_PIECE_SCORES // products.shape[1], 1)
    return [products[first : first + rows] for first in range(0, len(products), rows)]


@asynccontextmanager
async def scoring(
    board: ScoreBoard | None,
    spec: SharedSpec,
    prompt_tokens: int,
    sampling: inference_pb2.SamplingParameters,
) -> AsyncIterator[Sequence[SequenceScores]]:
    """Hold the place for the scores of a request's sequences; yield one for each, or none without probes.

    Raises:
        Failure: There is no room now, or there is never enough for all sequences. Raised when the context is entered.
    """
    if board is None or spec.probes is None:
        yield ()
        return
    new = max(max_new_tokens(sampling), 1)
    probes = groups_of(spec)
    shows_prompt = [spec.probes.score_prompt and index == 0 for index in range(num_sequences(sampling))]
    # How many positions before the prompt's last one, whose score is the first token's, are scored for each sequence.
    before = [prompt_tokens - 1 if shows or probes.has_pools else 0 for shows in shows_prompt]
    board.check_size((sum(before) + len(before) * new) * probes.columns, sum(before) * probes.columns)
    held: list[SequenceScores] = []
    try:
        for shows, count in zip(shows_prompt, before, strict=True):
            region = board.take(prompt_tokens - 1 - count, count + new, probes.columns)
            held.append(SequenceScores(board, region, probes, prompt_tokens, prompt=shows))
        yield held
    finally:
        for item in held:
            board.give_back(item.region, rests=item.is_used)
