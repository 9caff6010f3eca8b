"""`python -m bench.store.stub_store`: the store service with protobuf's generated stubs, for comparison.

It is the store with the same flags, except for the two calls that carry chunks. They use messages of the generated
classes, like an ordinary service: a received message is parsed and serialised again for the database, and a stored one
is parsed and serialised again for the caller.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import grpc

from residuum.v1 import store_pb2
from store_svc import server
from store_svc.servicer import SERVICE, StoreServicer


class StubServicer(StoreServicer):
    """The methods of StoreService, with messages where the store's servicer uses bytes."""

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods."""
        append, read = store_pb2.AppendChunksRequest, store_pb2.ReadChunksResponse
        return _Handler(
            super().handler(),
            {
                f"/{SERVICE}/AppendChunks": grpc.stream_stream_rpc_method_handler(
                    self._append, append.FromString, store_pb2.AppendChunksResponse.SerializeToString
                ),
                f"/{SERVICE}/ReadChunks": grpc.unary_stream_rpc_method_handler(
                    self._read, None, read.SerializeToString
                ),
            },
        )

    def _append(
        self, messages: Iterator[store_pb2.AppendChunksRequest], context: grpc.ServicerContext
    ) -> Iterator[store_pb2.AppendChunksResponse]:
        return self.append_chunks((message.SerializeToString() for message in messages), context)

    def _read(self, data: bytes, context: grpc.ServicerContext) -> Iterator[store_pb2.ReadChunksResponse]:
        return map(store_pb2.ReadChunksResponse.FromString, self.read_chunks(data, context))


class _Handler(grpc.GenericRpcHandler):
    """Replaces some methods of another handler."""

    def __init__(self, other: grpc.GenericRpcHandler, methods: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        self._other = other
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._methods.get(handler_call_details.method) or self._other.service(handler_call_details)


def main() -> int:
    """Run the store's `main` with these methods."""
    with mock.patch.object(server, "StoreServicer", StubServicer):
        return server.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
