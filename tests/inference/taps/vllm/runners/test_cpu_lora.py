"""LoRA on a CPU: the workaround, on vLLM's own functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from inference_svc.taps.vllm.missing_names import IncompatibleEngineError
from inference_svc.taps.vllm.runners import cpu_lora

NAMES = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
ADAPTERS = torch.randn(2, 1, 3, 5, generator=torch.Generator().manual_seed(1))
"""Two adapters, whose matrices have shape [3, 5]."""
INPUTS = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
INDICES = torch.tensor([1, -1, 0, -1])


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    for module in (lora_ops, punica_cpu):
        for name in NAMES:
            function = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(function, "__wrapped__", function))


def expected():
    return torch.stack([torch.zeros(3), torch.zeros(3), ADAPTERS[0, 0] @ INPUTS[2], torch.zeros(3)]).index_put(
        (torch.tensor(0),), ADAPTERS[1, 0] @ INPUTS[0]
    )


def results():
    """What each function adds to zeros, by its name."""
    found = {name: torch.zeros(4, 3) for name in NAMES}
    punica_cpu.bgmv_shrink(INPUTS, ADAPTERS, found["bgmv_shrink"], INDICES, 1.0)
    punica_cpu.bgmv_expand(INPUTS, ADAPTERS, found["bgmv_expand"], INDICES, add_inputs=True)
    punica_cpu.bgmv_expand_slice(INPUTS, ADAPTERS, found["bgmv_expand_slice"], INDICES, 0, 3, True)
    return found


def test_vllm_alone_gives_the_last_adapter_to_tokens_without_one():
    """If this test fails, vLLM skips them itself, and this part of cpu_lora is no longer needed."""
    for result in results().values():
        assert torch.allclose(result[1], ADAPTERS[1, 0] @ INPUTS[1], atol=1e-6)


def test_tokens_without_an_adapter_get_none():
    cpu_lora.attach(None, "1.2.3")
    for name, result in results().items():
        assert torch.allclose(result, expected(), atol=1e-6), name
    grouped = torch.zeros(4, 3)
    lora_ops.sgmv_shrink(INPUTS, ADAPTERS, grouped, None, torch.ones(4, dtype=torch.long), INDICES, 4, 1, 4, 1.0)
    assert torch.allclose(grouped, expected(), atol=1e-6), "other functions of vLLM use these"


def test_infinite_rows_of_tokens_without_an_adapter_do_no_harm():
    cpu_lora.attach(None, "1.2.3")
    found = torch.zeros(4, 3)
    punica_cpu.bgmv_shrink(INPUTS.masked_fill(INDICES[:, None] < 0, torch.inf), ADAPTERS, found, INDICES, 1.0)
    assert torch.allclose(found, expected(), atol=1e-6)


def test_indices_of_other_tokens_choose_no_adapter():
    """vLLM computes the logits of a prompt's tokens with the indices of the sampled ones."""
    cpu_lora.attach(None, "1.2.3")
    found = torch.zeros(4, 3)
    punica_cpu.bgmv_expand(INPUTS, ADAPTERS, found, torch.tensor([1, 0]), add_inputs=True)
    assert not found.any()
    punica_cpu.bgmv_expand(INPUTS, ADAPTERS, found, torch.tensor([1]), add_inputs=True)
    assert torch.allclose(found, INPUTS @ ADAPTERS[1, 0].T, atol=1e-6), "a single index is that of all tokens"


def test_attaching_again_changes_nothing():
    cpu_lora.attach(None, "1.2.3")
    first = [getattr(punica_cpu, name) for name in NAMES]
    cpu_lora.attach(None, "1.2.3")
    assert [getattr(punica_cpu, name) for name in NAMES] == first


def test_another_vllm_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(punica_cpu, "bgmv_expand")
    monkeypatch.setattr(lora_ops, "bgmv_shrink", lambda inputs, weights: None)
    with pytest.raises(IncompatibleEngineError) as refused:
        cpu_lora.attach(SimpleNamespace(), "1.2.3")
    assert "vllm.lora.ops.torch_ops.lora_ops.bgmv_shrink and no vllm.lora.punica_wrapper.punica_cpu.bgmv_expand," in (
        str(refused.value)
    )
