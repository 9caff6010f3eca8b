"""Serves the inference service with a scripted engine. Prints its endpoint, and ends when standard input ends.

python -m tests.tracing.inference_service STORE
"""

from __future__ import annotations

import asyncio
import sys

from residuum.rpc.tracing import start_tracing
from svc_common.logs import configure_logs
from svc_common.rpc.tracing import AioTracingInterceptor
from tests.fuzz.inference import ScriptedEngine
from tests.inference.service_support import running_service


async def main(store: str) -> None:
    configure_logs("warning")  # to stderr, because the parent reads only one line of standard output
    stop_tracing = start_tracing("residuum-inference")
    async with running_service([store], ScriptedEngine(), before=[AioTracingInterceptor()]) as service:
        sys.stdout.write(f"{service.endpoint}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
    stop_tracing()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
