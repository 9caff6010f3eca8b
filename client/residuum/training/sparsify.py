"""What EleutherAI's sparsify takes: a dataset and a model. sparsify is not imported.

sparsify's Trainer runs a model and takes the outputs of its layers. Here the "tokens" are places in the shuffled order,
and the "model" looks their rows up, so that the trainer works unchanged and no language model runs.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from residuum.exceptions import InvalidRequest
from residuum.training.batches import tensor_of
from residuum.training.reader import Points, ShuffledReader, Source, check_whole


class SparsifyData(Dataset[dict[str, torch.Tensor]]):
    """The `dataset` of sparsify's Trainer for an extraction; its `model` is the second argument.

    One epoch is the whole dataset. An item is `context_length` rows, so a batch of the trainer has `batch_size` times
    as many. The hook points are `model.hookpoints`, one for each point. `exclude_tokens` of the trainer must be empty;
    leave rows out with `where` instead. Only `loss_fn="fvu"` works: the others need the language model itself.

    Args:
        source: The folder of `client.extract`, or its result.
        points: The points; None means all.
        context_length: The rows of an item.
        seed: The seed of the order.
        where: Which rows to read, as for `ActivationBatches`.
        device: Where the rows and the autoencoders are.
        buffer_bytes: The approximate memory for rows.
        block_bytes: The approximate bytes that are read at once.
        allow_partial: Read a job that is not complete.

    Example:
        >>> data = SparsifyData("rows", "resid_post.12", context_length=256)
        >>> config = TrainConfig(SparseCoderConfig(), batch_size=16, hookpoints=data.model.hookpoints)
        >>> Trainer(config, data, data.model).fit()
    """

    def __init__(
        self, source: Source, points: Points = None, *, context_length: int = 256, seed: int = 0, where: Any = None,
        device: str | torch.device = "cpu", buffer_bytes: int = 1 << 30, block_bytes: int = 1 << 20,
        allow_partial: bool = False,
    ) -> None:  # fmt: skip
        check_whole("context_length", context_length, 1)
        reader = ShuffledReader(
            source, points, seed=seed, shuffle=True, where=where, buffer_bytes=buffer_bytes, block_bytes=block_bytes,
            allow_partial=allow_partial,
        )  # fmt: skip
        self._context = context_length
        self._items = range(reader.layout.total // context_length)
        if not self._items:
            raise InvalidRequest(
                f"There are {reader.layout.total} rows, and context_length is {context_length}. Choose a smaller one.",
                reason="INVALID_FIELD",
            )
        self.model = ActivationModel(reader, device)
        """The stand-in for the language model."""

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = self._items[index] * self._context
        return {"input_ids": torch.arange(first, first + self._context)}

    def select(self, numbers: range) -> SparsifyData:
        """Return the dataset of some items, as the trainer asks for when it continues."""
        chosen = copy.copy(self)
        chosen._items = self._items[numbers.start : numbers.stop]  # noqa: SLF001 - of the same class
        return chosen

    def shard(self, num_shards: int, index: int) -> SparsifyData:
        """Return the items of one of several processes."""
        each = len(self) // num_shards
        return self.select(range(index * each, (index + 1) * each))


class ActivationModel(nn.Module):
    """Looks rows up instead of computing them. It has a submodule for each point, whose output is the point's rows.

    The residual stream after layer 12 is the output of `layers.12`, and what its attention and MLP add are those of
    `layers.12.self_attn` and `layers.12.mlp`, as in many models of transformers. Other points have their own names.
    """

    def __init__(self, reader: ShuffledReader, device: str | torch.device) -> None:
        super().__init__()
        self._reader = reader
        self._place = torch.device(device)
        self.hookpoints = [_module_of(point) for point in reader.points]
        """The names of the submodules, in the order of the points."""
        for name in self.hookpoints:
            module: nn.Module = self
            for part in name.split("."):
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Identity())
                module = module.get_submodule(part)
        self.dummy_inputs = {"input_ids": torch.zeros((1, 1), dtype=torch.int64)}
        """An input for sparsify, from which it learns the widths."""

    @property
    def base_model(self) -> ActivationModel:
        """The model itself: it has no head."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._place

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the rows."""
        return torch.float32

    def forward(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each point, [batch, context, width], for places in the order, [batch, context]."""
        shape, places = tuple(input_ids.shape), input_ids.reshape(-1).cpu().numpy()
        first, last = int(places.min()), int(places.max()) + 1
        pieces = list(self._reader.read(0, first, last))
        outputs = []
        for number, name in enumerate(self.hookpoints):
            values = np.concatenate([arrays[number] for _, arrays in pieces])
            rows = tensor_of(values[places - first], torch.float32, self._place).reshape(*shape, -1)
            outputs.append(self.get_submodule(name)(rows))
        return outputs


def _module_of(point: str) -> str:
    site, _, layer = point.rpartition(".")
    inner = {"resid_post": "", "attn_out": ".self_attn", "mlp_out": ".mlp"}.get(site)
    return point if inner is None else f"layers.{layer}{inner}"
