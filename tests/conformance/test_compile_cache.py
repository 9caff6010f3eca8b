"""vLLM's cache of compiled graphs, shared with stock vLLM: neither gets the other's graph.

Each of them looks for a graph in a cache that has the other's: first stock vLLM, which must compile its own, then a
service, which must find the one of the first service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance import stock
from tests.conformance.engines import running_engine, stock_arguments
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


def test_stock_vllm_and_the_service_share_a_cache(
    engine: Engine, reference: Reference, tiny_llama: Path, tmp_path: Path, cache_root: Path
) -> None:
    of_service = stock.compiled_graphs(cache_root)
    assert of_service, "the service keeps its graph where this test looks"
    reply = engine.client.generate(stock.PROMPT, max_tokens=stock.NEW_TOKENS, ignore_eos=True, capture=ALL)
    check_capture(engine, reference, reply)

    by_stock = stock.run(cache_root, stock_arguments(tiny_llama))
    assert by_stock.token_ids == reply.token_ids
    assert by_stock.compiled > of_service, "stock vLLM compiled one of its own"

    # With a graph without taps, the service would not start: its self-test would fail.
    with running_engine("compiled", tiny_llama, tmp_path, cache_root) as another:
        again = another.client.generate(stock.PROMPT, max_tokens=stock.NEW_TOKENS, ignore_eos=True, capture=ALL)
        check_capture(another, reference, again)
    assert again.token_ids == reply.token_ids
    assert stock.compiled_graphs(cache_root) == by_stock.compiled, "the service found its graph next to stock vLLM's"
