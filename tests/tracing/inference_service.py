"""The inference service above a scripted engine, as a process: prints its port, and serves until its input ends.

python -m tests.tracing.inference_service STORE
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio

from inference_svc.captures import CaptureKeeper
from inference_svc.settings import InferenceSettings
from residuum.rpc.access import Access
from residuum.rpc.admission import AioAccessInterceptor
from residuum.rpc.channels import SERVER_OPTIONS
from residuum.rpc.logs import get_logger
from residuum.rpc.serving import AioErrorInterceptor
from residuum.rpc.tracing import AioTracingInterceptor, start_tracing
from residuum.v1 import inference_pb2_grpc
from tests.fuzz.inference import ScriptedEngine
from tests.inference.service_support import Service


async def main(store: str) -> None:
    stop_tracing = start_tracing("residuum-inference")
    keeper = CaptureKeeper(store, store)
    settings = InferenceSettings(model="tiny")
    access = Access(settings.tokens, [])
    service = Service(ScriptedEngine(), keeper, settings, access)
    service.serve()
    interceptors = [AioTracingInterceptor(), AioErrorInterceptor(get_logger("test")), AioAccessInterceptor(access)]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service.servicer, server)
    sys.stdout.write(f"{server.add_insecure_port('127.0.0.1:0')}\n")
    sys.stdout.flush()
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(5)
    await keeper.close(5)
    stop_tracing()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
