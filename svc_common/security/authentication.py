"""The interceptors that authenticate callers: one for sync servers, one for asyncio. They run after those of `serving`.

A refused call never reaches its handler, and its messages are never parsed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from residuum.rpc.errors import Failure
from residuum.rpc.methods import is_ours
from svc_common.rpc.serving import behaviour_of, handler_of
from svc_common.security.access import Access, set_caller

if TYPE_CHECKING:
    from svc_common.security.tokens_file import Caller

    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Details = grpc.HandlerCallDetails


class AccessInterceptor(grpc.ServerInterceptor):
    """Admits or refuses the calls to a sync server."""

    def __init__(self, access: Access) -> None:
        """Create an interceptor that lets `access` decide about each call."""
        self._access = access

    def intercept_service(
        self, continuation: Callable[[_Details], _Handler | None], handler_call_details: _Details
    ) -> _Handler | None:
        """Wrap the handler of a call."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        try:
            caller = _admit(self._access, handler_call_details)
        except Failure as failure:
            return _refusing(handler, failure)
        return handler_of(handler, _admitted(handler, caller), handler.request_deserializer)


class AioAccessInterceptor(grpc.aio.ServerInterceptor):
    """Admits or refuses the calls to an asyncio server."""

    def __init__(self, access: Access) -> None:
        """Create an interceptor that lets `access` decide about each call."""
        self._access = access

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler | None]], handler_call_details: _Details
    ) -> _Handler | None:
        """Wrap the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            caller = _admit(self._access, handler_call_details)
        except Failure as failure:
            return _aio_refusing(handler, failure, aborts=not is_ours(handler_call_details.method))
        set_caller(caller)  # gRPC looks the handler up, and runs it, in one task of the call
        return handler


def _admit(access: Access, details: _Details) -> Caller:
    return access.admit(details.method, details.invocation_metadata or ())


def _admitted(handler: _Handler, caller: Caller) -> Callable[..., Any]:
    call = behaviour_of(handler)

    def unary(request: Any, context: Any) -> Any:
        set_caller(caller)
        return call(request, context)

    def streaming(request: Any, context: Any) -> Iterator[Any]:
        set_caller(caller)
        yield from call(request, context)

    return streaming if handler.response_streaming else unary


def _refusing(handler: _Handler, failure: Failure) -> _Handler:
    def refuse(request: Any, context: Any) -> Any:
        del request, context
        raise failure

    def refuse_stream(request: Any, context: Any) -> Iterator[Any]:
        yield refuse(request, context)

    return handler_of(handler, refuse_stream if handler.response_streaming else refuse, None)


def _aio_refusing(handler: _Handler, failure: Failure, *, aborts: bool) -> _Handler:
    """Return a handler that refuses the call.

    Args:
        handler: The handler to replace.
        failure: Why the call is refused.
        aborts: Whether it must abort the call itself, because no interceptor turns its exceptions into a status.
    """

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        del request
        if aborts:
            status = failure.to_status()
            await context.abort(status.code, status.details, status.trailing_metadata)
        del context  # the failure and this frame refer to each other, and would keep the context alive
        raise failure

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        yield await refuse(request, context)

    return handler_of(handler, refuse_stream if handler.response_streaming else refuse, None)
