"""Serves the inference service with a scripted engine. Prints its endpoint, and ends when standard input ends.

python -m tests.hostile.inference_service
"""

from __future__ import annotations

import asyncio
import sys

from svc_common.logs import configure_logs
from tests.fuzz.inference import ScriptedEngine
from tests.hostile.inference import STUCK
from tests.inference.service_support import EngineCall, running_service, stuck_after, three_tokens

LIMITS = {"max_requests": 1100, "max_registration_mib": 8, "max_vector_mib": 8, "first_message_seconds": 2}


def script(call: EngineCall) -> object:
    return stuck_after()(call) if call.prompt[0] == STUCK else three_tokens(call)


async def main() -> None:
    configure_logs("warning")  # to stderr, because the parent reads only one line of standard output
    engine = ScriptedEngine()
    engine.script = script
    async with running_service(engine=engine, **LIMITS) as service:
        sys.stdout.write(f"{service.endpoint}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
