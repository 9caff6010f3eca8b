"""Captured activations, as numpy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.exports.job import Export, export_activations
from residuum.values.captures.blocks import AnyBlock, EncodedBlock
from residuum.values.captures.manifest import Manifest
from residuum.values.captures.spans import MessageSpan, SpanLike, places_in
from residuum.values.captures.tokens import offsets_of
from residuum.values.probes.scores import Scores
from residuum.values.selections.points import parse_point
from residuum.values.tensors.vector import Vector
from residuum.wire.rows.projection import projection_matrix

FloatArray = npt.NDArray[np.float32]


class Activations(Mapping[int, FloatArray]):
    """The captured rows of one request: layer -> float32 [positions, width].

    The rows are stored once, as captured. Each `acts[layer]` converts or decodes the layer into a new array. The width
    is the model's hidden size; for "rp8" and "rp" it is the dimensions of the projection, and for "project" the number
    of vectors. "topk8" and "topk" rows have the full width, and "sae" rows a number for each feature, with 0 for what
    was not kept. docs/encodings.md says how far decoded rows are from those that the model computed.

    A request with several sequences or sites has one such mapping for each. At first the first sequence and site are
    selected; `select` returns another.

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
        layers: Mapping[str, tuple[int, ...]],
        blocks: Mapping[tuple[int, str], AnyBlock],
        selected: tuple[int, str] | None = None,
    ) -> None:
        """Use `client.activations` or `Activations.from_safetensors` instead. `layers` are those of each site."""
        self._manifest = manifest
        self._site_layers = dict(layers)
        self._blocks = dict(blocks)
        self._selected = selected if selected is not None else next(iter(self._blocks))
        self._layers = self._site_layers[self._selected[1]]
        self._row = {layer: index for index, layer in enumerate(self._layers)}

    @property
    def manifest(self) -> Manifest:
        """The capture's manifest: what was captured, what is missing, and why."""
        return self._manifest

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the selected site, ascending."""
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
        """The position of each row, counted over prompt and generated tokens; int64 [positions]."""
        return self._block.positions

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The token ID at each position; int64 [positions]. It is -1 where a partial capture does not know it."""
        tokens = np.array(self._all_tokens(), dtype=np.int64)
        positions = self.positions
        known = positions < len(tokens)
        return np.where(known, tokens[np.where(known, positions, 0)] if len(tokens) else -1, -1)

    @property
    def next_token_ids(self) -> npt.NDArray[np.int64]:
        """The ID of the token that came after each position; int64 [positions]. It is -1 where none came."""
        tokens = np.array([*self._all_tokens(), -1], dtype=np.int64)
        following: npt.NDArray[np.int64] = tokens[np.minimum(self.positions + 1, len(tokens) - 1)]
        return following

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of the token at each position; empty where a partial capture does not know the token.

        A token's text is what it adds to the text of the tokens before it; special tokens are shown. If a character
        takes several tokens, the last of them has it, and the others have an empty text.

        Raises:
            NoTokenTexts: The texts are not known; the message says why.

        Example:
            >>> for token, score in zip(acts.tokens, acts[12] @ direction):
            ...     print(repr(token), score)
        """
        texts = self._manifest.tokens(self.sequence)
        return tuple(texts[position] if position < len(texts) else "" for position in self.positions.tolist())

    @property
    def scores(self) -> Scores | None:
        """The scores of the rows at each position by the names of the request's probes, as they were computed.

        They are float32 [positions], or [positions, outputs] if the probe has several outputs. They are NaN where the
        request did not score the row: in the prompt, except for its last position, unless `score_prompt` was given.
        They are not the scores of `rows` if the capture has a reduction or takes rows before steering.
        None if the request had no probes, or too many scores to be stored: see `Manifest.scores`.

        Example:
            >>> for position, score in zip(acts.positions, acts.scores["question"]):
            ...     print(position, score)
        """
        of_reply, of_prompt = self._manifest.scores(self.sequence), self._manifest.prompt_scores
        if of_reply is None:
            return None
        first, found = self.prompt_tokens - 1, Scores()
        for name, scores in of_reply.items():
            # The row at the prompt's last position is that of the first token.
            before = of_prompt[name] if of_prompt else np.full((first, *scores.shape[1:]), np.nan, np.float32)
            known = np.concatenate([before[:first], scores]) if len(scores) else before
            padding = np.full((int(self.positions.max(initial=0)) + 1, *scores.shape[1:]), np.nan, np.float32)
            padding[: len(known)] = known[: len(padding)]
            found[name] = padding[self.positions]
        return found

    @property
    def text(self) -> str:
        """The text of the whole prompt and of the reply, with special tokens: of all tokens, whatever the positions.

        Raises:
            NoTokenTexts: The texts are not known; the message says why.
        """
        return "".join(self._manifest.tokens(self.sequence))

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where the text of each position's token begins and ends in `text`, in characters; int64 [positions, 2].

        Raises:
            NoTokenTexts: The texts are not known; the message says why.

        Example:
            >>> start, end = acts.offsets[5]
            >>> acts.text[start:end] == acts.tokens[5]
            True
        """
        texts = self._manifest.tokens(self.sequence)
        offsets: npt.NDArray[np.int64] = offsets_of((*texts, ""))[np.minimum(self.positions, len(texts))]
        return offsets

    @property
    def spans(self) -> tuple[MessageSpan, ...]:
        """The positions of the messages of a conversation, in order. The last one is the assistant's, with the reply.

        A span has the tokens of a message's content, without those that the chat template puts around it. If the prompt
        ends with a message of the assistant, the reply continues it, and both are one span.

        Raises:
            NoMessageSpans: The prompt is not a conversation, or the positions are not known; the message says why.

        Example:
            >>> for span in acts.spans:
            ...     print(span.role, span.first, span.last)
            system 3 8
            user 13 20
            assistant 25 48
        """
        return self._manifest.spans(self.sequence)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt. The prompt's rows are those with `acts.positions < acts.prompt_tokens`."""
        return len(self._manifest.prompt_token_ids)

    @property
    def hidden_size(self) -> int:
        """Elements of a row of the residual stream, and of a steering vector."""
        return self._manifest.hidden_size

    @property
    def width(self) -> int:
        """Elements of a row at the selected site: `hidden_size`, unless the site has another or rows were projected."""
        return self._block.width

    @property
    def encoding(self) -> str:
        """The encoding of the captured rows, such as "raw" or "rp8"."""
        return self._manifest.encoding

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of `raw`: the dtype of the captured rows, or float32 if they must be decoded."""
        return self._block.dtype

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which rows are present; bool [layers, positions]. Only partial captures lack rows, and these read as NaN."""
        return self._block.present

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in memory, of all sequences and sites."""
        return sum(block.nbytes for block in self._blocks.values())

    def raw(self, layer: int) -> npt.NDArray[Any]:
        """Return a layer's rows in `dtype`, [positions, width], read-only.

        For "raw", "fp32", "fp16" and "bf16" this returns the captured values without a copy. Rows of other encodings
        are decoded.

        Raises:
            KeyError: The layer is not among `layers`.
        """
        rows = self._block.layer(self._index(layer))
        rows.setflags(write=False)
        return rows

    def encoded(self, layer: int) -> dict[str, npt.NDArray[Any]]:
        """Return a layer's rows as the server sent them, without decoding; read-only.

        - "full8", "rp8": `q` uint8 [positions, width], `scale` and `zero` float32 [positions].
        - "full8" along dimensions: `q` uint8 [positions, width]; `scale` and `zero` float32 [groups, width]; `group`
          int64 [positions], the index of each row's group.
        - "topk8": `q` uint8 [positions, k], `index` uint16 [positions, k], `scale` and `zero` float32 [positions].
        - "topk": `x` in the model's dtype [positions, k], `index` uint16 [positions, k].
        - "sae": `feature` uint32 [positions, k], `value` float32 [positions, k], the strongest first. If fewer than k
          features are above 0, the rest have the number of features, which is no feature, and the value 0.
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

    def feature(self, layer: int, number: int) -> FloatArray:
        """Return the values of one feature of a sparse autoencoder, float32 [positions]; 0 where it was not kept.

        This does not decode whole rows, as `acts[layer][:, number]` does.

        Raises:
            KeyError: The layer is not among `layers`.
            InvalidRequest: The capture has no features, has no such one, or did not choose it.

        Example:
            >>> for token, value in zip(acts.tokens, acts.feature(12, 123)):
            ...     print(repr(token), value)
        """
        index, block, manifest = self._index(layer), self._block, self._manifest
        if not isinstance(block, EncodedBlock) or self.encoding != "sae":
            raise self._invalid(f"The rows of {manifest.capture_id} are encoded as {self.encoding!r}, not as 'sae'.")
        if not 0 <= number < block.form.features:
            raise self._invalid(f"The feature {number} does not exist: there are {block.form.features}, from 0 on.")
        if manifest.features and number not in manifest.features:
            chosen = ", ".join(map(str, manifest.features))
            raise self._invalid(f"The feature {number} was not captured. {manifest.capture_id} has only: {chosen}.")
        rows = block.rows[index]
        values: FloatArray = np.where(rows["feature"] == number, rows["value"], np.float32(0)).sum(axis=-1)
        values[~block.present[index]] = np.nan
        return values

    def projection(self) -> FloatArray:
        """Return the matrix that rows of "rp8" and "rp" were multiplied with: float32 [hidden, width].

        Multiply a vector with this matrix to compare it with the rows. Inner products, cosines and distances are then
        those of the full width, up to the error of the projection (docs/encodings.md).

        Raises:
            InvalidRequest: The rows are not a random projection.

        Example:
            >>> direction = joy.values @ acts.projection()
            >>> scores = acts[12] @ direction  # approximately (rows of full width) @ joy.values
        """
        manifest = self._manifest
        if self.encoding not in ("rp8", "rp"):
            raise InvalidRequest(
                f"The rows of {manifest.capture_id} are encoded as {self.encoding!r}, which is not a random "
                "projection. Capture them as 'rp8' or 'rp' to get one.",
                reason="INVALID_FIELD",
            )
        return projection_matrix(manifest.seed, manifest.format_at(self.site).width, manifest.dimensions)

    def stack(self, layers: Iterable[int] | None = None) -> FloatArray:
        """Return several layers as one array, float32 [layers, positions, width]; `np.asarray(acts)` is all of them.

        Args:
            layers: The layers, in this order; None means all.

        Raises:
            KeyError: A layer is not among `layers`.

        Example:
            >>> acts.stack([0, 15, 29]).mean(axis=1).shape
            (3, 576)
        """
        return self._block.stack([self._index(layer) for layer in (self._layers if layers is None else layers)])

    def at(self, point: str) -> FloatArray:
        """Return the rows of a point, such as "mlp_act.3": a site and one layer; float32 [positions, width].

        Args:
            point: The point, by any name that `Capture(points=...)` takes. The layer may be left out if these
                activations have one layer at the site, as at "final_norm".

        Raises:
            KeyError: The site or the layer is not in these activations; the message lists those that are.
            InvalidRequest: The point has several layers, or another form.
            UnknownSite: The point names no site.

        Example:
            >>> acts.at("resid_post.12").shape
            (69, 576)
        """
        site, layers = parse_point(point)
        of_site = self.select(site=site)
        layers = of_site.layers if layers is None else layers
        if len(layers) != 1:
            raise self._invalid(f"{point!r} names several layers. Name a point of one layer, such as '{site}.0'.")
        return of_site[layers[0]]

    def vector(self, layer: int, position: int, *, site: str | None = None) -> Vector:
        """Return a row as a `Vector`, for steering operations.

        Args:
            layer: The layer.
            position: The position. A number below 0 counts from the prompt's end.
            site: The site; None: the selected one.

        Raises:
            KeyError: The site is not in these activations.
            InvalidRequest: The row is not there, the capture is reduced, or its encoding does not keep rows.

        Example:
            >>> client.generate(corrupted, steer=residuum.Set(acts.vector(12, 4), layer=12, positions=[4]))
        """
        chosen = self if site is None else self.select(site=site)
        chosen._check_not_reduced()  # noqa: SLF001 - the same class
        if not self._manifest.format_at(chosen.site).decodes_to_rows:
            raise self._invalid(
                f"{self._manifest.capture_id} has no rows of the model: its encoding {self.encoding} keeps "
                f"{chosen.width} other numbers for each. Capture them as raw."
            )
        absolute = position + self.prompt_tokens if position < 0 else position
        rows = np.flatnonzero(chosen.positions == absolute)
        if layer not in chosen or not len(rows) or not chosen.present[chosen.layers.index(layer), rows[0]]:
            raise self._invalid(
                f"{self._manifest.capture_id} has no row of layer {layer} at position {position} ({chosen.site})."
            )
        return Vector.from_array(chosen[layer][rows[0]])

    def mean(self, layer: int, *, span: SpanLike | None = None) -> npt.NDArray[np.float32]:
        """Return the mean of a layer's rows, or of those of a span: float32 [width].

        Rows that a partial capture lacks are left out. The sum is made in float64.

        Args:
            layer: The layer.
            span: The positions to use, as for `select`; None means all.

        Raises:
            KeyError: The layer is not among `layers`.
            InvalidRequest: There is no row, or the capture is reduced. The other errors are those of `select`.

        Example:
            >>> acts.mean(12, span="assistant").shape
            (576,)
        """
        self._check_not_reduced()
        part = self if span is None else self.select(span=span)
        rows, present = part[layer], part.present[self._index(layer)]
        if not present.any():
            where = "" if span is None else f" in the span {span!r}"
            raise self._invalid(
                f"These activations have no row of layer {layer}{where}, so there is no mean. The last generated token "
                "has no row, nor have positions that were not captured."
            )
        kept = rows if present.all() else rows[present]
        mean: FloatArray = kept.mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean

    def select(
        self, *, sequence: int | None = None, site: str | None = None, span: SpanLike | None = None
    ) -> Activations:
        """Return the same activations with another sequence or site selected, or only the positions of a span.

        Nothing is copied, unless the span has gaps, as two messages of one role have.

        Args:
            sequence: The sequence to select; None keeps the selected one.
            site: The site to select; None keeps the selected one.
            span: Only these positions, of every sequence and site. None keeps all. One of:

                - "prompt" or "reply", for any prompt;
                - a role of a conversation, "system", "user", "assistant", "tool" or "developer": all messages of that
                  role. The reply is one of the assistant's;
                - the index of a message in `spans`, such as -1 for the last one;
                - a `MessageSpan`.

        Raises:
            KeyError: The sequence or site does not exist; the message lists those that do.
            NoMessageSpans: The prompt is not a conversation, or the positions of its messages are not known.
            InvalidRequest: The conversation has no such message, or the capture is reduced: its rows stand for many
                positions.

        Example:
            >>> second = acts.select(sequence=1)
            >>> reply = acts.select(span="reply")
            >>> reply.stack().shape == (len(reply.layers), len(reply.positions), reply.width)
            True
        """
        key = (self.sequence if sequence is None else sequence, self.site if site is None else site)
        if key not in self._blocks:
            available = f"sequences {list(self.sequences)}, sites {list(self.sites)}"
            raise KeyError(f"sequence {key[0]} at site {key[1]} is not in these activations; choose among {available}")
        blocks = self._blocks
        if span is not None:
            self._check_not_reduced()
            blocks = {
                name: block.part(places_in(span, self._manifest, name[0], block.positions))
                for name, block in blocks.items()
            }
        return Activations(self._manifest, self._site_layers, blocks, key)

    def to_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a safetensors file as captured, with the manifest in the metadata.

        The tensors are named `SITE.LAYER` ([positions, hidden]), `SITE.positions` and `SITE.token_ids`. Names of
        further sequences begin with `sequence1/` and so on. safetensors' own loaders read the file. An existing file
        is replaced.

        Raises:
            OSError: The file cannot be written.
        """
        self.export(path, "safetensors", overwrite=True)

    def export(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,  # noqa: A002 - the natural name for users
        *,
        overwrite: bool = False,
    ) -> Export:
        """Write all rows to a file. `client.export` does this without loading the whole capture into memory.

        Args:
            path: The file to write; for Zarr, the folder.
            format: "safetensors", "npz", "zarr" or "parquet"; see docs/exports.md. The last two need the extras of the
                same names. None derives the format from the path's suffix.
            overwrite: Replace an existing export.

        Raises:
            FileExistsError: The path exists and may not be replaced.
            ImportError: The format's extra is not installed; the message names it.
            OSError: The export cannot be written.
            InvalidRequest: The format does not exist.

        Example:
            >>> acts.export("joy.npz").num_bytes
            9537230
        """
        return export_activations(self, path, format, overwrite=overwrite)

    @classmethod
    def from_safetensors(cls, path: str | os.PathLike[str]) -> Activations:
        """Read a file that `to_safetensors` wrote.

        Raises:
            FileNotFoundError: The file does not exist.
            InvalidRequest: `to_safetensors` did not write the file.
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
            raise ValueError("Converting Activations to float32 makes a copy; use acts.raw(layer) to avoid one.")
        return self.stack().astype(dtype or np.float32, copy=False)

    # Compare activations by identity: comparing two mappings of arrays gives no single truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        shape = f"{len(self)} layers × {len(self.positions)} positions × {self.width}"
        more = f", {len(self.sequences)} sequences" if len(self.sequences) > 1 else ""
        others = [site for site in self.sites if site != self.site]
        more += f", site {self.site}" if others or self.site != "resid_post" else ""
        more += f" (also {', '.join(others)})" if others else ""
        manifest = self._manifest
        more += ", before steering" if manifest.before_steering else ""
        more += f", {manifest.reduction} of each phase" if manifest.reduction != "none" else ""
        kind = manifest.dtype if self.encoding == "raw" else self.encoding
        return f"Activations({manifest.capture_id!r}, {manifest.state}: {shape}{more}, {kind})"

    @property
    def _block(self) -> AnyBlock:
        return self._blocks[self._selected]

    def _check_not_reduced(self) -> None:
        reduction = self._manifest.reduction
        if reduction != "none":
            raise self._invalid(
                f"The capture is reduced: each row is the {reduction} of all selected positions of the prompt or of "
                "the reply, so it has no rows of single positions. Read these rows with acts[layer]; for spans, "
                "capture without a reduction."
            )

    def _invalid(self, message: str) -> InvalidRequest:
        return InvalidRequest(message, reason="INVALID_FIELD", metadata={"capture_id": self._manifest.capture_id})

    def _index(self, layer: int) -> int:
        try:
            return self._row[layer]
        except (KeyError, TypeError):
            message = f"layer {layer!r} is not in these activations; choose among {list(self._layers)}"
            raise KeyError(message) from None

    def _all_tokens(self) -> tuple[int, ...]:
        outcomes = self._manifest.sequences
        generated = outcomes[self.sequence].generated_token_ids if self.sequence < len(outcomes) else ()
        return self._manifest.prompt_token_ids + generated
