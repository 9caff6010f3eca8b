"""What SAELens and dictionary_learning take as their data. Neither package is imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from residuum.training.batches import ActivationBatches, tensor_of
from residuum.training.reader import Points, Source
from residuum.values.selections.points import transformer_lens_name


class _Tensors(Iterator[torch.Tensor]):
    """Batches as plain tensors, without end unless `epochs` is given."""

    def __init__(self, source: Source, points: Points = None, **arguments: Any) -> None:
        self.batches = ActivationBatches(source, points, **arguments)
        """The iterator below, which has the state."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> torch.Tensor:
        return next(self.batches).activations

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is; see `ActivationBatches`."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a state; see `ActivationBatches`."""
        self.batches.load_state_dict(state)


class SAELensData(_Tensors):
    """The `data_provider` of SAELens' SAETrainer: an iterator over tensors [batch, width].

    With `by_hook=True`, it yields what MultiSAETrainer takes: a mapping from each hook's name, such as
    "blocks.12.hook_resid_post", to a tensor. The rows of all hooks are of the same tokens, and may have different
    widths.

    Args:
        source: The folder of `client.extract`, or its result.
        points: The point, or several.
        by_hook: Whether to yield mappings.
        **arguments: As for `ActivationBatches`.

    Example:
        >>> data = SAELensData("rows", "resid_post.12", batch_size=4096)
        >>> SAETrainer(cfg=config, sae=sae, data_provider=data).fit()
    """

    def __init__(self, source: Source, points: Points = None, *, by_hook: bool = False, **arguments: Any) -> None:
        super().__init__(source, points, **{**arguments, "same_width": not by_hook})
        self._hooks = [transformer_lens_name(point) for point in self.batches.points] if by_hook else None
        self._kind = (arguments.get("dtype", torch.float32), arguments.get("device"))

    def __next__(self) -> torch.Tensor:
        if self._hooks is None:
            return super().__next__()
        _, values = self.batches.next_arrays()
        found = {name: tensor_of(array, *self._kind) for name, array in zip(self._hooks, values, strict=True)}
        return cast("torch.Tensor", found)


class DictionaryLearningBuffer(_Tensors):
    """The interface of dictionary_learning's ActivationBuffer: `trainSAE(data=DictionaryLearningBuffer(...))`.

    It yields tensors [batch, width], or [batch, points, width] for crosscoders.

    Args:
        source: The folder of `client.extract`, or its result.
        points: The point, or several.
        out_batch_size: Rows in a batch.
        device: Where the batches are.
        **arguments: As for `ActivationBatches`.
    """

    def __init__(
        self,
        source: Source,
        points: Points = None,
        *,
        out_batch_size: int = 8192,
        device: str = "cpu",
        **arguments: Any,
    ) -> None:
        super().__init__(source, points, batch_size=out_batch_size, device=device, **arguments)
        self.device = device
        """Where the batches are."""

    @property
    def config(self) -> dict[str, Any]:
        """What the trainer saves with the autoencoder."""
        batches = self.batches
        return {
            "source": str(batches.folder), "points": list(batches.points), "d_submodule": batches.width,
            "out_batch_size": batches.state_dict()["identity"]["batch_size"], "device": self.device,
        }  # fmt: skip
