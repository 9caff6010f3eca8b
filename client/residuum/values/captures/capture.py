"""The specification of what a request captures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from residuum.exceptions import InvalidRequest
from residuum.v1 import capture_pb2, sae_pb2, selection_pb2
from residuum.values.selections.layers_and_positions import (
    LayersLike,
    Positions,
    PositionsLike,
    layer_list,
    layer_selection,
    selects_all,
)
from residuum.values.selections.points import SITES, parse_points, point_names, site_list, site_numbers
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector
from residuum.wire.labels import LabelError, LabelValue, check_labels, to_label
from residuum.wire.limits import BLOCK_TOKENS, MAX_KEPT_FEATURES, MAX_PROJECTION_VECTORS
from residuum.wire.rows.encodings import BY_DIMENSION, BY_ROW, ENCODINGS

_UINT32 = (1 << 32) - 1

EncodingName = Literal["raw", "fp32", "fp16", "bf16", "full8", "rp8", "topk8", "rp", "topk", "project", "sae"]

AXES = {"row": BY_ROW, "dimension": BY_DIMENSION}
"""The quantization axes of "full8" by name."""

REDUCTIONS: dict[str, capture_pb2.Reduction.ValueType] = {
    "none": capture_pb2.REDUCTION_NONE,
    "last": capture_pb2.REDUCTION_LAST,
    "mean": capture_pb2.REDUCTION_MEAN,
    "max": capture_pb2.REDUCTION_MAX,
    "sum": capture_pb2.REDUCTION_SUM,
}
"""The reductions by name."""

_OVERFLOW = {"wait": capture_pb2.OVERFLOW_POLICY_WAIT, "shed": capture_pb2.OVERFLOW_POLICY_SHED}


@dataclass(frozen=True)
class Capture:
    """What a request captures. Layers count from 0; `client.info().sites` lists the server's capture sites.

    Attributes:
        layers: "all", a number, a range or a list of numbers.
        sites: Where in a layer: "resid_post" (the residual stream after the layer and its steering), "resid_pre" (the
            stream before the layer), "resid_mid" (the stream between attention and MLP), "attn_in" and "mlp_in" (what
            attention and MLP take, after their norms), "attn_out" and "mlp_out" (what they add), "q", "k" and "v"
            (queries, keys and values as the attention takes them), "q_pre" and "k_pre" (before their norm and rotary
            embedding), "z" and "mlp_act" (what the output projections of attention and MLP take), "router_logits" and
            "routing_weights" (of a mixture of experts), "final_norm" (what the unembedding takes: the stream after the
            last layer, after the final norm). Those from "q" to "routing_weights" have widths of their own. A list of
            names, or names separated by commas; the server must have been started with these sites. `acts[k]` reads
            the first one, and `acts.select(site=...)` selects another.
        positions: The positions; see `Positions.of`. By default all positions, of the prompt and of generated tokens.
        encoding: The encoding of the stored rows. By default the server's, which is "raw" unless its operator chose
            another. docs/encodings.md explains what each keeps and costs.

            - "raw": as the model computed them, in its dtype; "fp32", "fp16", "bf16": cast to this dtype.
            - "full8": every element in 8 bits; "topk8": the largest `dimensions` elements in 8 bits, the others as 0.
            - "rp8": a random projection to `dimensions` numbers in 8 bits; see `Activations.projection`.
            - "rp", "topk": as "rp8" and "topk8", but without quantization to 8 bits.
            - "project": only the inner products with `vectors`.
            - "sae": the features of `sae`: the `dimensions` strongest, or chosen `features`.
        overflow: What happens when the path to the store is full: with "wait" the model waits; with "shed" rows are
            dropped, and the capture ends incomplete.
        dimensions: For "rp8" and "rp", the dimensions to project to; for "topk8" and "topk", the number of elements to
            keep. At most the width of a row at the site. By default the server's, which are 512 and 128 unless its
            operator chose others. For "sae", the number of features to keep of each row, at most 256; by default 32.
        seed: For "rp8" and "rp", the seed of the projection. Only rows with the same seed and dimensions can be
            compared.
        axis: For "full8", which numbers share a scale: the elements of a row ("row", the default), or the same element
            of all rows of a block ("dimension").
        vectors: For "project", up to 256 vectors; number j of a row is its inner product with vector j. Of a mapping,
            such as Directions, the values are used.
        sae: For "sae", which it implies: the sparse autoencoder, for rows of one layer and site. The server must have
            been started with `--sae-mib`.
        features: For "sae", the features to keep, at most 256; by default the strongest.
        reduction: Capture one row instead of all that `positions` selects: the last row, or the elementwise mean,
            maximum or sum. The prompt gets one such row, and the generated tokens get another. Each has the last
            position that it covers.
        before_steering: Capture rows as they were before steering, instead of those that the model continues with.
            "resid_pre" is then the stream before the steering of the previous layer; so the sites of a layer do not add
            up if that layer was steered.
        labels: The capture's labels, by which lists and datasets can be filtered: {"split": "train", "y": 1}. Values
            are texts, numbers and bools. `client.label` changes them later; docs/concepts/captures.md has the limits.
        keep_prompt: Keep the prompt's text with the capture, in `Manifest.prompt_text`: a text as you sent it, a
            conversation in the model's chat template. A prompt of token IDs has no text and is refused.
        flush_interval: After how many captured positions of generated tokens their rows are sent, 1 to 32. With 1,
            `follow` shows each row at once; but every position then takes a chunk of its own, which costs more time and
            space. Rows of the prompt never wait.
        points: Instead of `layers` and `sites`: points, such as ["resid_post.12", "mlp_act.3-5"], or one text with
            points separated by commas. A point is a site and its layers; without layers, it has all of them. So each
            site has layers of its own, which `acts.select(site=...).layers` lists; `acts.at("mlp_act.4")` returns the
            rows of a point. Names of TransformerLens ("blocks.12.hook_resid_post") and interp-engine ("value.3") are
            accepted where they mean the same rows.

    Example:
        >>> residuum.Capture(layers="all")
        >>> residuum.Capture(layers=[0, 5, 10], positions="last_prompt")
        >>> residuum.Capture(layers=[12], sites=["resid_pre", "attn_out", "mlp_out"])
        >>> residuum.Capture(points=["resid_post.12", "mlp_act.3-5"])
        >>> residuum.Capture(layers="all", encoding="rp8", dimensions=512, seed=1)
        >>> residuum.Capture(layers=[12], encoding="project", vectors=[joy], positions="generated")
        >>> residuum.Capture(layers="all", encoding="fp32", reduction="mean")
        >>> residuum.Capture(layers=[12], sae=residuum.sae.load("sae/"), dimensions=64)
    """

    layers: LayersLike = "all"
    sites: str | Sequence[str] = ("resid_post",)
    positions: PositionsLike = None
    encoding: EncodingName | None = None
    overflow: Literal["wait", "shed"] = "wait"
    dimensions: int | None = None
    seed: int = 0
    axis: Literal["row", "dimension"] | None = None
    vectors: Vector | Iterable[Vector] | Mapping[int, Vector] = ()
    sae: SAE | None = None
    features: int | Iterable[int] = ()
    reduction: Literal["none", "last", "mean", "max", "sum"] | None = None
    before_steering: bool = False

    labels: Mapping[str, LabelValue] = field(default_factory=dict, hash=False)
    keep_prompt: bool = False
    flush_interval: int = BLOCK_TOKENS
    points: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", dict(check_mapping(self.labels)))
        if not isinstance(self.keep_prompt, bool):
            raise TypeError(f"keep_prompt must be True or False, not {self.keep_prompt!r}.")
        if not selects_all(self.layers):
            object.__setattr__(self, "layers", tuple(layer_list(self.layers)))
        if self.points is not None:
            self._adopt_points()
        sites = site_list(self.sites)
        if isinstance(self.sites, (set, frozenset)):  # a set has no order, but `acts[k]` reads the first site
            sites = tuple(sorted(sites, key=list(SITES).index)) if SITES.keys() >= self.sites else sites
        object.__setattr__(self, "sites", sites)
        object.__setattr__(self, "positions", Positions.of(self.positions))
        object.__setattr__(self, "vectors", tuple(_vector_list(self.vectors)))
        if self.sae is not None and not isinstance(self.sae, SAE):
            raise TypeError(f"sae= takes a residuum.SAE, not {type(self.sae).__name__}; residuum.sae.load reads one.")
        if self.sae is not None and self.encoding is None:
            object.__setattr__(self, "encoding", "sae")
        object.__setattr__(self, "features", tuple(self._feature_list()))
        for name in ("dimensions", "seed", "flush_interval"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer, type(None))):
                raise TypeError(f"{name} must be a whole number, not {value!r}.")
        if not isinstance(self.before_steering, bool):
            raise TypeError(f"before_steering must be True or False, not {self.before_steering!r}.")
        self.to_proto()

    def _feature_list(self) -> list[int]:
        given = list(self.features) if isinstance(self.features, Iterable) else [self.features]
        if given and self.sae is None:
            raise InvalidRequest("features= needs sae=.", reason="INVALID_FIELD", metadata={"field": "features"})
        features = [self.sae.check_feature(number) for number in given] if self.sae is not None else []
        problem = ""
        if not given and not isinstance(self.features, tuple):  # the default is a tuple
            problem = "features= is empty. Leave it out to capture the strongest features of each row."
        elif len(features) > MAX_KEPT_FEATURES:
            problem = f"features= takes at most {MAX_KEPT_FEATURES} features, not {len(features)}."
        elif repeated := [number for number in features if features.count(number) > 1]:
            problem = f"features= has the feature {repeated[0]} twice. Give each feature once."
        if problem:
            raise InvalidRequest(problem, reason="INVALID_FIELD", metadata={"field": "features"})
        return features

    def _adopt_points(self) -> None:
        """Set `layers` and `sites` to those of the points, and give the points their own names."""
        found = parse_points(self.points) if self.points is not None else {}
        every = {layer for layers in found.values() for layer in layers or ()}
        layers: LayersLike = "all" if None in found.values() else tuple(sorted(every))
        given = (self.layers, site_list(self.sites))
        if given not in (("all", ("resid_post",)), (layers, tuple(found))):
            raise InvalidRequest("Give either points= or layers= and sites=, not both.", reason="INVALID_FIELD")
        for name, value in (("points", point_names(found)), ("layers", layers), ("sites", tuple(found))):
            object.__setattr__(self, name, value)

    def to_proto(self) -> capture_pb2.CaptureSpec:
        """Return the checked message.

        Raises:
            InvalidRequest: The capture is invalid for any model; the message says why.
        """
        if self.overflow not in _OVERFLOW:
            raise InvalidRequest(f"overflow={self.overflow!r} is unknown; use 'wait' or 'shed'.")
        if not 1 <= self.flush_interval <= BLOCK_TOKENS:
            raise InvalidRequest(
                f"flush_interval= must be from 1 to {BLOCK_TOKENS} tokens, not {self.flush_interval}.",
                reason="INVALID_FIELD",
                metadata={"field": "flush_interval"},
            )
        return capture_pb2.CaptureSpec(
            layers=layer_selection(self.layers),
            sites=site_numbers(self.sites),
            positions=Positions.of(self.positions).to_proto() if self.positions != Positions() else None,
            encoding=_named("encoding", self.encoding, ENCODINGS),
            overflow=_OVERFLOW[self.overflow],
            before_steering=self.before_steering,
            encoding_options=self._options(),
            reduction=_named("reduction", self.reduction, REDUCTIONS),
            labels=label_list(self.labels),
            keep_prompt=self.keep_prompt,
            flush_interval=0 if self.flush_interval == BLOCK_TOKENS else self.flush_interval,
            site_layers=self._site_layers(),
        )

    def _site_layers(self) -> list[selection_pb2.LayerSelection]:
        """Return the layers at each site, if they are not the same at all of them."""
        layers = parse_points(self.points).values() if self.points else ()
        return [layer_selection("all" if item is None else item) for item in layers] if len(set(layers)) > 1 else []

    @property
    def projection_vectors(self) -> tuple[Vector, ...]:
        """The `vectors` as a tuple."""
        return cast("tuple[Vector, ...]", self.vectors)  # __post_init__ has converted them

    def _options(self) -> capture_pb2.EncodingOptions | None:
        """Return the encoding's options. For the server's default encoding, the server checks which ones apply."""
        vectors = self.projection_vectors
        for name, given, takers in (
            ("dimensions", self.dimensions is not None, ("rp8", "rp", "topk8", "topk", "sae")),
            ("seed", self.seed != 0, ("rp8", "rp")),
            ("axis", self.axis is not None, ("full8",)),
            ("vectors", bool(vectors), ("project",)),
            ("sae", self.sae is not None, ("sae",)),
        ):
            if given and self.encoding not in takers and (self.encoding is not None or vectors):
                named = " or ".join(f'encoding="{taker}"' for taker in takers)
                raise InvalidRequest(f"{name}= needs {named}.", reason="INVALID_FIELD")
        if self.dimensions is not None and not 1 <= self.dimensions <= _UINT32:
            raise InvalidRequest(f"dimensions= must be at least 1, not {self.dimensions}.", reason="INVALID_FIELD")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidRequest(f"seed= must be from 0 to 2**64 - 1, not {self.seed}.", reason="INVALID_FIELD")
        if self.encoding == "project" and not 1 <= len(vectors) <= MAX_PROJECTION_VECTORS:
            raise InvalidRequest(
                f'encoding="project" takes 1 to {MAX_PROJECTION_VECTORS} vectors=, not {len(vectors)}.',
                reason="INVALID_FIELD",
            )
        options = capture_pb2.EncodingOptions(
            sae=self._kept_features(),
            dimensions=self.dimensions or 0,
            seed=self.seed,
            axis=_named("axis", self.axis, AXES),
            vectors=[vector.digest for vector in vectors],
        )
        return options if options.ByteSize() else None

    def _kept_features(self) -> sae_pb2.SAEFeatures | None:
        sae, chosen = self.sae, cast("tuple[int, ...]", self.features)  # __post_init__ has converted them
        if sae is None:
            if self.encoding == "sae":
                raise InvalidRequest('encoding="sae" needs sae=.', reason="INVALID_FIELD", metadata={"field": "sae"})
            return None
        most = min(MAX_KEPT_FEATURES, sae.features)
        if self.dimensions is not None and not (self.dimensions == len(chosen) if chosen else self.dimensions <= most):
            wanted = "leave it out with features=" if chosen else f"at most {most} features can be kept"
            raise InvalidRequest(
                f"dimensions={self.dimensions}: {wanted}.", reason="INVALID_FIELD", metadata={"field": "dimensions"}
            )
        return sae_pb2.SAEFeatures(digest=sae.digest, features=sae.features, chosen=chosen)


def check_mapping(labels: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return labels after checking that they have names, which are texts.

    Raises:
        TypeError: They do not.
    """
    if not isinstance(labels, Mapping) or not all(isinstance(name, str) for name in labels):
        raise TypeError(f'labels must be a mapping of names to values, such as {{"y": 1}}, not {labels!r}.')
    return labels


