"""Captured activations, as numpy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.exports.job import Export, export_activations
from residuum.values.blocks import AnyBlock, EncodedBlock
from residuum.values.manifest import Manifest
from residuum.wire.projection import projection_matrix

FloatArray = npt.NDArray[np.float32]


class Activations(Mapping[int, FloatArray]):
    """The captured rows of one request: layer -> float32 [positions, width].

    Rows are kept once, as they were captured; each `acts[layer]` converts or decodes that layer anew into an array of
    your own. The width is the model's hidden size; of "rp8" and "rp" it is the dimensions of the projection, and of
    "project" the number of vectors. "topk8" and "topk" have the full width, with 0 where nothing was kept.
    docs/encodings.md says how far decoded rows are from those that the model computed.

    A request with several sequences or sites holds one such mapping for each: `select` switches, and the first of each
    is selected to begin with.

    Example:
        >>> acts = client.activations(reply.request_id)
        >>> acts
        Activations('req-1f…', complete: 30 layers × 69 positions × 576, bfloat16)
        >>> acts[12].shape
        (69, 576)
        >>> acts.token_ids[:3], acts.positions[:3]
        (array([ 504, 4215, 1834]), array([0, 1, 2]))
    """

    def __init__(
        self,
        manifest: Manifest,
        layers: tuple[int, ...],
        blocks: Mapping[tuple[int, str], AnyBlock],
        selected: tuple[int, str] | None = None,
    ) -> None:
        """Made by `client.activations` and `Activations.from_safetensors`."""
        self._manifest = manifest
        self._layers = layers
        self._blocks = dict(blocks)
        self._selected = selected if selected is not None else next(iter(self._blocks))
        self._row = {layer: index for index, layer in enumerate(layers)}

    @property
    def manifest(self) -> Manifest:
        """What was captured, and whether all of it is there."""
        return self._manifest

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        return self._layers

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that can be selected."""
        return tuple(dict.fromkeys(site for _, site in self._blocks))

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that can be selected."""
        return tuple(dict.fromkeys(sequence for sequence, _ in self._blocks))

    @property
    def site(self) -> str:
        """The selected site."""
        return self._selected[1]

    @property
    def sequence(self) -> int:
        """The selected sequence."""
        return self._selected[0]

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each row in prompt + generated tokens; int64 [positions]."""
        return self._block.positions

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The token at each position; int64 [positions]. -1 where a partial capture does not know it."""
        tokens = np.array(self._all_tokens(), dtype=np.int64)
        positions = self.positions
        known = positions < len(tokens)
        return np.where(known, tokens[np.where(known, positions, 0)] if len(tokens) else -1, -1)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has: `acts.positions < acts.prompt_tokens` are the prompt's rows."""
        return len(self._manifest.prompt_token_ids)

    @property
    def hidden_size(self) -> int:
        """Elements in a row of the residual stream, and in a steering vector."""
        return self._manifest.hidden_size

    @property
    def width(self) -> int:
        """Numbers in a row: `hidden_size`, unless the rows were projected."""
        return self._block.width

    @property
    def encoding(self) -> str:
        """How the rows were captured, such as "raw" or "rp8"."""
        return self._manifest.encoding

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of `raw`: that in which the rows were captured, or float32 if they are decoded."""
        return self._block.dtype

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which rows there are; bool [layers, positions]. All true unless partial rows were allowed; others are NaN."""
        return self._block.present

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as they are kept, all sequences and sites."""
        return sum(block.nbytes for block in self._blocks.values())

    def raw(self, layer: int) -> npt.NDArray[Any]:
        """Return a layer's rows in `dtype`, [positions, width], read-only.

        Of "raw", "fp32", "fp16" and "bf16" these are the captured values themselves, not a copy; of the other encodings
        they are decoded.

        Raises:
            KeyError: The layer is not among `layers`.
        """
        rows = self._block.layer(self._index(layer))
        rows.setflags(write=False)
        return rows

    def encoded(self, layer: int) -> dict[str, npt.NDArray[Any]]:
        """Return a layer's rows as they came from the server, not decoded; read-only.

        - "full8", "rp8": `q` uint8 [positions, width], `scale` and `zero` float32 [positions].
        - "full8" along dimensions: `q` uint8 [positions, width]; `scale` and `zero` float32 [groups, width]; `group`
          int64 [positions], which of them goes with a row.
        - "topk8": `q` uint8 [positions, k], `index` uint16 [positions, k], `scale` and `zero` float32 [positions].
        - "topk": `x` in the model's dtype [positions, k], `index` uint16 [positions, k].
        - "rp", "project": `y` float32 [positions, width].
        - "raw", "fp32", "fp16", "bf16": `x` [positions, width].

        Rows that are not `present` are undefined.

        Raises:
            KeyError: The layer is not among `layers`.

        Example:
            >>> part = acts.encoded(12)
            >>> rows = part["scale"][:, None] * part["q"] + part["zero"][:, None]
        """
        index, block = self._index(layer), self._block
        fields = block.fields(index) if isinstance(block, EncodedBlock) else {"x": block.layer(index)}
        for values in fields.values():
            values.setflags(write=False)
        return fields

    def projection(self) -> FloatArray:
        """Return the matrix that rows of "rp8" and "rp" were multiplied with: float32 [hidden, width].

        What is multiplied with it, too, compares with the rows: inner products, and so cosines and distances, are those
        of the full width, but for the error of the projection (docs/encodings.md).

        Raises:
            InvalidRequest: The rows were not projected at random.

        Example:
            >>> direction = joy.values @ acts.projection()
            >>> scores = acts[12] @ direction  # about the rows of full width @ joy.values
        """
        what = self._manifest
        if self.encoding not in ("rp8", "rp"):
            raise InvalidRequest(
                f"The rows of {what.capture_id} are encoded as {self.encoding!r}, which is no random projection; "
                "those of 'rp8' and 'rp' are.",
                reason="INVALID_FIELD",
            )
        return projection_matrix(what.seed, what.hidden_size, what.dimensions)

    def stack(self, layers: Iterable[int] | None = None) -> FloatArray:
        """Return several layers as one array, float32 [layers, positions, width]; `np.asarray(acts)` is all of them.

        Args:
            layers: Which, in this order; None means all.

        Raises:
            KeyError: A layer is not among `layers`.

        Example:
            >>> acts.stack([0, 15, 29]).mean(axis=1).shape
            (3, 576)
        """
        return self._block.stack([self._index(layer) for layer in (self._layers if layers is None else layers)])

    def select(self, *, sequence: int | None = None, site: str | None = None) -> Activations:
        """Return the same activations with another sequence or site selected. Nothing is copied.

        Raises:
            KeyError: There is no such sequence or site; the message names those that there are.

        Example:
            >>> second = acts.select(sequence=1)
        """
        key = (self.sequence if sequence is None else sequence, self.site if site is None else site)
        if key not in self._blocks:
            here = f"sequences: {list(self.sequences)}, sites: {list(self.sites)}"
            raise KeyError(f"sequence {key[0]} at {key[1]} is not here; {here}")
        return Activations(self._manifest, self._layers, self._blocks, key)

    def to_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a file, in the captured dtype, with the manifest in the metadata.

        The tensors are named `SITE.LAYER` ([positions, hidden]), `SITE.positions` and `SITE.token_ids`, with
        `sequence1/` and so on before those of further sequences. safetensors' own loaders read it.

        What is there already is replaced.

        Raises:
            OSError: The file cannot be written.
        """
        self.export(path, "safetensors", overwrite=True)

    def export(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,  # noqa: A002 - what it is
        *,
        overwrite: bool = False,
    ) -> Export:
        """Write everything to a file of any format; `client.export` does so without having it in memory.

        Args:
            path: Where to write; its suffix names the format if nothing else does.
            format: "safetensors", "npz", "zarr" or "parquet"; see docs/exports.md. The last two need the extras of
                these names.
            overwrite: Replace what is there.

        Raises:
            FileExistsError: Something is there, and may not be replaced.
            ImportError: The format's extra is not installed; the message names it.
            OSError: It cannot be written.
            InvalidRequest: There is no such format.

        Example:
            >>> acts.export("joy.npz").num_bytes
            9537230
        """
        return export_activations(self, path, format, overwrite=overwrite)

    @classmethod
    def from_safetensors(cls, path: str | os.PathLike[str]) -> Activations:
        """Read a file that `to_safetensors` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            InvalidRequest: It is not such a file.
        """
        from residuum.exports.tensor_files import load

        return load(path)

    def blocks(self) -> dict[tuple[int, str], AnyBlock]:
        """Return the rows of every sequence and site."""
        return dict(self._blocks)

    def __getitem__(self, layer: int) -> FloatArray:
        return self._block.layer(self._index(layer)).astype(np.float32)

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, layer: object) -> bool:
        return layer in self._row

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's protocol
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("Activations are converted to float32, which makes a copy; acts.raw(layer) is none.")
        return self.stack().astype(dtype or np.float32, copy=False)

    # A mapping of arrays has no truth of equality; two captures are compared with numpy, layer by layer.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        shape = f"{len(self)} layers × {len(self.positions)} positions × {self.width}"
        more = f", {len(self.sequences)} sequences" if len(self.sequences) > 1 else ""
        others = [site for site in self.sites if site != self.site]
        more += f", site {self.site}" if others or self.site != "resid_post" else ""
        more += f" (also {', '.join(others)})" if others else ""
        what = self._manifest
        more += ", before steering" if what.before_steering else ""
        more += f", {what.reduction} of each phase" if what.reduction != "none" else ""
        kind = what.dtype if self.encoding == "raw" else self.encoding
        return f"Activations({what.capture_id!r}, {what.state}: {shape}{more}, {kind})"

    @property
    def _block(self) -> AnyBlock:
        return self._blocks[self._selected]

    def _index(self, layer: int) -> int:
        try:
            return self._row[layer]
        except (KeyError, TypeError):
            raise KeyError(f"layer {layer!r} is not here; layers: {list(self._layers)}") from None

    def _all_tokens(self) -> tuple[int, ...]:
        outcomes = self._manifest.sequences
        generated = outcomes[self.sequence].generated_token_ids if self.sequence < len(outcomes) else ()
        return self._manifest.prompt_token_ids + generated
