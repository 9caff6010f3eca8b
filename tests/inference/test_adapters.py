"""LoRA adapters at the start of the service: what vLLM is told, and adapters that are refused."""

from __future__ import annotations

import json

import pytest

from inference_svc.engine.adapters import AdapterError, lora_arguments
from inference_svc.engine.arguments import engine_arguments
from inference_svc.settings import InferenceSettings


@pytest.fixture
def write(tmp_path):
    """Writes the configuration of an adapter, and returns the adapter's folder."""

    def write(name, config):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return str(folder)

    return write


def test_without_adapters_vllm_is_told_nothing():
    assert lora_arguments({}) == {}


@pytest.mark.parametrize(
    ("configs", "rank"),
    [
        ([{"r": 1}], 8),
        ([{"r": 16}, {"r": 8}], 16),
        ([{"r": 12}, {"r": 17}], 32),
        ([{"r": 4, "rank_pattern": {"q_proj": 64}}], 64),
        ([{"r": 512, "rank_pattern": None}], 512),
    ],
)
def test_the_engine_has_room_for_all_adapters_at_once(write, configs, rank):
    places = {f"a{number}": write(f"a{number}", config) for number, config in enumerate(configs)}
    assert lora_arguments(places) == {
        "enable_lora": True,
        "max_lora_rank": rank,
        "max_loras": len(configs),
        "max_cpu_loras": len(configs),
    }


def test_engine_args_may_choose_less_room(write):
    modules = [f"{name}={write(name, {'r': 8})}" for name in ("joy", "calm")]
    settings = InferenceSettings(model="x", lora_modules=modules, engine_args={"max_loras": 1})
    arguments = engine_arguments(settings)
    assert (arguments["max_loras"], arguments["max_cpu_loras"]) == (1, 2)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "is not PEFT's configuration"),
        ("[]", "is not PEFT's configuration"),
        ({"r": "high"}, "is not PEFT's configuration"),
        ({"lora_alpha": 8}, "is not PEFT's configuration"),
        ({"r": 513}, "has rank 513, but vLLM serves ranks up to 512"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_named(write, config, told):
    place = write("joy", config)
    with pytest.raises(AdapterError, match=r"^The LoRA adapter 'joy' ") as refused:
        lora_arguments({"joy": place})
    assert told in str(refused.value)
    assert "--lora-modules" in str(refused.value)


def test_an_adapter_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(AdapterError, match=r"'joy' does not exist: .* --lora-modules joy=FOLDER$"):
        lora_arguments({"joy": str(tmp_path)})
