"""The inference service without an engine, for calls that need none: `python -m bench.steering.rpc_server JOB PORTS`.

The servicer, the registry, the vector cache and the gRPC server are the service's own. Of the engine only the model's
facts are here: registering a request and taking vectors reads nothing else of it. It serves one port for each hidden
size, until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import uvloop

from inference_svc.engine.facts import ModelFacts
from inference_svc.requests.registry import RequestRegistry
from inference_svc.resources.projections import Projections
from inference_svc.resources.vector_activator import VectorActivator
from inference_svc.resources.vector_cache import VectorCache
from inference_svc.servicer import InferenceServicer, Parts
from inference_svc.session.generation import Generator
from inference_svc.settings import InferenceSettings
from residuum.rpc.channels import SERVER_OPTIONS
from residuum.v1 import capture_pb2, inference_pb2_grpc, tensor_pb2
from svc_common.access import Access
from svc_common.authentication import AioAccessInterceptor
from svc_common.logs import get_logger
from svc_common.serving import AioErrorInterceptor

_MAX_VECTORS = 1_000_000
"""None is dropped, so that each is sent exactly once."""


def main() -> None:
    """Serve the hidden sizes and layers in the first file; write the ports to the second."""
    job_file, ports_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    uvloop.run(serve(job["hidden"], job["layers"], ports_file))


async def serve(hidden_sizes: list[int], layers: int, ports_file: Path) -> None:
    """Serve until standard input ends."""
    servers = []
    ports = []
    for hidden in hidden_sizes:
        interceptors = [AioErrorInterceptor(get_logger(__name__)), AioAccessInterceptor(Access(None, []))]
        server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer(hidden, layers), server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    written = ports_file.with_suffix(".new")
    written.write_text(json.dumps(ports))
    written.replace(ports_file)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.stop(None)


def servicer(hidden: int, layers: int) -> InferenceServicer:
    """Return a servicer that serves a model of this shape, as far as one can without an engine."""
    settings = InferenceSettings(model="none", max_vectors=_MAX_VECTORS)
    engine: Any = SimpleNamespace(facts=_facts(hidden, layers), load_vectors=None, keep_signs=None)
    registry = RequestRegistry(settings.registration_seconds, settings.max_registrations)
    vectors = VectorCache(settings.max_vectors, hidden, registry.is_leased)
    activator = VectorActivator(vectors, settings.max_active_vectors, _load_nothing, settings.vector_wait_seconds)
    projections = Projections(engine.keep_signs, hidden, settings.vector_wait_seconds)
    generator = Generator(engine, registry, vectors, activator, projections, None)
    made = InferenceServicer()
    made.load(Parts(engine, registry, vectors, generator, None, settings))
    made.set_serving(serving=True)
    return made


async def _load_nothing(rows: object) -> None:
    del rows


def _facts(hidden: int, layers: int) -> ModelFacts:
    return ModelFacts(
        name="none",
        num_layers=layers,
        hidden_size=hidden,
        dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
        max_model_len=4096,
        vocab_size=32000,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        eager=False,
        vllm_version="none",
        max_num_seqs=64,
        sites=(capture_pb2.SITE_RESID_POST,),
        pool_bytes=0,
        table_bytes=0,
        ring_bytes=0,
        control_paths=(),
    )


if __name__ == "__main__":
    main()
