"""`python -m bench.service.host FLAGS`: the inference service, which can also run loads directly on its engine.

It accepts the service's flags. Its first line on standard output has its port and model. Each line on standard input is
a load in JSON. The process runs the load by calling vLLM's AsyncLLM directly, and answers with the measurements on
standard output. So both ways use the same engine in the same state.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import uvloop
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from bench.service.load import Load, Start, run_load
from inference_svc.logs import configure_service_logs
from inference_svc.server import InferenceServer
from inference_svc.settings import InferenceSettings
from svc_common.settings import load_settings

_POLL_SECONDS = 0.1


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints to standard output
    with tempfile.TemporaryDirectory(prefix="residuum-", ignore_cleanup_errors=True) as folder:
        port_file = Path(folder, "port")
        flags = [*sys.argv[1:], "--listen", "127.0.0.1:0", "--port-file", str(port_file)]
        settings = load_settings(InferenceSettings, "python -m bench.service.host", flags)
        configure_service_logs(folder, settings.log_level)
        uvloop.run(_serve(settings, folder, port_file, answers))


async def _serve(settings: InferenceSettings, folder: str, port_file: Path, answers: TextIO) -> None:
    server = InferenceServer(settings, folder)
    loads = asyncio.create_task(_run_loads(server, port_file, answers))
    try:
        await server.run()
    finally:
        loads.cancel()


async def _run_loads(server: InferenceServer, port_file: Path, answers: TextIO) -> None:
    """Print the port when the service is ready, then run loads. When standard input ends, stop the service."""
    while (engine := server.engine) is None:  # noqa: ASYNC110 - a start takes half a minute, so polling is fine
        await asyncio.sleep(_POLL_SECONDS)
    facts = engine.facts
    port = int(port_file.read_text())  # noqa: ASYNC240 - no load runs yet
    _answer(answers, {"port": port, "vocab_size": facts.vocab_size, "model_runner": facts.model_runner})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        load = Load(**json.loads(line))
        _answer(answers, asdict(await run_load(load, _direct(engine.llm, detokenize=engine.has_tokenizer))))
    signal.raise_signal(signal.SIGTERM)


def _answer(answers: TextIO, value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _direct(llm: AsyncLLM, *, detokenize: bool) -> Start:
    async def start(name: str, prompt: Sequence[int], decode: int) -> AsyncGenerator[int, None]:
        sampling = SamplingParams(
            max_tokens=decode,
            temperature=0.0,
            ignore_eos=True,
            detokenize=detokenize,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,  # the same as in the service
        )
        async for output in llm.generate(tokens_input(list(prompt)), sampling, name):
            yield len(output.outputs[0].token_ids)

    return start


if __name__ == "__main__":
    main()
