"""The independent reference: Hugging Face transformers in float32, steered by hooks of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    Rows = npt.NDArray[np.float32]
    Change = Callable[[torch.Tensor], torch.Tensor]
    """What is done to a layer's output, [positions, hidden]; position p is row p."""


class Reference:
    """A model run by transformers; its decoder layers' outputs can be changed, and are kept."""

    def __init__(self, model: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._changes: Mapping[int, Change] = {}
        self._rows: list[torch.Tensor] = []
        for index, layer in enumerate(self._model.model.layers):
            layer.register_forward_hook(self._hook(index))

    def rows(self, token_ids: Sequence[int], changes: Mapping[int, Change] | None = None) -> Rows:
        """Return [layers, positions, hidden]; `changes` maps a layer to what is done to its output."""
        self._run(token_ids, changes)
        return torch.stack(self._rows).numpy()

    def hidden_states(self, token_ids: Sequence[int]) -> Rows:
        """Return what transformers itself calls hidden_states, [layers + 1, positions, hidden].

        The first are the embeddings; the last have passed the final norm.
        """
        self._changes = {}
        with torch.inference_mode():
            output = self._model.model(_batch(token_ids), use_cache=False, output_hidden_states=True)
        return torch.cat(output.hidden_states).numpy()

    def final_norm(self, rows: Rows) -> Rows:
        """Return rows after the model's final norm."""
        with torch.inference_mode():
            return self._model.model.norm(torch.from_numpy(rows)).numpy()

    def output_weights(self, token: int) -> Rows:
        """Return the vector by which the logit of a token is taken, float32 [hidden]."""
        return self._model.lm_head.weight[token].detach().numpy().copy()

    def shortfall(
        self, prompt: Sequence[int], reply: Sequence[int], changes: Mapping[int, Change] | None = None
    ) -> float:
        """Return by how much the logits of greedily generated tokens fall short of the largest ones, at most.

        0 if each is the most likely token after those before it. Not a comparison of tokens: where two are as likely,
        either is right.
        """
        with torch.inference_mode():
            logits = self._model.lm_head(self._run([*prompt, *reply][:-1], changes)[len(prompt) - 1 :])
            chosen = logits.gather(1, torch.tensor([list(reply)]).T)[:, 0]
            return float((logits.amax(dim=1) - chosen).max())

    def _run(self, token_ids: Sequence[int], changes: Mapping[int, Change] | None) -> torch.Tensor:
        self._changes = changes or {}
        self._rows = []
        with torch.inference_mode():
            return self._model.model(_batch(token_ids), use_cache=False).last_hidden_state[0]

    def _hook(self, index: int) -> Callable[..., object]:
        def hook(module: object, arguments: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
            del module, arguments
            single = isinstance(output, torch.Tensor)
            hidden = output if single else output[0]
            if index in self._changes:
                hidden = self._changes[index](hidden[0])[None]
            self._rows.append(hidden[0])
            return hidden if single else (hidden, *output[1:])

        return hook


def relative_error(got: Rows, expected: Rows) -> float:
    """Return the largest distance of a row from its reference, relative to the reference's length."""
    return float((np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())


def _batch(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([[int(token) for token in token_ids]])
