"""`bench.service.host` that notes when each request reaches each stage on its way to its first token.

When it stops, it writes them to the file that the environment variable BENCH_STAGES_FILE names.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from bench.service import host
from inference_svc.session.capture_session import CaptureSession
from inference_svc.session.request_runner import RequestRunner

FILE_VARIABLE = "BENCH_STAGES_FILE"

stages: dict[str, dict[str, float]] = defaultdict(dict)
"""For each request, its stages and when it first reached them, in seconds of the monotonic clock."""


def main() -> None:
    """Serve until standard input ends."""
    RequestRunner.run = noting_messages(RequestRunner.run)  # type: ignore[method-assign]
    AsyncLLM.generate = noting_outputs(AsyncLLM.generate)
    CaptureSession.opened = noting_opening(CaptureSession.opened)  # type: ignore[method-assign]
    try:
        host.main()
    finally:
        Path(os.environ[FILE_VARIABLE]).write_text(json.dumps(stages))


def _note(request_id: str, stage: str, at: float | None = None) -> None:
    name = re.split("[@#]", request_id)[0]  # what follows is vLLM's or ours
    stages[name].setdefault(stage, time.monotonic() if at is None else at)


def noting_messages(run: Any) -> Any:
    """Wrap `RequestRunner.run`."""

    async def noting(runner: RequestRunner, *arguments: Any) -> AsyncGenerator[Any, None]:
        began, name = time.monotonic(), ""
        async for event in run(runner, *arguments):
            if event.HasField("started"):
                name = event.started.request_id
                _note(name, "arrives", began)
                _note(name, "accepted")
            elif event.HasField("delta"):
                _note(name, "first message")
            yield event

    return noting


def noting_outputs(generate: Any) -> Any:
    """Wrap `AsyncLLM.generate`, whose third argument is the request's ID."""

    async def noting(llm: AsyncLLM, *arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
        request_id = arguments[2]
        _note(request_id, "to the engine")
        async for output in generate(llm, *arguments, **options):
            _note(request_id, "first output")
            yield output

    return noting


def noting_opening(opened: Any) -> Any:
    """Wrap `CaptureSession.opened`."""

    async def noting(session: CaptureSession) -> None:
        request = session._running  # noqa: SLF001 - only this benchmark looks inside
        captures = request.spec.capture is not None
        if captures:
            _note(request.request_id, "opening")
        await opened(session)
        if captures:
            _note(request.request_id, "opened")

    return noting


if __name__ == "__main__":
    main()
