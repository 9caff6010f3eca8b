"""Serves the inference service with a scripted engine. Prints its endpoint, and ends when it is killed.

python -m tests.faults.scripted_service STORE

A prompt that begins with token 1 gets one token, and then waits for ever. Any other gets three.
"""

from __future__ import annotations

import asyncio
import sys

from inference_svc.engine.streams import Delta
from svc_common.logs import configure_logs
from tests.inference.service_support import running_service, stuck_after, three_tokens


async def main(store: str) -> None:
    configure_logs("warning")  # to stderr, because the parent reads only one line of standard output
    async with running_service([store]) as service:
        stuck = stuck_after(Delta("x", [1]))
        service.engine.script = lambda call: (stuck if call.prompt[0] == 1 else three_tokens)(call)
        sys.stdout.write(f"{service.endpoint}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
