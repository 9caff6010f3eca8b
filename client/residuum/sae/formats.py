"""Reads and writes the formats of files; see the package."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadSAE
from residuum.exports.tensor_files import write_safetensors
from residuum.values.tensors.files import read_safetensors
from residuum.values.tensors.sae import SAE, Activation

SAELENS_CONFIG = "cfg.json"
SAELENS_WEIGHTS = "sae_weights.safetensors"
GEMMA_SCOPE_FILE = "params.npz"
OWN_FORMAT = "residuum.sae.v1"
"""The value of "format" in the metadata of our own files."""

Arrays = dict[str, npt.NDArray[Any]]

_ARCHITECTURES: dict[str, Activation] = {
    "standard": "relu",
    "jumprelu": "jumprelu",
    "topk": "topk",
    "batchtopk": "batchtopk",
    "matryoshka_batchtopk": "batchtopk",
}
"""The activations of SAELens' architectures."""

_AS_IS = ("none", "expected_average_only_in", None, False, True)
"""The values of SAELens' normalize_activations with which its `encode` takes rows as they are. Old files have a bool,
which SAELens reads as "none" or "expected_average_only_in"."""


def load_saelens(folder: Path) -> SAE:
    """Read a folder of SAELens."""
    try:
        config = json.loads((folder / SAELENS_CONFIG).read_text())
    except ValueError as error:
        raise refusal(f"{SAELENS_CONFIG} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise refusal(f"{SAELENS_CONFIG} is not an object.")
    arrays, _ = read_safetensors(folder / SAELENS_WEIGHTS)
    name = _text(config, "architecture", "standard")
    options = config.get("activation_fn_kwargs") or {}
    activation = _text(config, "activation_fn_str", _text(config, "activation_fn", "relu"))  # before SAELens 6
    if activation not in ("relu", "topk"):
        raise refusal(f"the activation function {activation!r} is not supported; relu and topk are.")
    if name == "standard" and activation == "topk":
        name, config = "topk", {**config, "k": options.get("k") if isinstance(options, dict) else None}
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise refusal(f"the architecture {name!r} computes features in another way than the known ones: {known}.")
    normalization = config.get("normalize_activations")
    if not isinstance(normalization, str | bool | None) or normalization not in (*_AS_IS, "layer_norm"):
        raise refusal(f"normalize_activations is {normalization!r}; only none and layer_norm are known.")
    if config.get("finetuning_scaling_factor"):
        raise refusal("it has a finetuning_scaling_factor. Fold it into the decoder, and save it again.")
    encoder, decoder = _weights(arrays)
    bias = arrays.get("b_enc")
    if name == "topk" and config.get("rescale_acts_by_decoder_norm"):
        norms = np.linalg.norm(decoder.astype(np.float64), axis=1)
        if not norms.all():
            raise refusal("a row of W_dec is zero, so activations cannot be rescaled by its norm.")
        encoder = _scaled(encoder, norms)
        decoder = _scaled(decoder, 1 / norms)
        bias = None if bias is None else bias.astype(np.float64) * norms
    return SAE(
        encoder,
        decoder,
        encoder_bias=bias,
        decoder_bias=arrays.get("b_dec"),
        activation=_ARCHITECTURES[name],
        threshold=_threshold(arrays) if name not in ("standard", "topk") else None,
        active=_count(config, "k") if name == "topk" else None,
        subtracts_decoder_bias=bool(config.get("apply_b_dec_to_input", True)),
        layer_norm=normalization == "layer_norm",
    )


def load_gemma_scope(file: Path) -> SAE:
    """Read a params.npz of Gemma Scope."""
    if not zipfile.is_zipfile(file):  # numpy would return the single array of a .npy file
        raise refusal("it is not a .npz file of arrays.")
    try:
        with np.load(file, allow_pickle=False) as data:
            arrays = {f"W_{name[2:]}" if name.startswith("w_") else name: data[name] for name in data.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise refusal(f"it is not a .npz file of arrays: {error}.") from None
    if np.any(arrays.get("scaling_factor", np.ones(1)) != 1):
        raise refusal("it has a scaling_factor. Fold it into the decoder, and save it again.")
    encoder, decoder = _weights(arrays)
    return SAE(
        encoder,
        decoder,
        encoder_bias=arrays.get("b_enc"),
        decoder_bias=arrays.get("b_dec"),
        activation="jumprelu",
        threshold=_threshold(arrays),
    )


def load_own(file: Path) -> SAE:
    """Read a file that `save_own` wrote."""
    arrays, metadata = read_safetensors(file)
    if metadata.get("format") != OWN_FORMAT:
        raise refusal(
            f"its metadata does not have the format {OWN_FORMAT!r}, which residuum.sae.save writes. For SAELens, give "
            "the folder."
        )
    missing = {"encoder", "decoder"} - {*arrays}
    if missing:
        raise refusal(f"it has no {min(missing)}.")
    return SAE(
        arrays["encoder"],
        arrays["decoder"],
        encoder_bias=arrays.get("encoder_bias"),
        decoder_bias=arrays.get("decoder_bias"),
        activation=cast("Activation", metadata.get("activation", "relu")),
        threshold=arrays.get("threshold"),
        active=_count({"active": _number(metadata["active"])}, "active") if "active" in metadata else None,
        layer_norm=metadata.get("layer_norm") == "true",
    )


def save_own(sae: SAE, path: str | os.PathLike[str]) -> None:
    """Write a file; see `residuum.sae.save`."""
    arrays = {
        "encoder": sae.encoder,
        "decoder": sae.decoder,
        "encoder_bias": sae.encoder_bias,
        "decoder_bias": sae.decoder_bias,
    }
    metadata = {"format": OWN_FORMAT, "activation": sae.activation, "layer_norm": str(sae.layer_norm).lower()}
    if sae.threshold is not None:
        arrays["threshold"] = sae.threshold
    if sae.active is not None:
        metadata["active"] = str(sae.active)
    write_safetensors(path, arrays, metadata)


def refusal(why: str) -> BadSAE:
    """Return the error of a file that cannot be used."""
    return BadSAE(f"No sparse autoencoder can be read: {why}", reason="INVALID_FIELD")


def _weights(arrays: Arrays) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return encoder and decoder, [features, width], of W_enc [width, features] and W_dec [features, width]."""
    missing = {"W_enc", "W_dec"} - {*arrays}
    if missing:
        raise refusal(f"it has no {min(missing)}, but {', '.join(sorted(arrays))}.")
    encoder, decoder = arrays["W_enc"], arrays["W_dec"]
    if encoder.shape[::-1] != decoder.shape:
        raise refusal(
            f"W_enc is {list(encoder.shape)} and W_dec {list(decoder.shape)}; one must be the other's transpose."
        )
    return encoder.T, decoder


def _scaled(weights: npt.NDArray[Any], factors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    scaled: npt.NDArray[Any] = (weights.astype(np.float64) * factors[:, None]).astype(np.float32)
    return scaled


def _threshold(arrays: Arrays) -> npt.NDArray[Any]:
    if "threshold" not in arrays:
        raise refusal(f"it has no threshold, but {', '.join(sorted(arrays))}.")
    return arrays["threshold"]


def _text(config: dict[str, Any], name: str, default: str) -> str:
    value = config.get(name) or default
    if not isinstance(value, str):
        raise refusal(f"{name} is {value!r}, not a text.")
    return value


def _count(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refusal(f"{name} is {value!r}, not a whole number.")
    return value


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text
