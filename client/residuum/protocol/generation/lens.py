"""The logit lens: the tokens that rows of the residual stream predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, NoTokenTexts
from residuum.protocol.arguments import check_integer
from residuum.protocol.generation.grid_picture import Cell, grid_picture
from residuum.v1 import inference_pb2
from residuum.values.captures.activations import Activations
from residuum.values.tensors.lens import Lens, LensMap
from residuum.values.tensors.numbers import without_torch
from residuum.wire.limits import MAX_MESSAGE_BYTES, MAX_UNEMBEDDED

Rows = npt.NDArray[np.float32]
Transform = Callable[[int, Rows], npt.ArrayLike]
"""Takes a layer and its rows, float32 [positions, hidden_size], and returns as many rows."""

_Number = TypeVar("_Number", bound=np.generic)

_SITES = ("resid_post", "resid_pre", "resid_mid", "attn_out", "mlp_out")
"""The residual stream and the parts of it, for which the final norm is meant."""

_ROOM = 64 << 10
"""Bytes of a message that are left for everything but rows and tokens."""
_TOKEN_BYTES = 5
"""The most bytes that a token ID takes in a message."""
_SHOWN = 3
"""How many tokens the mouse pointer shows."""


@dataclass(frozen=True, eq=False)
class Unembedding:
    """The tokens that rows of the residual stream predict. `...` is the shape of the rows without their last dimension.

    Attributes:
        top_ids: int64 [..., k]: the IDs of the most likely tokens, the most likely first.
        top: float32 [..., k]: their log-probabilities, natural logarithms.
        tokens: float32 [...]: the log-probability of the given token. NaN if none was given.
        ranks: int64 [...]: its rank among all tokens; 1 is the most likely. 0 if none was given.
        texts: The texts of the tokens in `top_ids` by ID; empty if the server has no tokenizer.
    """

    top_ids: npt.NDArray[np.int64]
    top: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]
    texts: Mapping[int, str]

    def text(self, token_id: int) -> str:
        """Return the text of one of `top_ids`; its ID if the text is not known."""
        return self.texts.get(int(token_id), str(token_id))


@dataclass(frozen=True, eq=False)
class LogitLens:
    """What each layer of a model predicts at each position. In Jupyter, it shows as a picture.

    Attributes:
        site: The site of the rows.
        layers: The layers.
        positions: The positions.
        tokens: The text of the token at each position; its ID if the text is not known.
        next_tokens: The token ID that came after each position, int64 [positions]; -1 if none came.
        predicted: The tokens that the rows predict; its arrays are [layers, positions] and [layers, positions, k]. The
            given token is that of `next_tokens`.
    """

    site: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    next_tokens: npt.NDArray[np.int64]
    predicted: Unembedding

    @property
    def top_texts(self) -> list[list[str]]:
        """The text of the most likely token, [layers][positions]."""
        return [[self.predicted.text(token) for token in row] for row in self.predicted.top_ids[..., 0].tolist()]

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """The rank of the token that came, int64 [layers, positions]; 1 is the most likely. 0 where none came."""
        return self.predicted.ranks

    def svg(self) -> str:
        """Return a picture as SVG: the most likely token of each layer and position. Red is certain."""
        title = f"what the model predicts from {self.site}, by layer and position"
        columns = [(f"{at}", visible(token)) for at, token in zip(self.positions, self.tokens, strict=True)]
        return grid_picture(title, self.layers, list(self._cells()), columns, across=72)

    def _repr_svg_(self) -> str:
        return self.svg()

    def _cells(self) -> Iterator[list[Cell]]:
        found, texts = self.predicted, self.top_texts
        for layer in range(len(self.layers)):
            chances = np.exp(found.top[layer])
            yield [
                Cell(float(chances[place, 0]), self._details(layer, place), visible(texts[layer][place]))
                for place in range(len(self.positions))
            ]

    def _details(self, layer: int, place: int) -> str:
        found = self.predicted
        likely = zip(found.top_ids[layer, place, :_SHOWN].tolist(), np.exp(found.top[layer, place]), strict=False)
        shown = ", ".join(f"{found.text(token)!r} {chance:.0%}" for token, chance in likely)
        rank = int(found.ranks[layer, place])
        return f"position {self.positions[place]}: {shown}" + (f"; rank of the next token: {rank}" if rank else "")


def visible(text: str) -> str:
    """Return the text of a token without the spaces around it; a token of white space alone as its escapes."""
    return text.strip() or repr(text)[1:-1].replace(" ", "␣")


def stream_of(acts: Activations) -> Activations:
    """Return the activations at resid_post, if they have this site; otherwise as they are."""
    return acts.select(site="resid_post") if "resid_post" in acts.sites else acts


class UnembedPlan:
    """The messages that ask for the tokens of rows."""

    def __init__(
        self, rows: npt.ArrayLike, top_k: int, tokens: npt.ArrayLike | None, via: LensMap | None = None
    ) -> None:
        """Plan to send rows.

        Args:
            rows: [..., hidden_size].
            top_k: How many tokens to return for each row.
            tokens: A token for each row, [...]; -1 is none. None: none.
            via: The map that the server applies first; None: none.

        Raises:
            InvalidRequest: The rows or tokens are no numbers, the rows are one number or empty, `top_k` is negative or
                too large, the shapes differ, or the map is for rows of another width.
            TypeError: `top_k` is no whole number, or `via` is no map.
        """
        array = _array("rows", rows, np.float32)
        if array.ndim == 0 or not array.size:
            raise _invalid("rows= takes an array [..., hidden_size] that is not empty.")
        top_k = check_integer("top_k", top_k, 0, MAX_UNEMBEDDED - 1)
        if via is not None:
            if not isinstance(via, LensMap):
                raise TypeError(f"via= takes a residuum.LensMap, such as lens[12], not {type(via).__name__}.")
            via.check_width(array.shape[-1])
        self._via = via
        self._shape = array.shape[:-1]
        self._rows = np.ascontiguousarray(array.reshape(-1, array.shape[-1]), dtype="<f4")
        self._top_k = top_k
        self._tokens = np.full(len(self._rows), -1, np.int64)
        if tokens is not None:
            numbers = _array("tokens", tokens, np.float64)
            if not np.array_equal(numbers, np.trunc(numbers)):  # NaN does not equal itself
                raise _invalid("tokens= takes whole numbers.")
            given = _array("tokens", tokens, np.int64)
            if given.shape != self._shape:
                raise _invalid(
                    f"tokens= has the shape {given.shape}; it must have one token for each row {self._shape}."
                )
            self._tokens = given.reshape(-1)

    def requests(self) -> Iterator[inference_pb2.UnembedRequest]:
        """Return the messages, each of as many rows as fit."""
        row_bytes = self._rows.shape[1] * 4 + _TOKEN_BYTES
        step = max(1, min((MAX_MESSAGE_BYTES - _ROOM) // row_bytes, MAX_UNEMBEDDED // (self._top_k + 1)))
        for first in range(0, len(self._rows), step):
            part = slice(first, first + step)
            yield inference_pb2.UnembedRequest(
                rows=self._rows[part].tobytes(),
                num_top=self._top_k,
                token_ids=np.maximum(self._tokens[part], 0).tolist() if self._has_tokens else [],
                map=None if self._via is None else self._via.message,
            )

    @cached_property
    def _has_tokens(self) -> bool:
        return bool((self._tokens >= 0).any())

    def result(self, answers: Sequence[inference_pb2.UnembedResponse]) -> Unembedding:
        """Return the result from the answers to `requests`.

        Raises:
            InvalidRequest: The rows have another width than the residual stream.
        """
        given, count = self._tokens >= 0, len(self._rows)
        top_ids = _joined(answers, lambda answer: answer.logprobs.top_token_ids, np.int64)
        if len(top_ids) != count * self._top_k:  # the server gets only bytes, and found other rows in them
            raise _invalid(
                f"rows= has {count} rows of {self._rows.shape[1]} elements, but the residual stream has another width: "
                f"these bytes hold {len(top_ids) // self._top_k} rows of it. Give [..., hidden_size]; a matrix may "
                "have to be transposed."
            )
        tokens, ranks = np.full(count, np.nan, np.float32), np.zeros(count, np.int64)
        if self._has_tokens:
            tokens[given] = _joined(answers, lambda answer: answer.logprobs.tokens, np.float32)[given]
            ranks[given] = _joined(answers, lambda answer: answer.ranks, np.int64)[given]
        top = _joined(answers, lambda answer: answer.logprobs.top, np.float32)
        return Unembedding(
            top_ids.reshape(*self._shape, self._top_k),
            top.reshape(*self._shape, self._top_k),
            tokens.reshape(self._shape),
            ranks.reshape(self._shape),
            {item.token_id: item.text for answer in answers for item in answer.texts},
        )


class LensPlan:
    """The rows and tokens of a logit lens."""

    def __init__(self, acts: Activations, transform: Transform | None, lens: Lens | None = None) -> None:
        """Take the selected rows of activations.

        Args:
            acts: The activations. Their site must be the residual stream, or what a layer adds to it.
            transform: Changes the rows of each layer before they are sent.
            lens: Changes the rows of each layer on the server.

        Raises:
            InvalidRequest: The rows are of another site, or have another width, also than `lens`; `transform` returns
                rows of another shape; or both are given.
            UnknownLayer: The lens lacks a layer.
            TypeError: `lens` is no lens.
        """
        if acts.site not in _SITES:
            raise InvalidRequest(
                f"logit_lens: rows at {acts.site} are not of the residual stream, even if they are as wide. Choose "
                f"among {', '.join(_SITES)}; acts.select(site=...) selects one.",
                reason="INVALID_FIELD",
            )
        if acts.width != acts.hidden_size or not acts.manifest.format_at(acts.site).decodes_to_rows:
            raise InvalidRequest(
                f"logit_lens: rows at {acts.site} have {acts.width} elements (encoding {acts.encoding}), and the "
                f"residual stream has {acts.hidden_size}. Select a site of the stream, such as "
                "acts.select(site='resid_post'), and capture it with an encoding that keeps whole rows.",
                reason="INVALID_FIELD",
            )
        self._acts = acts
        self._rows = acts.stack()
        self._maps: list[LensMap | None] = []
        if lens is not None:
            if not isinstance(lens, Lens):
                raise TypeError(f"lens= takes a residuum.Lens, not {type(lens).__name__}.")
            if transform is not None:
                raise _invalid("Give either lens=, which the server applies, or transform=, not both.")
            self._maps = [lens.at(acts.site, layer) for layer in acts.layers]
            for item in filter(None, self._maps):
                item.check_width(acts.hidden_size)
        if transform is not None:
            of_layers = zip(acts.layers, self._rows, strict=True)
            changed = [without_torch(transform(layer, rows)) for layer, rows in of_layers]
            self._rows = np.asarray(changed, dtype=np.float32)
            if self._rows.shape != (len(acts.layers), len(acts.positions), acts.hidden_size):
                raise _invalid("transform= must return as many rows as it gets, of the same width.")

    @property
    def parts(self) -> Iterator[tuple[Rows, npt.NDArray[np.int64], LensMap | None]]:
        """What is unembedded: rows [layers, positions, hidden_size], the tokens that came after them, and their map.

        Tokens are int64 [layers, positions]; -1 if none came. With a lens, each layer is a part of its own.
        """
        following = self._acts.next_token_ids
        if not self._maps:
            yield self._rows, np.broadcast_to(following, self._rows.shape[:2]), None
        for rows, item in zip(self._rows, self._maps, strict=False):
            yield rows[None], following[None], item

    def result(self, parts: Sequence[Unembedding]) -> LogitLens:
        """Return the result from the tokens that the rows of each of `parts` predict."""
        predicted = Unembedding(
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top=np.concatenate([part.top for part in parts]),
            tokens=np.concatenate([part.tokens for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
            texts={token: text for part in parts for token, text in part.texts.items()},
        )
        acts = self._acts
        try:
            tokens = acts.tokens
        except NoTokenTexts:
            tokens = tuple(map(str, acts.token_ids))
        positions = tuple(acts.positions.tolist())
        return LogitLens(acts.site, acts.layers, positions, tokens, acts.next_token_ids, predicted)


def _joined(
    answers: Sequence[inference_pb2.UnembedResponse], field: Callable[..., Sequence[float]], dtype: type[_Number]
) -> npt.NDArray[_Number]:
    return np.concatenate([np.array(field(answer), dtype) for answer in answers])


def _array(name: str, given: npt.ArrayLike, dtype: type[_Number]) -> npt.NDArray[_Number]:
    try:
        return np.asarray(without_torch(given), dtype=dtype)
    except (TypeError, ValueError) as error:
        raise _invalid(f"{name}= is not an array of numbers: {error}.") from None


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(problem, reason="INVALID_FIELD")
