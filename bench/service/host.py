"""`python -m bench.service.host FLAGS`: the inference service, and loads on its own engine without the service.

It takes the service's flags; its first line says where it serves, and what. Each line on standard input is a load, in
JSON; the answer, a line on standard output, is what it took when the process itself called vLLM's AsyncLLM. So both
ways have the same engine, in the same state.
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
    """Serve until told to stop."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints
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
    """Tell the port when it serves, then run loads until the standard input ends, and the service with it."""
    while (engine := server.engine) is None:  # noqa: ASYNC110 - a start takes half a minute
        await asyncio.sleep(_POLL_SECONDS)
    facts = engine.facts
    port = int(port_file.read_text())  # noqa: ASYNC240 - before any load
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
            skip_clone=True,  # as the service asks, so that it has no advantage
        )
        async for output in llm.generate(tokens_input(list(prompt)), sampling, name):
            yield len(output.outputs[0].token_ids)

    return start


if __name__ == "__main__":
    main()
