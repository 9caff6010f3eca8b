"""Starts an engine of two ranks, makes a call that fails on both, and checks that later calls get their own answers.

python -m tests.conformance.failing_call MODEL
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

from inference_svc.engine.engine import Engine
from inference_svc.engine.ranks import RankFailedError
from inference_svc.settings import InferenceSettings


async def main(model: str) -> None:
    """Exit with a message if a call has another outcome than it should."""
    settings = InferenceSettings(
        model=model,
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=2,
        kv_cache_gib=0.1,
        ring_mib=4,
        max_model_len=64,
    )
    with tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        engine = await Engine.start(settings, folder)
        try:
            await check(engine)
        finally:
            engine.shutdown()


async def check(engine: Engine) -> None:
    try:
        await engine.load_vectors([(0, b"not a float")])
    except RankFailedError as error:
        told = str(error)
    else:
        sys.exit("the call did not fail")
    if "residuum_load_vectors failed in 2 of 2 workers (rank 0: " not in told or "rank 1: " not in told:
        sys.exit(f"the error does not name both ranks: {told}")
    await engine.load_vectors([(0, bytes(4 * engine.facts.hidden_size))])
    if (changed := await engine.change_steering({"nobody": []})) != {"nobody": 0}:
        sys.exit(f"the answer is that to another call: {changed}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
