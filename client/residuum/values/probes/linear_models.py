"""The weights of linear models that scikit-learn and torch train, without importing either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.values.tensors.vector import as_float32
from residuum.wire.probes.arithmetic import is_valid_probe_name

_OF_PROBABILITIES = {"LogisticRegression", "LinearDiscriminantAnalysis"}
"""Classes of scikit-learn whose probabilities are the sigmoid or the softmax of linear outputs."""


class LinearModel(NamedTuple):
    """What a linear model computes."""

    weights: npt.NDArray[Any]
    """float64 [outputs, width]; [width] for one output."""
    bias: npt.NDArray[Any]
    """float64, one number or [outputs]."""
    activation: str | None
    """What makes probabilities of the outputs; None: the model has none."""
    classes: tuple[str, ...]
    """The names of the outputs; empty if there is one, or if the model's classes are no valid names."""


def of_sklearn(model: Any) -> LinearModel:
    """Return the weights of a fitted model of scikit-learn, or of a pipeline of StandardScaler and such a model.

    Raises:
        InvalidRequest: The model is not linear or not fitted, or the pipeline has other steps.
    """
    model = getattr(model, "best_estimator_", model)  # of a GridSearchCV
    if "FrozenEstimator" in _class_names(model):
        model = model.estimator
    scalers: list[Any] = []
    if hasattr(model, "steps"):
        *before, (_, model) = model.steps
        scalers = [step for name, step in before if _is_scaler(name, step)]
    if not (hasattr(model, "coef_") and hasattr(model, "intercept_")):
        raise _refused(
            f"{type(model).__name__} has no coef_ and intercept_: it is not linear, or not fitted. Fit a linear model "
            "such as LogisticRegression first."
        )
    _check_outputs(model)
    coefficients = model.coef_.toarray() if hasattr(model.coef_, "toarray") else model.coef_  # after sparsify()
    weights = np.asarray(coefficients, np.float64)
    bias = np.asarray(model.intercept_, np.float64)
    for scaler in reversed(scalers):  # x -> (x - mean) / scale
        if scaler.scale_ is not None:
            weights = weights / np.asarray(scaler.scale_, np.float64)
        if scaler.with_mean:  # without it, mean_ may have the means all the same
            bias = bias - weights @ np.asarray(scaler.mean_, np.float64)
    outputs = len(np.atleast_2d(weights))
    classes = tuple(map(str, getattr(model, "classes_", ())))
    named = outputs > 1 and len(classes) == outputs and all(map(is_valid_probe_name, classes))
    return LinearModel(weights, bias, _activation(model, outputs), classes if named else ())


def _is_scaler(name: str, step: Any) -> bool:
    """Tell whether a step of a pipeline scales rows; False if it leaves them as they are."""
    if step is None or isinstance(step, str):  # "passthrough"
        return False
    if "StandardScaler" not in _class_names(step):
        raise _refused(
            f"the pipeline's step {name!r} is a {type(step).__name__}, and only StandardScaler can become part of the "
            "weights. Train without this step."
        )
    if not hasattr(step, "scale_"):
        raise _refused(f"the pipeline's step {name!r} is not fitted. Fit the pipeline first.")
    return True


def _check_outputs(model: Any) -> None:
    """Check that a model's outputs are coef_ @ row + intercept_.

    Raises:
        InvalidRequest: They are not.
    """
    names = _class_names(model)
    if names & {"SVC", "NuSVC"} and len(getattr(model, "classes_", ())) > 2:  # noqa: PLR2004
        raise _refused(
            f"{type(model).__name__} has a classifier for each pair of classes (one-vs-one), which is no score of a "
            "class. Train LinearSVC or LogisticRegression, which have one for each class."
        )
    if _predicts_exponential(model, names):
        raise _refused(
            f"{type(model).__name__} predicts the exponential of its linear output, which no probe computes. If you "
            "want the output itself, give its numbers: Probe(model.coef_, model.intercept_, layer=...)."
        )
    if "_PLS" in names:
        raise _refused(
            f"{type(model).__name__} subtracts the mean of the rows first. Give its numbers: Probe(model.coef_, "
            "model.predict(np.zeros((1, width)))[0], layer=...)."
        )


def _predicts_exponential(model: Any, names: set[str]) -> bool:
    """Tell whether a model predicts the exponential of its linear output, as generalized linear models may."""
    if "TweedieRegressor" not in names:
        return bool(names & {"PoissonRegressor", "GammaRegressor"})
    link = getattr(model, "link", "auto")
    return link == "log" or (link == "auto" and getattr(model, "power", 0) > 0)


def _activation(model: Any, outputs: int) -> str | None:
    names = _class_names(model)
    if not names & _OF_PROBABILITIES:
        return None
    if outputs == 1 and getattr(model, "multi_class", "") == "multinomial":
        raise _refused(
            "with multi_class='multinomial', the probability of two classes is not the sigmoid of the output. Train "
            "without multi_class."
        )
    if outputs == 1:
        return "sigmoid"
    if getattr(model, "multi_class", "") == "ovr" or getattr(model, "solver", "") == "liblinear":
        raise _refused(
            "the model has a classifier for each class (one-vs-rest), and scales their probabilities to add up to 1, "
            "which no probe does. Train a multinomial model: solver='lbfgs', without multi_class."
        )
    return "softmax"


