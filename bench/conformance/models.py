"""Makes tiny random models, each with a tokenizer that the service requires but no request uses."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Collection
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models

from bench.conformance.architectures import MAX_LENGTH, VOCABULARY, Architecture

_GAIN = 1.2
"""Standard deviation of a linear layer's output for inputs with unit variance. Each layer then adds about as much to
the residual stream as is already there, so the rows of neighbouring layers differ clearly."""
_EMBEDDING = 0.5
_BIAS = 0.1
_NORM = 0.2
"""How far the weights of norms and biases are moved from their defaults. Then a norm that is left out, or taken from
another layer, changes the rows."""
_SHIFTED = {"e_score_correction_bias", "expert_bias", "layer_scalar"}
"""The names of further weights, some of which are buffers in transformers, that are moved from their defaults."""
ONE_AT_A_TIME = threading.Lock()
"""Torch has one random generator, and transformers ties and initialises weights by global state: two models that are
made or loaded at a time get other weights, or untied ones."""


def make_model(architecture: Architecture, folder: Path) -> Path:
    """Write a model with random float32 weights into a folder. An architecture always gets the same weights."""
    with ONE_AT_A_TIME:
        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(zlib.crc32(architecture.name.encode()))
        config = getattr(transformers, architecture.config_class)(**architecture.values)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            _randomise(model, architecture.unchanged)
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    if architecture.vllm_class:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture.vllm_class]}))
    return folder


def _randomise(model: torch.nn.Module, unchanged: Collection[str]) -> None:
    """Draw new weights, except for `unchanged` and the parameters of state spaces, which need their own ranges."""
    scale = 1.0 / model.config.hidden_size**0.5 if "gemma" in model.config.model_type else _EMBEDDING
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        module = model.get_submodule(name.rpartition(".")[0])
        if last in unchanged:
            continue
        if isinstance(module, torch.nn.Embedding):
            parameter.normal_(0.0, scale)
        elif last in _SHIFTED:
            parameter.add_(torch.randn_like(parameter) * _BIAS)
        elif parameter.ndim in {2, 3} and last not in {"A_log", "conv1d"} and not isinstance(module, torch.nn.Conv1d):
            # GPT-2's Conv1D has the inputs in the first dimension; all others have them in the last.
            inputs = parameter.shape[0] if type(module).__name__ == "Conv1D" else parameter.shape[-1]
            parameter.normal_(0.0, _GAIN / inputs**0.5)
        elif parameter.ndim == 1 and last in {"weight", "bias"} and not isinstance(module, torch.nn.Conv1d):
            parameter.add_(torch.randn_like(parameter) * (_NORM if last == "weight" else _BIAS))
            if last == "weight":
                _shorten_scores(model, name, parameter)
    for name, buffer in model.named_buffers():
        if name.rsplit(".", 1)[-1] in _SHIFTED:
            buffer.add_(torch.randn_like(buffer) * _BIAS)


def _shorten_scores(model: torch.nn.Module, name: str, norm: torch.nn.Parameter) -> None:
    """Change norms whose queries and keys would give far larger attention scores than those of trained models have.

    bfloat16 would round such scores so much that attention chose other tokens.
    """
    if type(model.get_submodule(name.rpartition(".")[0])).__name__.endswith("1P"):
        norm.sub_(1.0)  # Nemotron's norm adds 1
    if model.config.model_type == "gemma4_text" and name.endswith(".q_norm.weight"):
        norm.mul_(len(norm) ** -0.5)  # Gemma 4 has no other factor for the scores


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"t{index}": index for index in range(3, VOCABULARY)}}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),  # noqa: S106 - no secret
        pad_token="<pad>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        model_max_length=MAX_LENGTH,
    )
