"""`python -m bench.service.stages`: when requests reach the stages on their way to the first token.

It takes the flags of `bench.service`, and runs the same ways through gRPC with the first of its numbers of streams.
Use it to find out where the time to the first token goes.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import residuum
from bench.capture.processes import environment_of
from bench.machine import Machine
from bench.output import table
from bench.parts import Part, run_parts
from bench.processes import Helper, running_store
from bench.service.__main__ import job_of, parse
from bench.service.compare import ServiceJob, run_way
from bench.service.load import Load, Start
from bench.service.staged_host import FILE_VARIABLE
from bench.service.ways import WAYS, Way, more_ways, through_grpc

STAGES = (
    *("arrives", "to the engine", "first output", "opening", "opened", "accepted", "first message"),
    *("client has the token", "client has the reply"),
)
"""In the usual order. Between `to the engine` and `first output` is vLLM; `opening` and `opened` are of captures."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result. Each model runner is a part."""
    options = parse(arguments, "python -m bench.service.stages")
    if options.served:
        sys.exit("The ways through HTTP have no stages here. Leave out --served.")
    jobs = {runner.value: job_of(options, runner) for runner in options.runners}
    run_parts(
        "bench.service.stages", Machine.describe(), list(jobs), options.output,
        lambda name: _part(jobs[name], options.store_folder),
    )  # fmt: skip


def _part(job: ServiceJob, store_folder: Path | None) -> Part:
    with (
        tempfile.TemporaryDirectory(prefix="residuum-") as scratch,
        tempfile.TemporaryDirectory(prefix="residuum-", dir=store_folder) as data,
    ):
        part = asyncio.run(measure(job, Path(scratch), Path(data)))
    return Part(part, show(part))


async def measure(job: ServiceJob, folder: Path, data: Path) -> dict[str, Any]:
    """Run each way in each round; return the part of the result."""
    file = folder / "stages.json"
    streams = job.streams[0]
    of_client: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        store = stack.enter_context(running_store(data)).endpoint
        environment = {**environment_of(folder, job.runner), FILE_VARIABLE: str(file)}
        host = Helper("bench.service.staged_host", [*job.flags, "--store", store], folder / "log", environment)
        stack.callback(host.stop)
        client = residuum.AsyncClient(f"127.0.0.1:{host.first['port']}", timeout=None)
        await stack.enter_async_context(client)
        pid = host.process.pid
        ways = {WAYS[1]: Way(pid, through_grpc(client)), **more_ways(job, client, pid, await client.info())}
        for number in range(-1, job.rounds):  # round -1 is a warm-up
            for name, way in ways.items() if number % 2 == 0 else reversed(ways.items()):
                load = Load(
                    f"{name}-{number}", streams, job.requests(streams), job.prefill, job.decode,
                    host.first["vocab_size"], job.shared_prefix,
                )  # fmt: skip
                noted: dict[str, dict[str, float]] = {}
                await run_way(load, host, replace(way, start=_noting(way.start, noted)), client)
                of_client.update(noted if number >= 0 else {})
    of_service = json.loads(file.read_text())
    return {
        "parameters": {
            "streams": streams, "requests": job.requests(streams), "rounds": job.rounds,
            "prefill": job.prefill, "decode": job.decode, "shared_prefix": job.shared_prefix, **job.shown,
        },
        "model_runner": host.first["model_runner"],
        "ways": {name: summary(name, of_client, of_service) for name in ways},
    }  # fmt: skip


def _noting(start: Start | None, noted: dict[str, dict[str, float]]) -> Start:
    assert start is not None  # noqa: S101 - all of these ways are through gRPC

    async def noting(name: str, prompt: Sequence[int], decode: int) -> AsyncGenerator[int, None]:
        stages = noted[name] = {"starts": time.monotonic()}
        async for count in start(name, prompt, decode):
            if count:
                stages.setdefault("client has the token", time.monotonic())
            yield count
        stages["client has the reply"] = time.monotonic()

    return noting


def summary(
    way: str, of_client: Mapping[str, Mapping[str, float]], of_service: Mapping[str, Mapping[str, float]]
) -> dict[str, list[float]]:
    """Return the quartiles of each stage in ms after the client starts a request, over all requests of a way."""
    times: dict[str, list[float]] = {}
    for name, stages in of_client.items():
        if name.startswith(f"{way}-"):
            for stage, at in {**of_service.get(name, {}), **stages}.items():
                times.setdefault(stage, []).append((at - stages["starts"]) * 1e3)
    return {
        stage: [round(value, 3) for value in statistics.quantiles(times[stage], n=4, method="inclusive")]
        for stage in STAGES
        if len(times.get(stage, ())) > 1
    }


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the printed lines."""
    yield f"{part['parameters']['streams']} streams; median (quartiles) in ms after the client starts a request"
    ways = part["ways"]
    rows = [
        [
            stage,
            *(
                "{1:.1f} ({0:.1f} to {2:.1f})".format(*found[stage]) if stage in found else ""
                for found in ways.values()
            ),
        ]
        for stage in STAGES
    ]
    yield table(["stage", *ways], rows)


if __name__ == "__main__":
    main()
