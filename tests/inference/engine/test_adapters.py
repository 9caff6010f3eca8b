"""LoRA adapters at the start of the service: what vLLM is told, and adapters that are refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inference_svc.engine.adapters import AdapterError, load_adapters, lora_arguments
from inference_svc.engine.arguments import engine_arguments
from inference_svc.settings import InferenceSettings
from tests.reference.adapters import make_adapter


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


# ------------------------------------------------------------------------------------------- adapters of other models

WEIGHTS = "adapter_model.safetensors"
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def config_of(**sizes):
    return transformers.LlamaConfig(**{**SIZES, **sizes})


@pytest.fixture
def adapter(tmp_path):
    """Makes an adapter of a tiny Llama with other sizes, and returns its folder."""

    def adapter(**sizes):
        transformers.LlamaForCausalLM(config_of(**sizes)).save_pretrained(tmp_path / "model")
        return make_adapter(tmp_path / "joy", tmp_path / "model", 1, rank=2, alpha=2)

    return adapter


async def load(adapters, config):
    """Load adapters into an engine that takes all of them, and return the requests that it got."""
    asked = []

    async def add_lora(request):
        asked.append((request.lora_name, request.lora_int_id, request.lora_path))

    loaded = await load_adapters(add_lora, adapters, config)
    assert list(loaded) == [name for name, *_ in asked]
    return asked


async def test_each_adapter_is_loaded_under_a_number_of_its_own(adapter):
    place = str(adapter())
    assert await load({"joy": place, "calm": place}, config_of()) == [("joy", 1, place), ("calm", 2, place)]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"hidden_size": 8},
            r"its model\.layers\.0\.\S+ has \w+_features=(8|4), and that of the model \w+_features=(16|8)",
        ),
        (
            {"hidden_size": 32},
            r"its model\.layers\.0\.\S+ has \w+_features=(32|16), and that of the model \w+_features=(16|8)",
        ),
        (
            {"intermediate_size": 20},
            r"its model\.layers\.0\.mlp\.down_proj has in_features=20, and that of the model in_features=24",
        ),
        ({"num_hidden_layers": 3}, r"it has model\.layers\.2, and the last one of the model is model\.layers\.1"),
    ],
)
async def test_an_adapter_of_another_model_is_refused(adapter, sizes, told):
    place = str(adapter(**sizes))
    with pytest.raises(AdapterError, match=rf"^The LoRA adapter 'joy' from {place} is of another model: {told}\. "):
        await load({"joy": place}, config_of())


async def test_what_transformers_does_not_know_is_left_to_vllm(adapter, tmp_path):
    narrow = str(adapter(hidden_size=8))
    assert await load({"joy": narrow}, transformers.PretrainedConfig()) == [("joy", 1, narrow)]
    weights = load_file(tmp_path / "joy" / WEIGHTS)
    renamed = {name.replace("_proj", "_projection"): value for name, value in weights.items()}
    save_file(renamed, tmp_path / "joy" / WEIGHTS)
    assert await load({"joy": narrow}, config_of()) == [("joy", 1, narrow)]
    (tmp_path / "joy" / WEIGHTS).rename(tmp_path / "joy" / "adapter_model.bin")
    assert await load({"joy": narrow}, config_of()) == [("joy", 1, narrow)]


async def test_the_weights_of_modules_that_are_not_linear_are_not_compared(tmp_path):
    """GPT-2 keeps its weights transposed, and PEFT does not."""
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32)
    folder = tmp_path / "joy"
    folder.mkdir()
    name = "base_model.model.transformer.h.1.attn.c_attn"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(2, 16), f"{name}.lora_B.weight": torch.ones(48, 2)}, folder / WEIGHTS
    )
    assert await load({"joy": str(folder)}, config) == [("joy", 1, str(folder))]
    beyond = {f"{name.replace('h.1', 'h.2')}.lora_A.weight": torch.ones(2, 16)}
    save_file(beyond, folder / WEIGHTS)
    with pytest.raises(
        AdapterError, match=r"it has transformer\.h\.2, and the last one of the model is transformer\.h\.1"
    ):
        await load({"joy": str(folder)}, config)
