"""Write tests/client/analysis/saes: small autoencoders as SAELens saves them, with what SAELens computes from them.

    pip install sae-lens && python scripts/make_sae_fixtures.py

It runs in an environment of its own, because SAELens needs other versions of some packages. `RESULTS` has the rows, and
the features and reconstructions of each folder. Run it again for a new version of SAELens.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from sae_lens import (  # type: ignore[import-not-found, unused-ignore]
    JumpReLUSAE,
    JumpReLUSAEConfig,
    StandardSAE,
    StandardSAEConfig,
    TopKSAE,
    TopKSAEConfig,
    __version__,
)

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "client" / "analysis" / "saes"
RESULTS = "expected.npz"
WIDTH, FEATURES, ROWS = 24, 80, 12
SHARED = {"d_in": WIDTH, "d_sae": FEATURES, "dtype": "float32", "device": "cpu"}
CASES = {
    "standard": (StandardSAE, StandardSAEConfig(**SHARED)),
    "standard-no-bias": (StandardSAE, StandardSAEConfig(**SHARED, apply_b_dec_to_input=False)),
    "standard-layer-norm": (StandardSAE, StandardSAEConfig(**SHARED, normalize_activations="layer_norm")),
    "jumprelu": (JumpReLUSAE, JumpReLUSAEConfig(**SHARED)),
    "topk": (TopKSAE, TopKSAEConfig(**SHARED, k=7)),
    "topk-rescaled": (TopKSAE, TopKSAEConfig(**SHARED, k=7, rescale_acts_by_decoder_norm=True)),
    "gemma-scope": (JumpReLUSAE, JumpReLUSAEConfig(**SHARED, apply_b_dec_to_input=False)),
}


def main() -> None:
    """Write all folders."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    torch.manual_seed(0)
    rows = torch.randn(ROWS, WIDTH) * 3 + 0.5
    results = {"version": np.array(__version__), "rows": rows.numpy()}
    for name, (kind, config) in CASES.items():
        sae = kind(config)
        for part, scale in (("W_enc", 0.4), ("W_dec", 0.6), ("b_enc", 0.5), ("b_dec", 0.7)):
            getattr(sae, part).data = torch.randn(getattr(sae, part).shape) * scale
        if hasattr(sae, "threshold"):
            sae.threshold.data = torch.rand(FEATURES) * 2
        with torch.no_grad():
            features = sae.encode(rows)
            results[f"{name}.features"] = features.numpy()
            results[f"{name}.rows"] = sae.decode(features).numpy()
        if name == "gemma-scope":
            (FOLDER / name).mkdir()
            state = {key.replace("W_", "w_"): value.numpy() for key, value in sae.state_dict().items()}
            np.savez(FOLDER / name / "params.npz", **state)
        else:
            sae.save_model(FOLDER / name)
    np.savez_compressed(FOLDER / RESULTS, **results)


if __name__ == "__main__":
    main()
