"""Kills one of the engine's workers while requests are captured: the captures must say so, and none may be COMPLETE."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import ExitStack, suppress

import psutil

import residuum
from bench.conformance.architectures import MAX_LENGTH
from bench.conformance.setup import Setup
from bench.conformance.workload import make_requests

_WAIT_SECONDS = 120.0
_WORKERS = ("::Worker", "::EngineCore")
"""The parts of the titles that vLLM gives its processes. An engine with one worker computes in its own process."""


class NoWorkerError(LookupError):
    """The service has no process with the title of a worker."""


def kill_worker(setup: Setup, service: int, endpoint: str, store: str) -> Counter[str]:
    """Start requests, kill a worker while they generate, and return how their captures ended.

    The service cannot be used afterwards.

    Args:
        setup: The setup of the engine.
        service: The service's process ID.
        endpoint: host:port of the inference service.
        store: host:port of the store.

    Returns:
        The captures by state and reason, such as {"incomplete: ENGINE_DIED": 6}. Requests that had their whole reply,
        and whose captures are complete, ended before the kill, and do not count.
    """
    requests = [request for request in make_requests() if not request.pushes]
    ends: Counter[str] = Counter()
    with residuum.Client(endpoint, store=store) as client, ExitStack() as open_streams:
        streams = [
            open_streams.enter_context(
                client.stream(
                    list(request.prompt),
                    max_tokens=MAX_LENGTH - len(request.prompt),
                    ignore_eos=True,
                    temperature=1.0,
                    capture=residuum.Capture(layers="all", sites=setup.sites),
                    timeout=_WAIT_SECONDS,
                )
            )
            for request in requests
        ]
        for stream in streams:
            next(stream)
        os.kill(_last_worker(service), signal.SIGKILL)
        for stream in streams:
            try:
                for _ in stream:
                    pass
                whole = len(stream.reply.token_ids) == MAX_LENGTH - len(stream.reply.prompt_token_ids)
            except residuum.ResiduumError:
                whole = False
            manifest = client.manifest(stream.request_id, wait=_WAIT_SECONDS)
            if not (whole and manifest.state == "complete"):
                ends[f"{manifest.state}: {manifest.reason}"] += 1
    return ends


def _last_worker(service: int) -> int:
    """Return the worker of the last rank among the processes that the service has started."""
    processes = psutil.Process(service).children(recursive=True)
    titles: dict[str, int] = {}
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            titles[" ".join(process.cmdline())] = process.pid
    for part in _WORKERS:
        if found := sorted((title for title in titles if part in title), key=lambda title: (len(title), title)):
            return titles[found[-1]]
    raise NoWorkerError(f"None of the service's processes is a worker of vLLM: {', '.join(titles)}.")
