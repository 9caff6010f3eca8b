"""Trainers of other packages, each trained for some steps. `make test-trainers` makes their environment."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("sae_lens") is None:  # `make test-trainers` fails if it then finds no test
    collect_ignore_glob = ["test_*.py"]

WIDTH, FEATURES, ACTIVE, CONTEXT = 16, 32, 2, 8
LAYERS = (3, 5)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """An extraction of 4,096 rows at two layers, each a sum of two of 32 directions."""
    from tests.client.support.extraction_files import write_extraction

    rng = np.random.default_rng(0)
    directions = rng.standard_normal((len(LAYERS), FEATURES, WIDTH))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    count = 4096
    strengths = np.zeros((count, FEATURES))
    for row in strengths:
        row[rng.choice(FEATURES, ACTIVE, replace=False)] = rng.uniform(1, 2, ACTIVE)
    values = np.einsum("rf,lfw->lrw", strengths, directions).astype(np.float32)
    shards = [[CONTEXT] * (count // CONTEXT // 4)] * 4
    return write_extraction(
        tmp_path_factory.mktemp("rows") / "job", shards, layers=LAYERS, width=WIDTH, pack=True,
        values=lambda rows: values[:, rows],
    )  # fmt: skip


@pytest.fixture(scope="session")
def rows(folder):
    import residuum

    return residuum.Extracted(folder)


@pytest.fixture(scope="session")
def unexplained(rows):
    """The share of the variance of a layer's rows that a reconstruction misses."""
    import torch

    def share(reconstruct, layer=3):
        x = torch.from_numpy(np.array(rows.layer(layer), np.float32))
        with torch.no_grad():
            missed = (x - reconstruct(x)).square().sum()
        return float(missed / (x - x.mean(0)).square().sum())

    return share
