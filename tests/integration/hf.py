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
        """Return [layers, positions, hidden]; `changes` maps a layer to what is done to its [positions, hidden]."""
        self._changes = changes or {}
        self._rows = []
        with torch.inference_mode():
            self._model(torch.tensor([[int(token) for token in token_ids]]), use_cache=False)
        return torch.stack(self._rows).numpy()

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the next tokens, each the most likely."""
        ids = [int(token) for token in token_ids]
        self._changes = {}
        for _ in range(count):
            with torch.inference_mode():
                ids.append(int(self._model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(token_ids) :]

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


def cosines(a: Rows, b: Rows) -> Rows:
    """Return the cosine of each pair of rows."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return ((a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))).astype(np.float32)


def relative_error(got: Rows, expected: Rows) -> float:
    """Return the largest distance of a row from its reference, relative to the reference's length."""
    return float((np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())
