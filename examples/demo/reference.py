"""The independent reference: Hugging Face transformers over the same token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Rows = npt.NDArray[np.float32]


class Reference:
    """Runs a model in transformers and keeps the outputs of its decoder layers."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        """Load the model from a folder in a dtype."""
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._rows: list[torch.Tensor] = []
        for layer in self._model.model.layers:
            layer.register_forward_hook(self._keep)

    def rows(self, token_ids: Sequence[int]) -> Rows:
        """Return the residual stream after each decoder layer, float32 [layers, positions, hidden]."""
        self._rows.clear()
        with torch.inference_mode():
            self._model(torch.tensor([list(token_ids)]), use_cache=False)
        return torch.stack(self._rows).float().numpy()

    def _keep(self, module: object, arguments: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        del module, arguments
        rows = output if isinstance(output, torch.Tensor) else output[0]
        self._rows.append(rows.reshape(-1, rows.shape[-1]))


@dataclass(frozen=True)
class Agreement:
    """How well captured rows agree with the reference: cosines [layers, positions], for all requests."""

    cosines: Rows
    """Captured rows compared with transformers in float32."""
    rounding: Rows
    """transformers in bfloat16 compared with transformers in float32, for the same rows."""

    @property
    def unexplained(self) -> npt.NDArray[np.bool_]:
        """Rows below the required minimum that rounding does not explain.

        In some rows (for example a lone space before digits) an MLP is close to a threshold. Then rounding to bfloat16
        alone turns the residual stream by several degrees. transformers in bfloat16 shows this: it is off by at least
        half the captured row's angle. If the row belonged to another token, its angle would be far larger.
        """
        return (self.cosines < MIN_COSINE) & (_angle(self.cosines) > 2 * _angle(self.rounding))

    @property
    def holds(self) -> bool:
        """Whether every row and the mean reach the required cosines."""
        return not self.unexplained.any() and float(self.cosines.mean()) >= MEAN_COSINE


MIN_COSINE = 0.99
MEAN_COSINE = 0.999


def compare(model: str, captured: Sequence[tuple[Sequence[int], Rows]]) -> Agreement:
    """Compare captured rows with transformers.

    Args:
        model: The model's folder.
        captured: For each request, its token IDs (one per row) and its rows [layers, positions, hidden].
    """
    exact, rounded = Reference(model, torch.float32), Reference(model, torch.bfloat16)
    cosines, rounding = [], []
    for token_ids, rows in captured:
        expected = exact.rows(token_ids)
        cosines.append(_cosines(rows, expected))
        rounding.append(_cosines(rounded.rows(token_ids), expected))
    return Agreement(np.concatenate(cosines, axis=1), np.concatenate(rounding, axis=1))


def _angle(cosines: Rows) -> Rows:
    return np.arccos(np.clip(cosines, -1.0, 1.0))


def _cosines(a: Rows, b: Rows) -> Rows:
    a, b = a.astype(np.float64), b.astype(np.float64)
    cosines = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    return cosines.astype(np.float32)
