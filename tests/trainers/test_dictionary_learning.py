"""dictionary_learning's trainSAE takes our buffer in place of its ActivationBuffer."""

from __future__ import annotations

import json

import torch
from conftest import FEATURES, WIDTH
from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer
from dictionary_learning.training import trainSAE

from residuum.training import DictionaryLearningBuffer


def test_train_sae(folder, tmp_path, unexplained):
    trainer = {
        "trainer": TopKTrainer, "dict_class": AutoEncoderTopK, "activation_dim": WIDTH, "dict_size": 2 * FEATURES,
        "k": 4, "lr": 3e-3, "steps": 600, "warmup_steps": 0, "decay_start": None, "layer": 3, "lm_name": "x",
        "device": "cpu", "seed": 0,
    }  # fmt: skip
    buffer = DictionaryLearningBuffer(folder, "resid_post.3", out_batch_size=256)
    trainSAE(buffer, [trainer], steps=600, save_dir=str(tmp_path), device="cpu", normalize_activations=True)
    saved = json.loads((tmp_path / "trainer_0" / "config.json").read_text())
    assert saved["buffer"]["points"] == ["resid_post.3"]
    model = AutoEncoderTopK(WIDTH, 2 * FEATURES, 4)
    model.load_state_dict(torch.load(tmp_path / "trainer_0" / "ae.pt"))
    assert unexplained(model) < 0.1
