"""The reference for rows with LoRA adapters computes what PEFT computes, and both read each other's adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.reference.adapters import EVERY_MODULE, make_adapter, merge

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

FEW_MODULES = ("q_proj", "v_proj", "down_proj")
TOKENS = torch.arange(5, 25)[None]


def load(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def rows(model: nn.Module) -> torch.Tensor:
    """Return the hidden states of all layers, [layers + 1, tokens, hidden]."""
    return torch.cat(model(TOKENS, output_hidden_states=True).hidden_states)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize(
    ("rank", "alpha", "modules", "rslora"), [(12, 18, EVERY_MODULE, False), (4, 4, FEW_MODULES, True)]
)
def test_peft_computes_the_same_rows(
    tiny_llama: Path, tmp_path: Path, rank: int, alpha: int, modules: tuple[str, ...], rslora: bool
) -> None:
    """PEFT computes the adapter beside each module; the reference adds it to the weights."""
    made = make_adapter(tmp_path / "made", tiny_llama, 1, rank=rank, alpha=alpha, modules=modules, rslora=rslora)
    merged = load(tiny_llama)
    merge(merged, made)
    expected = rows(PeftModel.from_pretrained(load(tiny_llama), made))
    assert error(rows(merged), expected) < 1e-5
    assert error(rows(load(tiny_llama)), expected) > 0.02, "the adapter changes the rows"


def test_an_adapter_that_peft_saved_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(EVERY_MODULE), init_lora_weights=False)
    model = get_peft_model(load(tiny_llama), config)
    model.save_pretrained(tmp_path)
    merged = load(tiny_llama)
    merge(merged, tmp_path)
    assert error(rows(merged), rows(model)) < 1e-5
