"""An engine with several stores, as real processes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import residuum
from residuum.wire.placement import first_rank
from svc_common.launcher import Service, start_store
from tests import one_process, ports
from tests.warm_start import start_inference

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

START_SECONDS = 200.0
ALL = residuum.Capture(layers="all")
EAGER = [
    "--enforce-eager",
    "--kv-cache-gib",
    "0.25",
    "--max-num-batched-tokens",
    "128",
    "--max-num-seqs",
    "8",
    one_process.FLAG,
]
NAMES = ("a", "b")


def placed(store: str, start: int = 0) -> str:
    """Return a request ID whose capture is placed on a store."""
    return next(name for at in range(start, 1 << 20) if first_rank(NAMES, name := f"x-{at}") == store)


def test_killing_one_store_does_not_affect_the_other(tiny_llama: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:

        def run(service: Service) -> Service:
            stack.callback(service.stop)
            return service

        stores = {name: run(start_store(tmp_path / name, port=ports.reserve())) for name in NAMES}
        for store in stores.values():
            store.wait_until_serving(30)
        listed = ",".join(f"{name}={store.endpoint}" for name, store in stores.items())
        inference = run(start_inference(tmp_path, str(tiny_llama), listed, [*EAGER, "--fixed-stores"]))
        inference.wait_until_serving(START_SECONDS)
        client = stack.enter_context(residuum.Client(inference.endpoint))

        with pytest.raises(
            residuum.UnknownSite, match=r"mlp_out is not enabled.* enabled: resid_post.* --capture-sites"
        ):
            client.generate([5, 6, 7], capture=residuum.Capture(layers=[0], sites=["mlp_out"]))

        replies = client.generate_many([[5, 6, 7]] * 12, max_tokens=8, capture=ALL, progress=False)
        for reply in replies:
            assert client.activations(reply.request_id).manifest.is_complete
        kept = {summary.capture_id: summary.store for summary in client.captures()}
        assert kept == {reply.request_id: first_rank(NAMES, reply.request_id) for reply in replies}
        assert client.info(check_store=True).store_reachable

        port = int(stores["b"].endpoint.rpartition(":")[2])
        with client.stream([5, 6, 7], max_tokens=300, ignore_eos=True, capture=ALL, request_id=placed("b")) as stream:
            tokens = iter(stream)
            for _ in range(60):
                next(tokens)
            stores["b"].kill()
            for at in range(4):
                name = placed("a", start=1000 * at)
                client.generate([5, 6, 7], max_tokens=20, capture=ALL, request_id=name)
                assert client.activations(name).manifest.is_complete, "the other store accepts its own captures"
            with pytest.raises(residuum.StoreUnreachable, match="The store b "):
                client.generate([5, 6, 7], max_tokens=2, capture=ALL, request_id=placed("b", start=1000))
            assert client.generate([5, 6, 7], max_tokens=2, capture=ALL).captured, (
                "the service chose an ID whose store answers"
            )
            with pytest.raises(residuum.Unreachable, match="The store b "):
                list(client.captures())
            run(start_store(tmp_path / "b", port=port)).wait_until_serving(30)
            for _ in tokens:
                pass
        acts = client.activations(stream.reply.request_id)
        assert acts.manifest.is_complete
        assert len(acts.positions) == 3 + 300 - 1
        assert {summary.store for summary in client.captures(states="complete")} == {"a", "b"}
