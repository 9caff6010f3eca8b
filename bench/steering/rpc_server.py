"""`python -m bench.steering.rpc_server LAYERS HIDDEN...`: the inference service without an engine.

The servicer, the registry, the vector cache and the gRPC server are those of the service. The engine is replaced by the
model's facts, because registering requests and receiving vectors needs nothing else. It serves on one port for each
hidden size, lists the ports in its first line, and ends when standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import grpc.aio
import uvloop

from inference_svc.model_facts import ModelFacts
from inference_svc.parts import Parts
from inference_svc.servicer import InferenceServicer
from inference_svc.settings import InferenceSettings
from residuum.rpc.channels import SERVER_OPTIONS
from residuum.v1 import capture_pb2, inference_pb2_grpc, tensor_pb2
from svc_common.logs import configure_logs, get_logger
from svc_common.rpc.serving import AioErrorInterceptor
from svc_common.security.access import Access
from svc_common.security.authentication import AioAccessInterceptor

_MAX_VECTORS = 1_000_000
"""Enough that the cache never evicts a vector, so that each is sent exactly once."""


def main() -> None:
    """Serve one model for each hidden size, all with the same number of layers."""
    layers, *hidden_sizes = map(int, sys.argv[1:])
    configure_logs("info")  # logs must not go to standard output, which has the ports
    uvloop.run(serve(hidden_sizes, layers))


async def serve(hidden_sizes: list[int], layers: int) -> None:
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
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.stop(None)


def servicer(hidden: int, layers: int) -> InferenceServicer:
    """Return a servicer for a model of this shape. Calls that need an engine do not work."""
    settings = InferenceSettings(model="none", max_vectors=_MAX_VECTORS)
    engine: Any = SimpleNamespace(
        facts=_facts(hidden, layers), load_vectors=_load_nothing, keep_signs=None, keep_saes=None
    )
    made = InferenceServicer()
    made.load(Parts.assemble(engine, settings))
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
