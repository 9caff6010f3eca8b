"""A patch sweep: what is sent to find out which rows of one prompt make the model answer as it does for another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, NoTokenTexts
from residuum.protocol.generation.grid_picture import Cell, grid_picture
from residuum.values.captures.activations import Activations
from residuum.values.replies.generation import Reply
from residuum.values.steering.operations import Set
from residuum.values.tensors.vector import Vector

Grid = npt.NDArray[np.float64]
Metric = Literal["logit_difference", "logprob"]
_METRICS = frozenset({"logit_difference", "logprob"})


@dataclass(frozen=True, eq=False)
class PatchSweep:
    """How the answer to a prompt changes when one of its rows is replaced by that of another prompt.

    The *clean* prompt gives the rows, the *corrupted* one gets them. In Jupyter, the result shows as a picture.

    Attributes:
        site: The site of the rows.
        layers: The layers.
        positions: The positions.
        clean_tokens: The text of the clean prompt's token at each position; its ID if the text is not known.
        corrupted_tokens: The same of the corrupted prompt.
        answer: The ID of the token whose log-probability is measured.
        other: The ID of the token whose log-probability is subtracted from it; None: none.
        clean: The score of the clean prompt: the log-probability of `answer` minus that of `other` (natural
            logarithms). Because both follow from the same logits, this is also the difference of their logits.
        corrupted: The score of the corrupted prompt.
        scores: float64 [layers, positions]: its score when the row of a layer and position is patched.
    """

    site: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    clean_tokens: tuple[str, ...]
    corrupted_tokens: tuple[str, ...]
    answer: int
    other: int | None
    clean: float
    corrupted: float
    scores: Grid

    @property
    def recovered(self) -> Grid:
        """The share that each row brings back, float64 [layers, positions]; 1 is the clean score, 0 the corrupted."""
        with np.errstate(divide="ignore", invalid="ignore"):  # both prompts may have the same score
            shares: Grid = (self.scores - self.corrupted) / np.float64(self.clean - self.corrupted)
        return shares

    def svg(self) -> str:
        """Return a picture of `recovered` as SVG: layers from bottom to top, positions from left to right."""
        title = f"share of the answer that a row of {self.site} brings back"
        tokens = zip(self.corrupted_tokens, self.clean_tokens, strict=True)
        columns = [[before.strip()] + [f"← {after.strip()}"] * (before != after) for before, after in tokens]
        return grid_picture(title, self.layers, _cells(self), columns)

    def _repr_svg_(self) -> str:
        return self.svg()


@dataclass(frozen=True)
class SweepPlan:
    """The requests of a patch sweep, once both prompts have been run."""

    acts: Activations
    """The captured rows of the clean prompt."""
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    clean: tuple[int, ...]
    """The clean prompt's token IDs."""
    corrupted: tuple[int, ...]
    """The corrupted prompt's token IDs."""
    corrupted_tokens: tuple[str, ...]
    answer: int
    other: int | None

    @classmethod
    def of(
        cls,
        clean: Reply,
        corrupted: Reply,
        acts: Activations,
        corrupted_acts: Activations,
        *,
        metric: Metric,
        answer: int | None,
        other: int | None,
    ) -> SweepPlan:
        """Return the plan.

        Args:
            clean: The reply to the clean prompt.
            corrupted: The reply to the corrupted prompt.
            acts: The captured rows of the clean prompt, at the site to patch.
            corrupted_acts: Captured rows of the corrupted prompt, at the same positions.
            metric: "logit_difference", or "logprob" to score `answer` alone.
            answer: See `PatchSweep`. None: the first token of the clean reply.
            other: See `PatchSweep`. None: the first token of the corrupted reply.

        Raises:
            InvalidRequest: The prompts differ in length, the metric is unknown or needs no `other`, or `answer` and
                `other` are the same token.
            TypeError: `answer` or `other` is no token ID.
        """
        if metric not in _METRICS or (metric == "logprob" and other is not None):
            raise _invalid(
                'metric= takes "logit_difference", or "logprob", which scores answer= alone, without other=.'
            )
        first, second = clean.prompt_token_ids, corrupted.prompt_token_ids
        if len(first) != len(second):
            raise _invalid(
                f"the clean prompt has {len(first)} tokens and the corrupted one {len(second)}. A row is patched at "
                "the position where it was captured, so write prompts of the same length."
            )
        answer = clean.token_ids[0] if answer is None else _token("answer", answer)
        if metric == "logit_difference":
            other = corrupted.token_ids[0] if other is None else _token("other", other)
        if answer == other:
            raise _invalid(
                f"answer and other are the same token ({answer}). If they are not given, they are the first tokens of "
                "the model's replies to both prompts; give answer= or other=."
            )
        positions = tuple(int(position) for position in acts.positions)
        return cls(acts, acts.layers, positions, first, second, _tokens(corrupted_acts), answer, other)

    @cached_property
    def patches(self) -> list[list[Set]]:
        """The steering of each cell, layer by layer."""
        return [
            Set.from_activations(self.acts, layers=[layer], positions=[position])
            for layer in self.layers
            for position in self.positions
        ]

    def requests(self) -> Iterator[tuple[list[int], list[Set] | None]]:
        """Return the prompt and the steering of each request. The last token of each prompt is the one to score."""
        for token in self._scored():
            yield [*self.clean, token], None
            yield [*self.corrupted, token], None
            for patch in self.patches:
                yield [*self.corrupted, token], patch

    @cached_property
    def vectors(self) -> list[Vector]:
        """All vectors, each once."""
        return list(dict.fromkeys(vector for (patch,) in self.patches for vector in patch.vectors))

    def result(self, replies: Sequence[Reply]) -> PatchSweep:
        """Return the result from the replies to `requests`, which have log-probabilities of their prompts."""
        scores = np.array([float(reply.prompt_logprobs.tokens[-1]) for reply in replies if reply.prompt_logprobs])
        of_tokens = scores.reshape(len(self._scored()), -1)
        differences = of_tokens[0] if self.other is None else of_tokens[0] - of_tokens[1]
        return PatchSweep(
            site=self.acts.site,
            layers=self.layers,
            positions=self.positions,
            clean_tokens=_tokens(self.acts),
            corrupted_tokens=self.corrupted_tokens,
            answer=self.answer,
            other=self.other,
            clean=float(differences[0]),
            corrupted=float(differences[1]),
            scores=differences[2:].reshape(len(self.layers), len(self.positions)),
        )

    def _scored(self) -> list[int]:
        return [self.answer] if self.other is None else [self.answer, self.other]


def _cells(sweep: PatchSweep) -> list[list[Cell]]:
    return [
        [Cell(share, f"position {at}: {share:.2f}") for share, at in zip(row, sweep.positions, strict=True)]
        for row in sweep.recovered.tolist()
    ]


def _token(name: str, given: object) -> int:
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(
            f"patch_sweep: {name}= takes a token ID, not {given!r}. Those of a text are in "
            "client.generate(text, max_tokens=0).prompt_token_ids."
        )
    return int(given.__index__())


def _tokens(acts: Activations) -> tuple[str, ...]:
    try:
        return acts.tokens
    except NoTokenTexts:
        return tuple(map(str, acts.token_ids))


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"patch_sweep: {problem}", reason="INVALID_FIELD")
