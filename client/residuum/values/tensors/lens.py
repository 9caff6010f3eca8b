"""Lenses: maps that bring rows of each layer into the form that the model's last layer has."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, UnknownLayer
from residuum.v1 import inference_pb2, sae_pb2
from residuum.values.tensors.numbers import without_torch
from residuum.values.tensors.weights import WEIGHT_DTYPES, float_numbers, weight_matrix
from residuum.wire.sae import AS_IS, NO_ACTIVATION, EncoderShape

_FIRST_LAYER = {"resid_post": 0, "resid_pre": 1}
"""For each site that a lens reads: how many layers before is the `resid_post` with the same rows."""


class LensMap:
    """The map of a lens for one layer: it turns a row x into W x + b, or into x + W x + b.

    Args:
        weights: W, [width, width]. float32, float16 or bfloat16 is kept; other dtypes become float32.
        bias: b, [width]; None: zeros.
        is_added: Whether W x + b is added to x, as in a tuned lens.

    Attributes:
        weights: [width, width], read-only.
        bias: float32 [width], read-only.
        is_added: Whether the result is added to the row.

    Raises:
        InvalidRequest: The matrix is not square, the bias has another length, or an element is not finite.
    """

    def __init__(self, weights: npt.ArrayLike, bias: npt.ArrayLike | None = None, *, is_added: bool = False) -> None:
        self.weights = weight_matrix("matrix of a lens", weights, _bad, shape="[width, width]")
        if self.weights.shape[0] != self.weights.shape[1]:
            raise _bad(f"The matrix of a lens must be [width, width], but it is {list(self.weights.shape)}.")
        self.bias = float_numbers("The bias of a lens", bias, self.width, _bad)
        self.is_added = bool(is_added)
        self.shape = EncoderShape.of(self._header())

    @property
    def width(self) -> int:
        """Elements of a row."""
        return int(self.weights.shape[1])

    def apply(self, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return what the map makes of rows [..., width], computed here: float64 for float64 rows, else float32.

        Raises:
            InvalidRequest: The rows have another width.
        """
        x = np.asarray(without_torch(rows))
        x = x if x.dtype == np.float64 else x.astype(np.float32)
        self.check_width(x.shape[-1] if x.ndim else 0)
        mapped: npt.NDArray[Any] = x @ self.weights.T.astype(x.dtype) + self.bias.astype(x.dtype)
        return x + mapped if self.is_added else mapped

    def check_width(self, width: int) -> None:
        """Check that rows of this many elements fit.

        Raises:
            InvalidRequest: They do not.
        """
        if width != self.width:
            raise _bad(
                f"The lens is for rows of {self.width} elements, and these have {width}. Use a lens of this model."
            )

    @functools.cached_property
    def header(self) -> sae_pb2.SAEHeader:
        """The message that describes the map when it is sent, with its digest. The contract calls it an encoder."""
        header = self._header()
        header.digest = self.shape.digest_of(self.parts())
        return header

    @property
    def digest(self) -> bytes:
        """The SHA-256 that identifies weights and bias, 32 bytes; sae.proto defines it."""
        return self.header.digest

    @property
    def message(self) -> inference_pb2.LensMap:
        """The message that names the map."""
        return inference_pb2.LensMap(digest=self.digest, is_added=self.is_added)

    def parts(self) -> list[memoryview]:
        """Return the bytes that are sent, which follow each other: weights and bias. Nothing is copied."""
        return [array.reshape(-1).view(np.uint8).data for array in (self.weights, self.bias)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LensMap):
            return NotImplemented
        return (self.digest, self.is_added) == (other.digest, other.is_added)

    def __hash__(self) -> int:
        return hash((self.digest, self.is_added))

    def __repr__(self) -> str:
        return f"LensMap({self.width} elements, {self.weights.dtype}{', added' * self.is_added})"

    def _header(self) -> sae_pb2.SAEHeader:
        return sae_pb2.SAEHeader(
            features=self.width,
            width=self.width,
            dtype=WEIGHT_DTYPES[self.weights.dtype],
            activation=NO_ACTIVATION,
            normalization=AS_IS,
        )


