"""Reads from vLLM's configuration what is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

from inference_svc.engine.worker_settings import site_numbers
from inference_svc.model_facts import CaptureDefaults, ModelFacts
from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.reductions import REDUCTIONS
from residuum.wire.rows.encodings import ENCODINGS, SAE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inference_svc.tap_settings import TapSettings


def facts_of(
    config: Any,
    settings: TapSettings,
    name: str,
    ranks: Sequence[dict[str, Any]],
    adapters: Iterable[str] = (),
) -> ModelFacts:
    """Return what is served.

    Args:
        config: vLLM's `VllmConfig`.
        settings: The settings of the taps.
        name: What the model is called.
        ranks: What each rank says of itself; see `TappedWorker.residuum_describe`.
        adapters: The names of the LoRA adapters.
    """
    model, parallel = config.model_config, config.parallel_config
    return ModelFacts(
        name=name,
        num_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        dtype=WIRE_TYPES[model.dtype],
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        adapters=tuple(adapters),
        max_logprobs=_max_logprobs(model),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        eager=bool(model.enforce_eager),
        vllm_version=vllm.__version__,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        sites=tuple(site_numbers(settings)),  # type: ignore[arg-type]
        site_widths=tuple(ranks[0]["site_widths"]),
        site_layers=_site_layers(ranks, model.get_total_num_hidden_layers()),
        steering_sites=_steering_sites(ranks),
        attention=_attention(ranks),
        pool_bytes=sum(rank["pool_bytes"] for rank in ranks),
        table_bytes=sum(rank["table_bytes"] for rank in ranks),
        ring_bytes=sum(rank["ring_bytes"] for rank in ranks),
        control_paths=tuple(rank["control_path"] for rank in ranks if rank["control_path"]),
        model_runner=model_runner(config),
        folded_norms=sum(rank["folded_norms"] for rank in ranks if rank["tensor_rank"] == 0),
        encodings=tuple(encoding for encoding in ENCODINGS.values() if encoding != SAE),
        reductions=REDUCTIONS,
        capture_defaults=CaptureDefaults(
            ENCODINGS[settings.capture_encoding], settings.capture_rp_k, settings.capture_topk_k
        ),
    )


def _site_layers(ranks: Sequence[dict[str, Any]], num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers that have each site, over all pipeline stages; empty if all layers have all sites."""
    by_site = zip(*(rank["site_layers"] for rank in ranks), strict=True)
    found = tuple(tuple(sorted({layer for stage in stages for layer in stage})) for stages in by_site)
    return found if any(len(layers) < num_layers for layers in found) else ()


def _steering_sites(ranks: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """Return the sites at which every rank can steer."""
    return tuple(sorted(set.intersection(*(set(rank["steering_sites"]) for rank in ranks))))


def _attention(ranks: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the attention of each layer."""
    stages = {rank["first_layer"]: rank["attention"] for rank in ranks}
    return tuple(layer for first in sorted(stages) for layer in stages[first])


def model_runner(config: Any) -> str:
    """Return which of vLLM's model runners a `VllmConfig` selects: "v1" or "v2"."""
    return "v2" if config.use_v2_model_runner else "v1"


def _max_logprobs(model: Any) -> int:
    """Return how many of the most likely tokens a request may ask for. vLLM's -1 means all."""
    vocab_size = int(model.get_vocab_size())
    return vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, vocab_size)
