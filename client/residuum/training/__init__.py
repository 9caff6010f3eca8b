"""Feeds the files of `client.extract` to trainers of sparse autoencoders. It needs torch, but no service and no store.

`ActivationBatches` yields shuffled batches to a loop of your own. `SAELensData`, `DictionaryLearningBuffer` and
`SparsifyData` are what these packages take. None of them is imported here.

Example:
    >>> from residuum.training import ActivationBatches
    >>> for batch in ActivationBatches("rows", "resid_post.12", batch_size=4096, epochs=2):
    ...     loss = sae(batch.activations)
"""

try:
    import torch  # noqa: F401 - to say what is missing
except ImportError:
    raise ImportError("residuum.training needs torch. Install the build for your machine: pip install torch.") from None

from residuum.training.adapters import DictionaryLearningBuffer, SAELensData
from residuum.training.batches import ActivationBatches, Batch
from residuum.training.sparsify import SparsifyData

__all__ = ["ActivationBatches", "Batch", "DictionaryLearningBuffer", "SAELensData", "SparsifyData"]
