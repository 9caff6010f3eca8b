"""EleutherAI's sparsify trains on rows that are looked up instead of computed."""

from __future__ import annotations

import pytest
from conftest import FEATURES, LAYERS
from sparsify import SparseCoder, SparseCoderConfig, TrainConfig, Trainer

from residuum.training import SparsifyData


@pytest.mark.parametrize("layers", [LAYERS, LAYERS[:1]])
def test_trainer(folder, tmp_path, monkeypatch, unexplained, layers):
    data = SparsifyData(folder, [f"resid_post.{layer}" for layer in layers], context_length=16)
    config = TrainConfig(
        SparseCoderConfig(num_latents=2 * FEATURES, k=4), batch_size=1, hookpoints=data.model.hookpoints,
        optimizer="adam", lr=3e-3, lr_warmup_steps=1, log_to_wandb=False, save_dir=str(tmp_path),
    )  # fmt: skip
    trainer = Trainer(config, data, data.model)
    before = unexplained(lambda x: trainer.saes[f"layers.{layers[0]}"](x).sae_out, layers[0])
    assert before > 0.5
    trainer.fit()
    for layer in layers:
        model = SparseCoder.load_from_disk(tmp_path / "unnamed" / f"layers.{layer}")
        assert unexplained(lambda x, model=model: model(x).sae_out, layer) < 0.25
