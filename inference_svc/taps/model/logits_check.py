"""The logits check: do captured rows explain the model's own logits? The startup self-test uses it.

The rest of the model (the final norm and the unembedding) sees nothing of the layers except the last layer's
`resid_post`. So the check runs the model once more, uncompiled, and replaces the last layer's output by captured rows.
The final hidden states must equal those of the served request, and the served token must have the largest logit. Rows
that are not the residual stream fail this check, for whatever reason.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from inference_svc.taps.model.hooked_runs import fixed_attention, is_pair, relative_error, run_hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_UNEMBEDDINGS = ("compute_logits", "compute_logits_local")
"""The names that vLLM's model classes use for the method that turns final hidden states into logits."""


class ModelCall(NamedTuple):
    """The arguments of a call of the model by vLLM."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Explanation(NamedTuple):
    """How well captured rows explain the served tokens."""

    hidden_error: float
    """The largest relative difference between the final hidden states of captured rows and those of the request."""
    token_gap: float
    """The largest gap between the largest logit and that of the served token, relative to the range of the logits."""


@contextmanager
def calls_seen(model: nn.Module, see: Callable[[ModelCall], None]) -> Iterator[None]:
    """Show the calls of a model while the context lasts.

    A hook is not enough: vLLM's decorator for compilation calls `forward` past the hooks of the module that it
    decorates, which may be the whole model.
    """
    forward, own = model.forward, vars(model).get("forward")

    def seeing(*args: Any, **kwargs: Any) -> Any:
        see(ModelCall(args, kwargs))
        return forward(*args, **kwargs)

    model.forward = seeing
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


class LogitsCheck:
    """Runs the rest of the model, after its last layer, on captured rows."""

    def __init__(self, model: nn.Module, last_layer: nn.Module, is_attention: Callable[[nn.Module], bool]) -> None:
        """Prepare the check of a pipeline's last stage.

        Args:
            model: The model.
            last_layer: Its last decoder layer.
            is_attention: Returns whether a module is attention, which computes nothing in a run without requests.
        """
        self._model: Any = model
        self._last_layer = last_layer
        self._is_attention = is_attention
        self._call: ModelCall | None = None
        self._served: list[Tensor] | None = None
        for name in _UNEMBEDDINGS:
            if hasattr(model, name):
                self._listen(name)

    def remember(self, call: ModelCall) -> None:
        """Keep a call of the model with a few tokens, for `explain` to repeat."""
        self._call = call

    def listen(self) -> None:
        """Record the inputs of the unembedding from now on, until `explain` is called."""
        self._served = []

    def explain(self, rows: Tensor, tokens: Sequence[int], run: Callable[[Callable[[], object]], None]) -> Explanation:
        """Compare the tokens served since `listen` with those that captured rows predict.

        Args:
            rows: The last layer's `resid_post` at the positions whose logits gave the tokens, [tokens, hidden].
            tokens: The served token IDs, sampled greedily.
            run: Takes a function that calls the model, and calls it uncompiled and without requests.

        Raises:
            LookupError: `listen` recorded too few inputs of the unembedding.
        """
        served, self._served = self._served or [], None
        if self._call is None or len(served) < len(tokens):
            raise LookupError(
                f"{type(self._model).__name__} computed logits for {len(served)} of {len(tokens)} tokens by "
                f"{' or '.join(_UNEMBEDDINGS)}, so captured rows cannot be checked. Please report the model."
            )
        final = self._run_rest(rows, run)[: len(tokens)]
        errors = [relative_error(row[None].float(), own[:1].float()) for row, own in zip(final, served, strict=False)]
        logits = self._model.compute_logits(final)
        gaps = [] if logits is None else [_gap(row.float(), token) for row, token in zip(logits, tokens, strict=True)]
        return Explanation(_largest(errors), _largest(gaps))

    def _listen(self, name: str) -> None:
        compute = getattr(self._model, name)

        def listening(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._served is not None:
                self._served.append(hidden_states.clone())
            return compute(hidden_states, *args, **kwargs)

        setattr(self._model, name, listening)

    def _run_rest(self, rows: Tensor, run: Callable[[Callable[[], object]], None]) -> Tensor:
        """Return the final hidden states of rows, [tokens of the remembered call, hidden]."""
        assert self._call is not None  # noqa: S101 - `explain` checked it
        call = self._call
        final: list[Tensor] = []

        def replace(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            del module, args
            hidden = output if isinstance(output, Tensor) else output[0]
            stream = hidden.reshape(-1, hidden.shape[-1]).clone()
            stream[: len(rows)] = rows.to(stream.dtype)
            stream = stream.view(hidden.shape)
            if isinstance(output, Tensor):
                return stream
            return (stream, torch.zeros_like(output[1])) if is_pair(output) else (stream, *output[1:])

        def call_model() -> None:
            output = self._model(*call.args, **call.kwargs)
            final.append(output if isinstance(output, Tensor) else output[0])

        with fixed_attention(self._model, self._is_attention):
            run_hooked(lambda: run(call_model), [self._last_layer.register_forward_hook(replace)])
        return final[0]


def _gap(logits: Tensor, token: int) -> float:
    finite = logits[logits.isfinite()]  # logits of the vocabulary's padding may be -inf
    if not len(finite):
        return math.nan
    spread = finite.max() - finite.min()
    return float((finite.max() - logits[token]) / spread.clamp_min(torch.finfo(torch.float32).tiny))


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN if any is NaN, 0 if there is none."""
    return float(torch.tensor(values).max()) if values else 0.0