def _class_names(model: Any) -> set[str]:
    return {kind.__name__ for kind in type(model).__mro__}


_HIDDEN_MODULES = {"ReLU": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "GELU": "gelu"}
"""Modules of torch between the layers of an MLP, with the names of their functions."""

_NO_MODULES = {"Dropout", "Identity"}
"""Modules that do nothing once the model is trained."""


def of_torch(module: Any) -> list[tuple[str | None, Any, Any]]:
    """Return the layers of a torch.nn.Linear, or of a Sequential of several.

    Returns:
        For each layer: what is applied to its inputs, None for nothing; its weight; and its bias, 0.0 if it has none.

    Raises:
        TypeError: The module is neither, or has other parts.
    """
    layers: list[tuple[str | None, Any, Any]] = []
    hidden: str | None = None
    for part in module if type(module).__name__ == "Sequential" else [module]:
        name, weight, bias = type(part).__name__, getattr(part, "weight", None), getattr(part, "bias", None)
        if "Linear" in _class_names(part) and hasattr(weight, "detach"):
            layers.append((hidden, weight, 0.0 if bias is None else bias))
            hidden = None
        elif name in _HIDDEN_MODULES and layers and hidden is None and getattr(part, "approximate", "none") == "none":
            hidden = _HIDDEN_MODULES[name]
        elif name not in _NO_MODULES:
            raise TypeError(
                f"Probe.from_torch takes a torch.nn.Linear, not {name} here; or a Sequential of Linear with "
                f"{', '.join(_HIDDEN_MODULES)} between them. Give what follows the last Linear as activation=."
            )
    if not layers or hidden is not None:
        raise TypeError("Probe.from_torch: the last module must be a Linear. Give what follows it as activation=.")
    return layers


_OF_ATTENTION = {"q.weight", "v.weight"}
"""Parameters of an attention probe. Others may have `q.bias`, `v.bias`, `position_weight`, `o.weight` and `o.bias`."""


class AttentionModel(NamedTuple):
    """What EleutherAI's `AttentionProbe` computes."""

    weights: npt.NDArray[np.float32]
    """The rows of the logits, and then those of the values: [heads * (1 + outputs), width]."""
    bias: npt.NDArray[np.float32]
    heads: int
    position_weights: npt.NDArray[np.float32] | None
    last: tuple[Any, Any] | None
    """Weight and bias of the layer after the attention, which a ReLU comes before; None: there is none."""


def is_attention_of_torch(module: Any) -> bool:
    """Tell whether an object is an attention probe of torch, or the state dict of one."""
    return isinstance(module, Mapping) or all(hasattr(getattr(module, name, None), "weight") for name in ("q", "v"))


def attention_of_torch(module: Any) -> AttentionModel:
    """Return the weights of an `AttentionProbe`, or of its state dict.

    Raises:
        TypeError: The state dict is that of something else.
        InvalidRequest: The probe has another function than softmax, or its shapes do not fit together.
    """
    problem = "Probe.from_torch: the attention probe "
    if getattr(module, "use_tanh", False):
        raise InvalidRequest(problem + "has use_tanh=True. Only softmax can be computed.", reason="INVALID_FIELD")
    state = module if isinstance(module, Mapping) else module.state_dict()
    allowed = {*_OF_ATTENTION, "q.bias", "v.bias", "position_weight", "o.weight", "o.bias"}
    wrong = [str(name)[:64] for name in state if name not in allowed] or sorted(_OF_ATTENTION - {*state})
    if wrong:
        raise TypeError(
            f"Probe.from_torch: a state dict must be that of an attention probe, with {', '.join(sorted(allowed))}; of "
            f"these only q.weight and v.weight are required. {wrong[0]!r} is "
            f"{'not one' if wrong[0] in state else 'missing'}."
        )
    queries, values = as_float32(state["q.weight"]), as_float32(state["v.weight"])
    if queries.ndim != 2 or values.ndim != 2 or queries.shape[1:] != values.shape[1:]:  # noqa: PLR2004
        raise InvalidRequest(
            f"{problem}has a q.weight and a v.weight of the shapes {list(queries.shape)} and {list(values.shape)}; "
            "they must be [heads, width] and [heads * outputs, width].",
            reason="INVALID_FIELD",
        )
    biases = [
        as_float32(state[name]) if name in state else np.zeros(len(rows), np.float32)
        for name, rows in (("q.bias", queries), ("v.bias", values))
    ]
    position = state.get("position_weight")
    last = (state["o.weight"], state.get("o.bias", 0.0)) if "o.weight" in state else None
    return AttentionModel(
        np.concatenate([queries, values]),
        np.concatenate(biases),
        len(queries),
        None if position is None else as_float32(position),
        last,
    )


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"Probe.from_sklearn: {problem}", reason="INVALID_FIELD")
