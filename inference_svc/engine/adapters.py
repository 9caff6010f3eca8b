"""LoRA adapters: vLLM's arguments for them, and their load when the engine starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from inference_svc.engine.adapter_shapes import contradiction, model_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

_CONFIG = "adapter_config.json"

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of max_lora_rank that vLLM accepts, except 1: not all kernels take a rank below 8."""


class AdapterError(RuntimeError):
    """A LoRA adapter cannot be loaded. The message names it and says why."""


def lora_arguments(adapters: Mapping[str, str]) -> dict[str, Any]:
    """Return vLLM's arguments for adapters, all of which may be in one batch; none without adapters.

    Args:
        adapters: The folder of each adapter by its name, or its name on the Hugging Face hub, from where it is
            downloaded.

    Raises:
        AdapterError: An adapter cannot be read, or its rank is larger than vLLM can serve.
    """
    if not adapters:
        return {}
    rank = max(_rank_of(name, place) for name, place in adapters.items())
    return {
        "enable_lora": True,
        "max_lora_rank": next(allowed for allowed in _RANKS if allowed >= rank),
        "max_loras": len(adapters),
        # All stay loaded. vLLM would read one that it had dropped from its folder again, which may have changed.
        "max_cpu_loras": len(adapters),
    }


async def load_adapters(
    add_lora: Callable[[LoRARequest], Awaitable[object]], adapters: Mapping[str, str], config: Any
) -> dict[str, LoRARequest]:
    """Load adapters into a running engine, and return by name what its requests must have.

    Args:
        add_lora: The method of vLLM's engine that loads one.
        adapters: Where the adapters are, as for `lora_arguments`.
        config: The configuration of the model, of transformers.

    Raises:
        AdapterError: An adapter is of another model, or vLLM refuses it.
    """
    await asyncio.to_thread(_check_shapes, adapters, config)
    loaded = {}
    for number, (name, place) in enumerate(adapters.items(), 1):
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=place)
        try:
            await add_lora(request)
        except Exception as error:  # vLLM raises exceptions of many types
            raise AdapterError(
                f"vLLM cannot load the LoRA adapter {name!r} from {place}: {error} Correct the adapter, or leave it "
                "out of --lora-modules."
            ) from error
        loaded[name] = request
    return loaded


def _check_shapes(adapters: Mapping[str, str], config: Any) -> None:
    model = model_of(config) if adapters else None
    for name, place in adapters.items() if model is not None else ():
        why = contradiction(Path(get_adapter_absolute_path(place)), model)
        if why:
            raise AdapterError(
                f"The LoRA adapter {name!r} from {place} is of another model: {why}. Leave it out of --lora-modules, "
                "or serve its model."
            )


def _rank_of(name: str, place: str) -> int:
    """Return the largest rank in an adapter.

    Raises:
        AdapterError: The adapter cannot be read, or its rank is larger than vLLM can serve.
    """
    try:
        config = json.loads(Path(get_adapter_absolute_path(place), _CONFIG).read_text())
        rank = max(int(value) for value in (config["r"], *(config.get("rank_pattern") or {}).values()))
    except FileNotFoundError:
        raise AdapterError(
            f"The LoRA adapter {name!r} does not exist: there is no {_CONFIG} in {place!r}, neither as a folder nor on "
            f"the Hugging Face hub. Give the folder that PEFT has saved: --lora-modules {name}=FOLDER"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise AdapterError(
            f"The LoRA adapter {name!r} cannot be read: the {_CONFIG} in {place!r} is not PEFT's configuration of a "
            f"LoRA adapter, or cannot be downloaded ({error!r}). Give a folder that PEFT has saved: --lora-modules "
            f"{name}=FOLDER"
        ) from error
    if rank > _RANKS[-1]:
        raise AdapterError(
            f"The LoRA adapter {name!r} has rank {rank}, but vLLM serves ranks up to {_RANKS[-1]}. Leave it out of "
            "--lora-modules."
        )
    return rank
