"""A proxy to the real store, with faults that a test scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from residuum.rpc.channels import SERVER_OPTIONS, open_channel
from residuum.rpc.errors import Failure, failure_from_rpc_error
from residuum.v1 import store_pb2

Change = Callable[[int, list[bytes]], Iterator[bytes]]
"""Takes the number of a read, from 0, and its messages, and yields the messages that the reader gets. It may raise a
Failure, or `Unknown` for a code of gRPC itself."""

READS = tuple(f"/residuum.v1.StoreService/{name}" for name in ("ReadChunks", "ReadCaptures", "Search"))


class Unknown(Exception):  # noqa: N818 - named like gRPC's class
    """A failure with a gRPC code and no reason, like those of gRPC itself."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code)
        self.code = code


class FlakyStore(grpc.GenericRpcHandler):
    def __init__(self, endpoint: str) -> None:
        self.change: Change = lambda number, messages: iter(messages)
        self.reads = 0
        self.words = "as the test says"
        self.requests: list[bytes] = []
        self.calls: list[str] = []
        """The names of the unary calls, in order."""
        self.missing: set[str] = set()
        """The names of calls that the store is too old to offer."""
        self.before: Callable[[str], None] = lambda name: None
        """Called before each unary call. It may raise `Unknown`."""
        self.after: Callable[[str], None] = lambda name: None
        """The same, after the store has answered and before its answer is passed on."""
        self._channel = open_channel(endpoint)
        self._server = grpc.server(ThreadPoolExecutor(8), handlers=[self], options=SERVER_OPTIONS)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, handler_call_details):
        method = handler_call_details.method
        if method in READS:
            return grpc.unary_stream_rpc_method_handler(lambda data, context: self._read(method, data, context))
        if method.rpartition("/")[2] in self.missing:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda data, context: self._ask(method, data, context))

    def _ask(self, method: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        name = method.rpartition("/")[2]
        self.calls.append(name)
        try:
            self.before(name)
            answer = self._channel.unary_unary(method)(data, timeout=10)
            self.after(name)
        except Unknown as failure:
            context.abort(failure.code, self.words)
        except grpc.RpcError as error:
            if failure := failure_from_rpc_error(error):
                context.abort_with_status(failure.to_status())
            raise
        return answer

    def _read(self, method: str, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        number, self.reads = self.reads, self.reads + 1
        self.requests.append(data)
        messages = list(self._channel.unary_stream(method)(data, timeout=10))
        try:
            yield from self.change(number, messages)
        except Failure as failure:
            context.abort_with_status(failure.to_status())
        except Unknown as failure:
            context.abort(failure.code, self.words)

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()


def parsed(message: bytes) -> store_pb2.ReadChunksResponse:
    return store_pb2.ReadChunksResponse.FromString(message)
