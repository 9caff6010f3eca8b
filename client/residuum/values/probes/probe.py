"""Probes: classifiers whose scores the server sends with each token."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import probe_pb2
from residuum.values.probes.checks import (
    ACTIVATIONS,
    FloatArray,
    checked_activation,
    checked_bias,
    checked_float32,
    checked_name,
    checked_output_names,
    checked_places,
    checked_weights,
    count_outputs,
)
from residuum.values.probes.layers import ProbeAttention, ProbeLayer, attention_of, layer_tuple
from residuum.values.probes.linear_models import attention_of_torch, is_attention_of_torch, of_sklearn, of_torch
from residuum.values.probes.smoothing import Smoothing, smoothing_of
from residuum.values.selections.items import item_list
from residuum.values.selections.points import site_numbers
from residuum.values.tensors.vector import Vector, as_float32
from residuum.wire.probes.arithmetic import evaluate, problem_of_mlp, problem_of_names, problem_of_places
from residuum.wire.probes.pooling import AttentionPool


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Probe:
    """A linear probe, a small MLP, or an attention probe: it gives scores to the rows at a site of a layer.

    A row's outputs are its inner products with the weights, plus the bias; with `mlp`, these are the outputs of the
    first layer, and further layers follow. Its scores are the outputs after the activation. With `smooth`, the server
    then smooths the scores of consecutive tokens.

    With `attention`, the outputs are pooled over all positions up to the token's, from the prompt's first one, before
    `mlp`, the activation and `smooth` read them. Such a request computes its whole prompt.

    A probe can read several layers or sites. Then its input is the concatenation of the rows at these places, in the
    given order.

    With `probes=[...]`, the server computes the scores on the device while the model generates, and sends them with the
    tokens: see `TokenDelta.scores` and `Reply.scores`. If the request is steered, the probe reads the steered row.

    Attributes:
        weights: [outputs, width], or [width] for one output: any array or tensor of real, finite numbers. Width is the
            length of a row at the site; of a probe that reads several places, of their rows together. The attribute is
            float32 [outputs, width], read-only.
        bias: One number for all outputs, or [outputs]. The attribute is float32 [outputs], read-only.
        layer: The layer whose rows it reads. To read several places: a list, with a layer for each.
        site: The site: one of `client.info().probe_sites`. With a list of layers: the site of all, or a list with a
            site for each. The attributes are then tuples.
        activation: What is applied to the outputs of a row: "sigmoid" to each, "softmax" to all, or None.
        name: The name of its scores, 1 to 64 of the characters a-z A-Z 0-9 . _ -. The probes of a request have
            different names.
        smooth: How the server smooths the scores, each output separately: EMA, RollingMax, RollingMean, or None. It
            begins anew with the reply. A score that is not finite stays as it is, and does not count later.
        mlp: The further layers of an MLP, at most 2. Then `weights` and `bias` are those of its first layer, whose
            width counts among the outputs of a request's probes.
        output_names: The names of the outputs, so that rules can use them; empty: they have none.
        attention: How the outputs are pooled over positions; None: not. `from_attention` is the simple way to make such
            a probe. All its logits and values count among the outputs of a request's probes.

    Raises:
        BadVector: The weights are not of this shape, or not finite.
        InvalidRequest: The bias, the layer, the activation or the name is invalid; UnknownSite if there is no such
            site.
        TypeError: An argument has the wrong type.

    Example:
        >>> probe = residuum.Probe(direction, bias=-0.5, layer=12, activation="sigmoid", name="question")
        >>> for delta in client.stream("Once upon a time", probes=[probe]):
        ...     print(delta.text, delta.scores["question"])
    """

    weights: FloatArray
    bias: FloatArray
    layer: int | tuple[int, ...]
    site: str | tuple[str, ...]
    activation: str | None
    name: str
    smooth: Smoothing | None
    mlp: tuple[ProbeLayer, ...]
    output_names: tuple[str, ...]
    attention: ProbeAttention | None

    def __init__(
        self,
        weights: npt.ArrayLike,
        bias: npt.ArrayLike = 0.0,
        *,
        layer: int | Iterable[int],
        site: str | Iterable[str] = "resid_post",
        activation: str | None = None,
        name: str = "probe",
        smooth: Smoothing | None = None,
        mlp: Iterable[ProbeLayer] = (),
        output_names: Iterable[str] = (),
        attention: ProbeAttention | None = None,
    ) -> None:
        checked, layers = checked_weights(weights), layer_tuple(mlp)
        pooling = attention_of(attention, len(checked))
        numbers, sites = checked_places(layer, site, checked.shape[1])
        fields = {
            "weights": checked,
            "bias": checked_bias(bias, len(checked)),
            "layer": numbers,
            "site": sites,
            "mlp": layers,
            "attention": pooling,
            "activation": checked_activation(activation, count_outputs(checked, pooling, layers)),
            "name": checked_name(name),
            "smooth": smoothing_of(smooth),
            "output_names": checked_output_names(output_names),
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        if not (layers or self.output_names or len(self.places) > 1):
            return
        message = self.to_proto()
        if problem := problem_of_places(message) or problem_of_mlp(message) or problem_of_names(message):
            raise InvalidRequest(f"Probe: {problem}.", reason="INVALID_FIELD")

    @classmethod
    def from_sklearn(
        cls, model: Any, *, layer: int | Iterable[int], site: str | Iterable[str] = "resid_post", name: str = "probe"
    ) -> Probe:
        """Return the probe of a fitted linear model of scikit-learn, such as LogisticRegression, LinearSVC or Ridge.

        A logistic regression's scores are its probabilities: for two classes that of `classes_[1]`, else those of all
        classes in the order of `classes_`, which give the outputs their names if they can. Scores of other models are
        their linear outputs: `decision_function`, or `predict` of a linear regression. For another activation use
        `dataclasses.replace(probe, activation="sigmoid")`.

        Args:
            model: Any model with `coef_` and `intercept_`; or a Pipeline of it with StandardScaler before it, which
                becomes part of the weights.
            layer: As for `Probe`; so are the others.
            site: The site.
            name: The name.

        Raises:
            InvalidRequest: The model is not linear, is not fitted, has other steps before it, or computes something
                else of its weights, as SVC does for three or more classes.

        Example:
            >>> classifier = LogisticRegression().fit(rows, labels)
            >>> probe = residuum.Probe.from_sklearn(classifier, layer=12, name="question")
        """
        weights, bias, activation, classes = of_sklearn(model)
        return cls(weights, bias, layer=layer, site=site, activation=activation, name=name, output_names=classes)

    @classmethod
    def from_attention(
        cls,
        queries: npt.ArrayLike,
        values: npt.ArrayLike,
        bias: npt.ArrayLike = 0.0,
        *,
        layer: int | Iterable[int],
        position_weights: npt.ArrayLike | None = None,
        **options: Any,
    ) -> Probe:
        """Return an attention probe.

        Its output at position t is Σ_h Σ_{i≤t} softmax_i(q_h · x_i + p_h i) (v_h · x_i) + bias, over heads h and the
        rows x_i of all positions i up to t.

        Args:
            queries: q, [heads, width], 1 to 16 heads; or [width] for one head.
            values: v, [heads, outputs, width]; or in the shape of `queries` for one output.
            bias: One number for all outputs, or [outputs].
            layer: As for `Probe`; so are `options`: site, activation, name, smooth, mlp and output_names.
            position_weights: p, [heads]; None: 0.
            options: Further arguments of `Probe`.

        Raises:
            BadVector: The shapes do not fit together, or a number is not finite.
            InvalidRequest: There are too many heads, or another argument is invalid.

        Example:
            >>> probe = residuum.Probe.from_attention(queries, values, layer=12, activation="sigmoid", name="lie")
        """
        keys = np.atleast_2d(checked_float32("queries", queries))
        rows = checked_float32("values", values)
        if rows.ndim <= 2:  # noqa: PLR2004 - one output
            rows = np.atleast_2d(rows)[:, None]
        if keys.ndim != 2 or rows.ndim != 3 or rows.shape[::2] != keys.shape or not rows.size:  # noqa: PLR2004
            raise BadVector(
                "Probe: queries must be [heads, width] and values [heads, outputs, width], not "
                f"{list(np.shape(queries))} and {list(np.shape(values))}.",
                reason="WRONG_LENGTH",
            )
        attention, outputs = ProbeAttention(len(keys), position_weights), rows.shape[1]  # type: ignore[arg-type]
        biases = np.zeros((1 + outputs) * len(keys), np.float32)
        biases[len(keys) :][:outputs] = checked_bias(
            bias, outputs
        )  # each head's weights add up to 1, so one head has it
        weights = np.concatenate([keys, rows.reshape(-1, keys.shape[1])])
        return cls(weights, biases, layer=layer, attention=attention, **options)

    @classmethod
    def from_torch(
        cls,
        module: Any,
        *,
        layer: int | Iterable[int],
        site: str | Iterable[str] = "resid_post",
        activation: str | None = None,
        name: str = "probe",
    ) -> Probe:
        """Return the probe of a `torch.nn.Linear`, of an MLP, or of an attention probe.

        Args:
            module: The module, of any dtype and on any device: a Linear, or a Sequential of up to three Linear with
                ReLU, Tanh, Sigmoid, GELU or nothing between them. Dropout and Identity are left out. Or an
                `AttentionProbe` of EleutherAI's attention-probes, or its state dict: `q.weight`, `v.weight`, and where
                it has them `q.bias`, `v.bias`, `position_weight`, `o.weight` and `o.bias`. Its position 0 must be the
                prompt's first token.
            layer: As for `Probe`; so are the others.
            site: The site.
            activation: The activation. The module itself has none.
            name: The name.

        Raises:
            TypeError: The module is none of these.
            InvalidRequest: The attention probe cannot be computed: it has `use_tanh`, or shapes that do not fit.

        Example:
            >>> probe = residuum.Probe.from_torch(linear, layer=12, activation="softmax")
        """
        if is_attention_of_torch(module):
            found = attention_of_torch(module)
            mlp = [ProbeLayer(*found.last, "relu")] if found.last else []
            attention = ProbeAttention(found.heads, found.position_weights)
            return cls(
                found.weights, found.bias, layer=layer, site=site, activation=activation, name=name, mlp=mlp,
                attention=attention,
            )  # fmt: skip
        (_, weights, bias), *further = of_torch(module)
        mlp = [ProbeLayer(weight, offset, hidden) for hidden, weight, offset in further]
        return cls(weights, bias, layer=layer, site=site, activation=activation, name=name, mlp=mlp)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Probe:
        """Read a probe that `save` wrote.

        Raises:
            InvalidRequest: The file holds no probe.
            FileNotFoundError: The file does not exist.
        """
        from residuum.exports import probe_files

        return probe_files.load(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the probe to a safetensors file.

        The file has the tensors `weight`, float32 [outputs, width], and `bias`, float32 [outputs]. Its metadata has
        `format` ("residuum.probe.v1"), `layer` and `site` (of several places, joined by commas), `activation` ("none",
        "sigmoid" or "softmax"), `name`; and where the probe has them `smooth` (such as "ema:0.9", "max:8" or "mean")
        and `output_names`, joined by commas.
        An MLP also has the tensors `weight_2` and `bias_2` of its second layer, with `activation_2` in the metadata
        ("none", "relu", "tanh", "sigmoid" or "gelu"), and so on. An attention probe also has `heads` in the metadata,
        and may have the tensor `position_weight`, float32 [heads]. `weight` then has the rows of all logits, and after
        them the rows of all values, one head after the other.

        Raises:
            OSError: The file cannot be written.
        """
        from residuum.exports import probe_files

        probe_files.save(self, path)

    def score(self, rows: npt.ArrayLike) -> FloatArray:
        """Return the scores of rows, computed here: float32 [rows] of a probe with one output, else [rows, outputs].

        These are the shapes of a reply's scores. The rows need not be consecutive, so their scores are not smoothed:
        `probe.smooth.apply(scores)` does that. With `attention`, they must be consecutive from the sequence's first
        position on, as in a capture of all positions.

        Args:
            rows: [rows, width], such as `acts[12]`; or one row, [width], which gives one number, or [outputs]. Of a
                probe that reads several places: `np.concatenate([acts[8], acts[12]], axis=-1)`.

        Raises:
            BadVector: The rows are not of the probe's width, or those of an attention probe are no sequence.

        Example:
            >>> probe.score(client.activations(reply)[12])
            array([0.02, 0.91, …], dtype=float32)
        """
        values = as_float32(rows)
        if not values.ndim or values.shape[-1] != self.width:
            raise BadVector(
                f"The probe {self.name!r} reads rows of {self.width} elements, but this array has the shape "
                f"{list(values.shape)}.",
                reason="WRONG_LENGTH",
            )
        if self.attention is not None and values.ndim > 2:  # noqa: PLR2004 - one sequence
            raise BadVector(
                f"The probe {self.name!r} pools the rows of one sequence, [rows, {self.width}], but this array has the "
                f"shape {list(values.shape)}. Score each sequence by itself.",
                reason="WRONG_LENGTH",
            )
        message = self.to_proto()
        with np.errstate(over="ignore", invalid="ignore"):  # huge rows give infinite outputs, as on a device
            outputs = np.atleast_2d(values @ self.weights.T + self.bias)
            scores = evaluate(message, AttentionPool(message).add(outputs) if self.attention else outputs)
        scores = scores.reshape(*values.shape[:-1], self.num_outputs)
        return scores if self.num_outputs > 1 else scores[..., 0]

    @property
    def width(self) -> int:
        """Elements of a row that the probe reads."""
        return int(self.weights.shape[1])

    @property
    def num_outputs(self) -> int:
        """Scores of each row."""
        return count_outputs(self.weights, self.attention, self.mlp)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The site and the layer of each place that the probe reads."""
        layers = self.layer if isinstance(self.layer, tuple) else (self.layer,)
        sites = self.site if isinstance(self.site, tuple) else (self.site,) * len(layers)
        return tuple(zip(sites, layers, strict=True))

    @functools.cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """The vector of each output at the first place, then at the next. Requests send those that the server lacks."""
        parts = np.split(self.weights, len(self.places), axis=1)
        return tuple(Vector(row) for part in parts for row in part)

    def to_proto(self) -> probe_pb2.Probe:
        """Return the probe's message, with the vectors' digests instead of their values."""
        (site, layer), *further = self.places
        message = probe_pb2.Probe(name=self.name, layer=layer, activation=ACTIVATIONS[self.activation])
        if site != "resid_post" or further:  # the default need not be sent, but places are compared by their sites
            (message.site,) = site_numbers([site])
        vectors = iter(self.vectors)
        for bias in self.bias:
            message.outputs.add(digest=next(vectors).digest, bias=float(bias))
        for other, number in further:
            digests = [next(vectors).digest for _ in self.bias]
            message.further_places.add(layer=number, site=site_numbers([other])[0], digests=digests)
        message.mlp.extend(layer.to_proto() for layer in self.mlp)
        message.output_names.extend(self.output_names)
        if self.attention is not None:
            message.attention.CopyFrom(self.attention.to_proto())
        if self.smooth is not None:
            message.smoothing.CopyFrom(self.smooth.to_proto())
        return message

    def __eq__(self, other: object) -> bool:
        return self._bytes == other._bytes if isinstance(other, Probe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    @functools.cached_property
    def _bytes(self) -> bytes:
        return self.to_proto().SerializeToString(deterministic=True)

    def __repr__(self) -> str:
        outputs = "1 output" if self.num_outputs == 1 else f"{self.num_outputs} outputs"
        places = " + ".join(f"{site}.{layer}" for site, layer in self.places)
        return (
            f"Probe({self.name!r}, {places}, {outputs} of {self.width} elements, "
            f"{f'an MLP of {len(self.mlp) + 1} layers, ' if self.mlp else ''}"
            f"{f'attention with {self.attention.heads} heads, ' if self.attention else ''}"
            f"activation {self.activation}{f', smooth {self.smooth}' if self.smooth else ''})"
        )


def probe_list(probes: Probe | Iterable[Probe] | None) -> tuple[Probe, ...]:
    """Return the probes that a user gave as `probes=`.

    Raises:
        TypeError: An item is not a probe.
        InvalidRequest: Two have the same name.
    """
    items = item_list(probes)
    for item in items:
        if not isinstance(item, Probe):
            raise TypeError(f"probes= takes a list of residuum.Probe, not {_kind(item)}.")
    twice = [name for name, times in Counter(item.name for item in items).items() if times > 1]
    if twice:
        raise InvalidRequest(
            f"Several probes have the name {twice[0]!r}. Give each its own: Probe(..., name='question').",
            reason="INVALID_FIELD",
            metadata={"field": "probes"},
        )
    return tuple(items)


def _kind(item: object) -> str:
    return f"a {type(item).__name__}" if isinstance(item, (Mapping, Iterable)) else repr(item)
