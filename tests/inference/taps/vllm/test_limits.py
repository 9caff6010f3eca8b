"""Engine configurations that the taps refuse at startup."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from inference_svc.taps.errors import UnsupportedEngineError
from inference_svc.taps.vllm.limits import refuse_unsupported


def config(
    speculative: object = None,
    dual_batch: bool = False,
    fast_prefill: bool = False,
    transfer: object = None,
    **passes: bool,
) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(use_ubatching=dual_batch),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
        kv_transfer_config=transfer,
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(**passes)),
    )


def transfer(connector: str, *joined: str, **options: Any) -> KVTransferConfig:
    extra = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in joined]}
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra if joined else {}, **options
    )


def test_a_plain_engine_is_served() -> None:
    refuse_unsupported(config())
    refuse_unsupported(config(enable_sp=False))
    refuse_unsupported(config(transfer=transfer("OffloadingConnector")))


def test_the_batch_invariant_mode_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself would stop with "'function' object is not subscriptable"."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedEngineError, match="no batch-invariant kernels for a CPU"):
        refuse_unsupported(config())


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (config(speculative=object()), "speculative decoding"),
        (config(enable_sp=True), "sequence parallelism"),
        (config(dual_batch=True), "dual batch overlap"),
        (config(fast_prefill=True), "kv_sharing_fast_prefill"),
        (config(transfer=transfer("NixlConnector", kv_load_failure_policy="recompute")), "policy=recompute: .* twice"),
        (config(transfer=transfer("ExampleConnector")), "the KV connector ExampleConnector"),
        (
            config(transfer=transfer("MultiConnector", "OffloadingConnector", "LMCacheConnectorV1")),
            "the KV connector LMCacheConnectorV1",
        ),
    ],
)
def test_inexact_configurations_are_refused_by_name(asked: SimpleNamespace, named: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=named):
        refuse_unsupported(asked)
