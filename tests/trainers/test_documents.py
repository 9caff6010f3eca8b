"""The lines of docs/howto/train-sae.md that train with SAELens and load the result.

They have fewer steps here, and the sizes of the test's rows.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from conftest import FEATURES, WIDTH
from sae_lens import SAE

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "train-sae.md"
SIZES = {
    "d_in=576": f"d_in={WIDTH}", "d_sae=8 * 576": f"d_sae={2 * FEATURES}", "k=32": "k=4",
    "total_training_samples=10_000_000": "total_training_samples=256 * 600",
    "train_batch_size_samples=4096": "train_batch_size_samples=256", "batch_size=4096": "batch_size=256",
    "lr=3e-4": "lr=3e-3", "lr_end=3e-5": "lr_end=3e-4", '"windows"': "folder", "resid_post.12": "resid_post.3",
}  # fmt: skip


def test_the_page_trains_an_sae_and_loads_it(folder, unexplained, tmp_path, monkeypatch):
    section = PAGE.read_text().partition("\n## SAELens\n")[2].partition("\n## ")[0]
    training, loading = re.findall(r"```python\n(.*?)```", section.partition("* With `by_hook")[0], re.DOTALL)
    for old, new in SIZES.items():
        assert old in training, old
        training = training.replace(old, new)
    monkeypatch.chdir(tmp_path)
    names = {"folder": folder}
    exec(compile(training + loading, str(PAGE), "exec"), names)
    assert unexplained(SAE.load_from_disk("sae")) < 0.1
    assert unexplained(lambda rows: torch.from_numpy(names["sae"].reconstruct(rows.numpy()))) < 0.1
