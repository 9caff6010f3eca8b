"""The rest of a model after its last layer, run on given rows: for the logit lens, and for the startup self-test.

The self-test asks whether captured rows explain the model's own logits.

The rest of the model (the final norm and the unembedding) sees nothing of the layers except the last layer's
`resid_post`. So the model runs once more, uncompiled and without its layers: each layer returns what it returned in an
earlier run, and the last one returns the rows.

In the self-test, the final hidden states must equal those of the served request, and the served token must have the
largest logit. Rows that are not the residual stream fail this check, for whatever reason.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from inference_svc.taps.model.hooked_runs import calling, is_pair, relative_error, run_hooked

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
    """Show the calls of a model while the context lasts."""
    forward = model.forward

    def seeing(*args: Any, **kwargs: Any) -> Any:
        see(ModelCall(args, kwargs))
        return forward(*args, **kwargs)

    with calling(model, seeing):
        yield


class LogitsCheck:
    """Runs the rest of the model, after its last layer, on captured rows."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Prepare the check of a pipeline's last stage.

        Args:
            model: The model.
            layers: The stage's decoder layers in order.
        """
        self._model: Any = model
        self._layers = layers
        self._outputs: dict[nn.Module, Any] = {}
        self._call: ModelCall | None = None
        self._served: list[Tensor] | None = None
        for name in _UNEMBEDDINGS:
            if hasattr(model, name):
                self._listen(name)

    def remember(self, run: Callable[[], object]) -> None:
        """Run the model with a few tokens, and keep its call and the outputs of its layers, for `explain` to repeat."""

        def keep_call(call: ModelCall) -> None:
            # Copies: vLLM's tensors are parts of its buffers, in which later steps may leave tokens that do not exist.
            kwargs = {name: _copied(value) for name, value in call.kwargs.items()}
            self._call = ModelCall(tuple(map(_copied, call.args)), kwargs)

        def keep_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del args
            self._outputs[layer] = output

        with calls_seen(self._model, keep_call):
            run_hooked(run, [layer.register_forward_hook(keep_output) for layer in self._layers])

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
        final = self._run_rest(rows, run)
        errors = [relative_error(row[None].float(), own[:1].float()) for row, own in zip(final, served, strict=False)]
        logits = self._model.compute_logits(final)
        gaps = [] if logits is None else [_gap(row.float(), token) for row, token in zip(logits, tokens, strict=True)]
        return Explanation(_largest(errors), _largest(gaps))

    def logits(self, rows: Tensor, run: Callable[[Callable[[], object]], None]) -> Tensor | None:
        """Return the logits of rows of the residual stream after the last layer; None on ranks without them.

        Args:
            rows: [rows, hidden].
            run: As for `explain`.

        Returns:
            Float32 [rows, vocabulary].
        """
        if self._call is None:
            raise LookupError(f"{type(self._model).__name__} was not run yet.")
        logits = self._model.compute_logits(self._run_rest(rows, run))
        return None if logits is None else logits.float()

    def _listen(self, name: str) -> None:
        compute = getattr(self._model, name)

        def listening(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._served is not None:
                self._served.append(hidden_states.clone())
            return compute(hidden_states, *args, **kwargs)

        setattr(self._model, name, listening)

    def _run_rest(self, rows: Tensor, run: Callable[[Callable[[], object]], None]) -> Tensor:
        """Return the final hidden states of rows, [rows, hidden].

        Each run takes as many rows as the remembered call has tokens: some models cut or reshape what their layers
        return to the shape of their inputs.
        """
        count = _hidden_of(self._outputs[self._layers[-1]]).shape[-2]
        missing = -len(rows) % count
        filled = torch.cat([rows, rows[-1:].expand(missing, -1)])
        return torch.cat([self._run_once(part, run) for part in filled.split(count)])[: len(rows)]

    def _run_once(self, rows: Tensor, run: Callable[[Callable[[], object]], None]) -> Tensor:
        """Run the model without its layers.

        No layer computes anything. Experts would wait for the other replicas, which do not take part in this run.
        """
        assert self._call is not None  # noqa: S101 - `explain` and `logits` checked it
        call = self._call
        final: list[Tensor] = []
        outputs = {**self._outputs, self._layers[-1]: _with_rows(self._outputs[self._layers[-1]], rows)}

        def call_model() -> None:
            output = self._model(*call.args, **call.kwargs)
            final.append(output if isinstance(output, Tensor) else output[0])

        with ExitStack() as layers:
            for layer, output in outputs.items():
                layers.enter_context(calling(layer, _returning(output)))
            run(call_model)
        return final[0]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def most_likely(logits: Tensor, num_top: int, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """Return what `TappedWorker.residuum_unembed` returns, as tensors, from logits, float32 [rows, vocabulary]."""
    norms = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(num_top, dim=-1)
    asked = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    own = logits[: len(tokens)].gather(1, asked)
    ranks = (logits[: len(tokens)] > own).sum(dim=-1) + 1
    return top.indices, top.values - norms, (own - norms[: len(tokens)])[:, 0], ranks


def _hidden_of(output: Any) -> Tensor:
    """Return the first tensor of a layer's output, [..., tokens, hidden]."""
    return output if isinstance(output, Tensor) else output[0]


def _with_rows(output: Any, rows: Tensor) -> Any:
    """Return a layer's output with other rows, as many as it has. Their residual is zero if it is separate."""
    hidden = _hidden_of(output)
    stream = rows.to(hidden.dtype).view(hidden.shape)
    if isinstance(output, Tensor):
        return stream
    return (stream, torch.zeros_like(stream)) if is_pair(output) else (stream, *output[1:])


def _returning(output: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return output

    return forward


def _gap(logits: Tensor, token: int) -> float:
    finite = logits[logits.isfinite()]  # logits of the vocabulary's padding may be -inf
    if not len(finite):
        return math.nan
    spread = finite.max() - finite.min()
    return float((finite.max() - logits[token]) / spread.clamp_min(torch.finfo(torch.float32).tiny))


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN if any is NaN, 0 if there is none."""
    return float(torch.tensor(values).max()) if values else 0.0
