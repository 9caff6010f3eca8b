"""Do captured rows explain the model's own logits? The start-up self-test asks.

The last layer's `resid_post` is all that the rest of the model, such as the final norm and the unembedding, sees of the
layers. So the model is run once more, uncompiled, with captured rows in the place of what the last layer returns. The
result must be what the served request gave to the unembedding, and its served token must be the most likely one. Rows
that are not the residual stream, for whatever reason, do not pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from inference_svc.taps.model.hooked_runs import fixed_attention, is_pair, relative_error, run_hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_UNEMBEDDINGS = ("compute_logits", "compute_logits_local")
"""vLLM's names, in a model's class, for what turns the final hidden states into logits."""


class ModelCall(NamedTuple):
    """A call of the model as vLLM made it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Explanation(NamedTuple):
    """How well captured rows explain what the model served."""

    hidden_error: float
    """The largest relative difference between the final hidden states of a row and those that were served."""
    token_gap: float
    """How far below the largest logit that of the served token is, relative to the range of the logits; the largest."""


class LogitsCheck:
    """Runs the rest of the model, after its last layer, on captured rows."""

    def __init__(self, model: nn.Module, last_layer: nn.Module, is_attention: Callable[[nn.Module], bool]) -> None:
        """Prepare the check of a pipeline's last stage.

        Args:
            model: The model.
            last_layer: Its last decoder layer.
            is_attention: Tells whether a module is attention, which computes nothing in a run without requests.
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
        """Keep a call of the model with a few tokens, to run it again later."""
        self._call = call

    def listen(self) -> None:
        """From now on keep what is given to the unembedding, until `explain` is called."""
        self._served = []

    def explain(self, rows: Tensor, tokens: Sequence[int], run: Callable[[Callable[[], object]], None]) -> Explanation:
        """Compare what was served since `listen` with what follows from captured rows.

        Args:
            rows: The last layer's `resid_post` at the positions whose logits gave the tokens, [tokens, hidden].
            tokens: The tokens that were served, greedily.
            run: Runs the model uncompiled, without requests, when it is given a function that calls it.

        Raises:
            LookupError: What the model gave to the unembedding was not seen.
        """
        served, self._served = self._served or [], None
        if self._call is None or len(served) < len(tokens):
            raise LookupError(
                f"{type(self._model).__name__} computed logits for {len(served)} of {len(tokens)} tokens by "
                f"{' or '.join(_UNEMBEDDINGS)}"
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
        assert self._call is not None  # noqa: S101 - just checked
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
    finite = logits[logits.isfinite()]  # the vocabulary's padding may be masked
    if not len(finite):
        return math.nan
    spread = finite.max() - finite.min()
    return float((finite.max() - logits[token]) / spread.clamp_min(torch.finfo(torch.float32).tiny))


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN if one is not a number, 0 if there is none."""
    return float(torch.tensor(values).max()) if values else 0.0
