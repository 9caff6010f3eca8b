"""Files of sparse autoencoders: SAELens' folders, Gemma Scope's params.npz, and our own safetensors files.

Example:
    >>> sae = residuum.sae.load("layer_12/width_16k/average_l0_82/params.npz")
    >>> residuum.sae.save(sae, "layer12.safetensors")
"""

from __future__ import annotations

import os
from pathlib import Path

from residuum.exceptions import BadSAE, InvalidRequest
from residuum.sae import formats
from residuum.values.tensors.sae import SAE

__all__ = ["load", "save"]


def load(path: str | os.PathLike[str]) -> SAE:
    """Read a sparse autoencoder. Neither torch nor SAELens is needed.

    Args:
        path: One of

            - a folder of SAELens, with cfg.json and sae_weights.safetensors, of the architectures "standard",
              "jumprelu", "topk" and "batchtopk";
            - a params.npz of Gemma Scope, or a folder with one;
            - a .safetensors file that `save` wrote.

    Raises:
        BadSAE: The file is of another kind, or the autoencoder computes something else. The message says what.
        FileNotFoundError: The file does not exist.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{place} does not exist.")
    try:
        return _load(place)
    except BadSAE as error:
        raise BadSAE(f"{place}: {error}", reason=error.reason) from None
    except InvalidRequest as error:  # safetensors' complaint, which names the file
        raise BadSAE(str(error), reason=error.reason) from None


def _load(place: Path) -> SAE:
    if place.is_dir():
        if (place / formats.SAELENS_CONFIG).exists():
            return formats.load_saelens(place)
        if (place / formats.GEMMA_SCOPE_FILE).exists():
            return formats.load_gemma_scope(place / formats.GEMMA_SCOPE_FILE)
        raise formats.refusal(f"the folder has neither {formats.SAELENS_CONFIG} nor {formats.GEMMA_SCOPE_FILE}.")
    if place.suffix == ".npz":
        return formats.load_gemma_scope(place)
    if place.suffix == ".safetensors":
        return formats.load_own(place)
    raise formats.refusal(
        "give a folder of SAELens, a params.npz, or a .safetensors file that residuum.sae.save wrote."
    )


def save(sae: SAE, path: str | os.PathLike[str]) -> None:
    """Write a sparse autoencoder to a safetensors file.

    The tensors are `encoder` and `decoder` ([features, width], in their dtype), and as float32 `encoder_bias`,
    `decoder_bias` and, for "jumprelu", `threshold`. The metadata, all text, are `format` ("residuum.sae.v1"),
    `activation`, `active` for "topk", and `layer_norm` ("true" or "false").

    Raises:
        OSError: The file cannot be written.
    """
    formats.save_own(sae, path)