class Lens(Mapping[int, LensMap | None]):
    """A lens: for each layer, what its rows go through before the model's final norm and unembedding.

    `client.logit_lens(reply, lens=...)` sends its maps and has the server apply them.

    Args:
        maps: The map of each layer, for the rows of `resid_post`. Layer -1 is the stream before layer 0. Instead of a
            `LensMap`, you can give its matrix. None uses the rows as they are: the last layer of a model needs no map.

    Raises:
        InvalidRequest: There is no map, or maps have different widths.

    Example:
        >>> jacobian = residuum.Lens({layer: matrices[layer] for layer in range(29)} | {29: None})
        >>> tuned = residuum.Lens.from_tuned_lens("lens/gpt2")
        >>> client.logit_lens(reply, lens=tuned)
    """

    def __init__(self, maps: Mapping[int, LensMap | npt.ArrayLike | None]) -> None:
        made = {
            _layer(layer): item if item is None or isinstance(item, LensMap) else LensMap(item)
            for layer, item in maps.items()
        }
        widths = {item.width for item in made.values() if item is not None}
        if len(widths) != 1:
            raise _bad(f"A lens needs maps of one width, but these have {sorted(widths) or 'none'}.")
        self._maps = MappingProxyType(dict(sorted(made.items())))
        self.width = min(widths)
        """Elements of a row."""

    @classmethod
    def from_tuned_lens(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Lens:
        """Read a lens of the package tuned-lens (Belrose et al. 2023, arXiv:2303.08112). It needs no torch.

        Its translator i is for `hidden_states[i]` of transformers, the stream before layer i. Here it is the map of
        layer i - 1. The stream after the last layer has no translator and is used as it is.

        Args:
            source: A folder with `config.json` and `params.pt`; or the state dict of the translators, whose names are
                "0.weight", "0.bias", "1.weight" and so on, with or without "layer_translators." before them.

        Raises:
            InvalidRequest: It has another layout; the message says what is missing.
            FileNotFoundError: The folder lacks a file.
        """
        from residuum.exports import lens_files

        return lens_files.from_tuned_lens(source)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Lens:
        """Read a lens that `save` wrote.

        Raises:
            InvalidRequest: The file holds no lens.
            FileNotFoundError: The file does not exist.
        """
        from residuum.exports import lens_files

        return lens_files.load(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the lens to a safetensors file.

        For each layer with a map, the file has the tensors `<layer>.weight`, [width, width] in its dtype, and
        `<layer>.bias`, float32 [width]. The metadata, all text, are `format` ("residuum.lens.v1"), `added` (the layers
        whose map is added to the rows, separated by commas) and `as_is` (the layers without a map).

        Raises:
            OSError: The file cannot be written.
        """
        from residuum.exports import lens_files

        lens_files.save(self, path)

    def at(self, site: str, layer: int) -> LensMap | None:
        """Return the map for the rows of a layer at a site; None: the rows are used as they are.

        Args:
            site: "resid_post" or "resid_pre".
            layer: The layer.

        Raises:
            InvalidRequest: A lens is not for this site.
            UnknownLayer: The lens has no map for these rows.
        """
        if site not in _FIRST_LAYER:
            raise _bad(f"A lens is for rows of resid_post or resid_pre, not of {site}. Select one of these sites.")
        own = layer - _FIRST_LAYER[site]
        if own not in self._maps:
            raise UnknownLayer(
                f"The lens has no map for the rows of {site}.{layer}, which belong to its layer {own}. It has the "
                f"layers {', '.join(map(str, self._maps))}. Read rows of those, or give None as the map of layer {own} "
                "to use its rows as they are.",
                reason="INVALID_FIELD",
            )
        return self._maps[own]

    def __getitem__(self, layer: int) -> LensMap | None:
        return self._maps[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def __repr__(self) -> str:
        layers = tuple(self._maps)
        return f"Lens(layers {layers[0]} to {layers[-1]}, {self.width} elements)"


def _layer(layer: object) -> int:
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise TypeError(f"The layer of a map must be a whole number, not {layer!r}.")
    number = int(layer.__index__())
    if number < -1:
        raise _bad(f"The layer {number} does not exist. Layers count from 0; -1 is the stream before layer 0.")
    return number


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="INVALID_FIELD")
