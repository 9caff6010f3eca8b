"""vLLM's cache of compiled graphs, shared with stock vLLM: neither gets the other's graph."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.conformance import stock
from tests.conformance.engines import stock_arguments
from tests.conformance.rows import ALL, check_capture

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("conformance"),
    pytest.mark.parametrize("engine", ["compiled"], indirect=True),
]


def test_the_taps_work_where_stock_vllm_compiled_first(
    engine: Engine, stock_before: stock.Run, reference: Reference, cache_root: Path
) -> None:
    """Otherwise the service would not have started: its self-test would have failed."""
    assert stock_before.compiled, "stock vLLM keeps its graph where this test looks"
    assert stock.compiled_graphs(cache_root) > stock_before.compiled, "the service compiled its own graph"
    reply = engine.client.generate(stock.PROMPT, max_tokens=stock.NEW_TOKENS, ignore_eos=True, capture=ALL)
    check_capture(engine, reference, reply)
    assert reply.token_ids == stock_before.token_ids


def test_stock_vllm_works_where_the_service_compiled_first(
    engine: Engine, stock_before: stock.Run, tiny_llama: Path, cache_root: Path
) -> None:
    for graph in stock_before.compiled:
        shutil.rmtree(graph)
    of_service = stock.compiled_graphs(cache_root)
    assert of_service
    after = stock.run(cache_root, stock_arguments(tiny_llama))
    assert after.token_ids == stock_before.token_ids
    assert after.compiled > of_service, "stock vLLM compiled its own graph"
