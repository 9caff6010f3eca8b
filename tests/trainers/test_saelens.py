"""SAELens trains on residuum.training's iterators, and reads an export as its cached activations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import CONTEXT, FEATURES, LAYERS, WIDTH
from sae_lens import (
    SAE,
    BatchTopKTrainingSAE,
    BatchTopKTrainingSAEConfig,
    JumpReLUTrainingSAE,
    JumpReLUTrainingSAEConfig,
    SAETrainer,
    StandardTrainingSAE,
    StandardTrainingSAEConfig,
    TopKTrainingSAE,
    TopKTrainingSAEConfig,
)
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.tokenization_and_batching import concat_and_batch_sequences
from sae_lens.training.activations_store import ActivationsStore
from sae_lens.training.multi_sae_trainer import MultiSAETrainer

import residuum
from residuum.extraction.inputs.packing import PackedItems
from residuum.extraction.inputs.prompts import Items, ListedRows
from residuum.training import SAELensData

BATCH, STEPS = 256, 600
HOOK = "blocks.3.hook_resid_post"


def sae():
    torch.manual_seed(0)
    return TopKTrainingSAE(TopKTrainingSAEConfig(d_in=WIDTH, d_sae=2 * FEATURES, k=4))


def config():
    return SAETrainerConfig(
        total_training_samples=BATCH * STEPS, train_batch_size_samples=BATCH, lr=3e-3, lr_end=3e-4,
        logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip


KINDS = {
    "standard": (StandardTrainingSAE, StandardTrainingSAEConfig, {"l1_coefficient": 1.0}),
    "topk": (TopKTrainingSAE, TopKTrainingSAEConfig, {"k": 4}),
    "jumprelu": (JumpReLUTrainingSAE, JumpReLUTrainingSAEConfig, {}),
    "batchtopk": (BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig, {"k": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_autoencoder_has_the_features_that_saelens_computes(kind, folder, tmp_path):
    """Each is trained, saved for inference, and loaded by both."""
    torch.manual_seed(0)
    make, config_of, options = KINDS[kind]
    data = SAELensData(folder, "resid_post.3", batch_size=BATCH)
    model = make(config_of(d_in=WIDTH, d_sae=2 * FEATURES, **options))
    trained = SAETrainer(cfg=config(), sae=model, data_provider=data).fit()
    trained.save_inference_model(tmp_path / "sae")
    theirs, ours = SAE.load_from_disk(tmp_path / "sae"), residuum.sae.load(tmp_path / "sae")
    rows = next(SAELensData(folder, "resid_post.3", batch_size=BATCH))
    with torch.no_grad():
        features = theirs.encode(rows)
        reconstruction = theirs.decode(features).numpy()
    assert 0 < (features > 0).float().sum(dim=1).mean() < 2 * FEATURES
    found = ours.encode(rows.numpy())
    np.testing.assert_allclose(found, features.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours.decode(found), reconstruction, rtol=1e-4, atol=1e-4)


def test_a_data_provider(folder, unexplained):
    model = sae()
    before = unexplained(model)
    data = SAELensData(folder, "resid_post.3", batch_size=BATCH)
    trained = SAETrainer(cfg=config(), sae=model, data_provider=data).fit()
    assert data.batches.epoch == STEPS // (4096 // BATCH)
    assert before > 0.5
    assert unexplained(trained) < 0.1


def test_a_data_provider_of_several_hooks(folder, unexplained):
    hooks = {f"layer{layer}": f"blocks.{layer}.hook_resid_post" for layer in LAYERS}
    saes = {name: sae() for name in hooks}
    data = SAELensData(folder, by_hook=True, batch_size=BATCH)
    MultiSAETrainer(cfg=config(), saes=saes, hook_names=hooks, data_provider=data).fit()
    for layer in LAYERS:
        assert unexplained(saes[f"layer{layer}"], layer) < 0.1


def test_cached_activations(rows, tmp_path, unexplained):
    store = ActivationsStore(
        model=None, dataset=None, streaming=False, hook_name=HOOK, hook_head_index=None, context_size=CONTEXT,
        d_in=WIDTH, n_batches_in_buffer=128, total_training_tokens=BATCH * STEPS, store_batch_size_prompts=32,
        train_batch_size_tokens=BATCH, prepend_bos=False, normalize_activations="none", device=torch.device("cpu"),
        dtype="float32", cached_activations_path=str(rows.export(tmp_path / "cached")),
    )  # fmt: skip
    acts, tokens = store.get_raw_llm_batch()
    assert np.array_equal(acts.numpy(), np.asarray(rows.layer(3))[: 32 * CONTEXT])
    assert tokens.tolist() == rows.token_ids[: 32 * CONTEXT].tolist()
    trained = SAETrainer(cfg=config(), sae=sae(), data_provider=store.get_data_loader()).fit()
    assert unexplained(trained) < 0.1


@pytest.mark.parametrize("separator", [1, None])
def test_packed_windows_are_those_of_saelens(separator):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 6, rng.integers(1, 30)).tolist() for _ in range(200)]
    wanted = concat_and_batch_sequences(
        iter([torch.tensor(document) for document in documents]), 16, begin_batch_token_id=separator,
        sequence_separator_token_id=separator,
    )  # fmt: skip
    items = PackedItems(
        Items(ListedRows(documents, "text"), column="text"), length=16, separator=separator, tokenizer=None, limit=None,
        on_error="stop",
    )  # fmt: skip
    for _ in items.cut():
        pass
    assert [items.item(index).prompt for index in range(len(items))] == [window.tolist() for window in wanted]
