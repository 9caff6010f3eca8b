"""The service, a store and a client of a job, and the engine alone in the service's process."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import residuum
from bench.capture.processes import environment_of
from bench.capture.workload import Runner
from bench.processes import Helper, running_store
from bench.service.load import Load, Measured


class Served(NamedTuple):
    """A running service."""

    client: residuum.Client
    host: Helper
    """The service's process, which also runs loads on its engine."""
    vocab_size: int

    def alone(self, load: Load) -> float:
        """Return the seconds that the engine takes for a load, through AsyncLLM without capture."""
        return Measured(**self.host.call(asdict(load))).seconds


@contextmanager
def serving(model: str, engine_args: dict[str, object], options: argparse.Namespace, scratch: Path) -> Iterator[Served]:
    """Run a service with one store.

    Args:
        model: The model's folder or name.
        engine_args: The arguments of vLLM that the model needs.
        options: The command line of bench.extract.
        scratch: A folder for the store's data, if the command line names no folder for it.
    """
    flags = [
        *("--model", model, "--max-model-len", str(max(options.prefill + 2, 64))),
        *("--max-num-seqs", str(options.concurrency)),
        *("--engine-args", json.dumps({**engine_args, "enable_prefix_caching": False, **options.engine_args})),
        *(["--enforce-eager"] if options.eager else []),
    ]
    for name in ("max_num_batched_tokens", "ring_mib", "shippers"):
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    with ExitStack() as stack:
        folder = options.store_folder and Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="residuum-", dir=options.store_folder))
        )
        store = stack.enter_context(running_store((folder or scratch) / "store"))
        # The paths of sockets must be short, and `scratch` may be anywhere.
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="residuum-")))
        environment = environment_of(own, Runner.DEFAULT)
        host = Helper("bench.service.host", [*flags, "--store", store.endpoint], own / "service.log", environment)
        stack.callback(host.stop)
        client = stack.enter_context(residuum.Client(f"127.0.0.1:{host.first['port']}", timeout=None))
        yield Served(client, host, host.first["vocab_size"])