def label_list(labels: Mapping[str, LabelValue]) -> list[capture_pb2.Label]:
    """Return the messages of labels.

    Raises:
        InvalidRequest: A name or a value is invalid, or there are too many labels.
        TypeError: A value is no text, number or bool.
    """
    try:
        found = [to_label(name, _plain(value)) for name, value in labels.items()]
        check_labels(found)
    except LabelError as error:
        raise InvalidRequest(f"labels: {error}.", reason="INVALID_FIELD", metadata={"field": "labels"}) from None
    return found


def _plain(value: LabelValue | np.generic) -> LabelValue:
    """Return a number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def _named(field: str, name: str | None, known: Mapping[str, int]) -> Any:
    """Return the contract's number of a name; 0, the server's default, for None.

    Raises:
        InvalidRequest: The name is unknown.
    """
    if name is None:
        return 0
    if name not in known:
        raise InvalidRequest(f"{field}={name!r} is unknown; choose among {', '.join(known)}.", reason="INVALID_FIELD")
    return known[name]


def _vector_list(vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> list[Vector]:
    items = [vectors] if isinstance(vectors, Vector) else list(getattr(vectors, "values", lambda: vectors)())
    for item in items:
        if not isinstance(item, Vector):
            raise TypeError("vectors= takes residuum.Vector; create one with Vector.from_array(array).")
    if len({vector.digest for vector in items}) != len(items):
        raise InvalidRequest("Name each vector once.", reason="INVALID_FIELD")
    return items
