"""The interceptors that ask who calls: one for sync servers, one for asyncio. They stand behind those of `serving`.

A call that may not be made never reaches its handler, and its messages are not even parsed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from residuum.rpc.errors import Failure
from residuum.rpc.methods import is_ours
from svc_common.access import Access, set_caller
from svc_common.serving import handler_of

if TYPE_CHECKING:
    from svc_common.tokens_file import Caller

    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Details = grpc.HandlerCallDetails


class AccessInterceptor(grpc.ServerInterceptor):
    """Admits calls to a sync server, or refuses them."""

    def __init__(self, access: Access) -> None:
        """Ask `access` of each call."""
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
    """Admits calls to an asyncio server, or refuses them."""

    def __init__(self, access: Access) -> None:
        """Ask `access` of each call."""
        self._access = access

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler | None]], handler_call_details: _Details
    ) -> _Handler | None:
        """Wrap the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        ours = is_ours(handler_call_details.method)
        try:
            caller = _admit(self._access, handler_call_details)
        except Failure as failure:
            return _aio_refusing(handler, failure, aborts=not ours)
        if not ours:  # health and reflection: they do not ask who calls
            return handler
        return handler_of(handler, _aio_admitted(handler, caller), handler.request_deserializer)


def _admit(access: Access, details: _Details) -> Caller:
    return access.admit(details.method, details.invocation_metadata or ())


def _call_of(handler: _Handler) -> Callable[..., Any]:
    call = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert call is not None  # noqa: S101 - a handler without a behaviour cannot be registered
    return call


def _admitted(handler: _Handler, caller: Caller) -> Callable[..., Any]:
    call = _call_of(handler)

    def unary(request: Any, context: Any) -> Any:
        set_caller(caller)
        return call(request, context)

    def streaming(request: Any, context: Any) -> Iterator[Any]:
        set_caller(caller)
        yield from call(request, context)

    return streaming if handler.response_streaming else unary


def _aio_admitted(handler: _Handler, caller: Caller) -> Callable[..., Any]:
    """Return a call that is made by `caller`: of a coroutine or of an iterator, whichever the handler's returns."""
    call = _call_of(handler)

    def admitted(request: Any, context: Any) -> Any:
        set_caller(caller)  # in the task of the call: what makes it runs there, in the interceptor of `serving`
        return call(request, context)

    return admitted


def _refusing(handler: _Handler, failure: Failure) -> _Handler:
    def refuse(request: Any, context: Any) -> Any:
        del request, context
        raise failure

    def refuse_stream(request: Any, context: Any) -> Iterator[Any]:
        yield refuse(request, context)

    return handler_of(handler, refuse_stream if handler.response_streaming else refuse, None)


def _aio_refusing(handler: _Handler, failure: Failure, *, aborts: bool) -> _Handler:
    """Return a handler that refuses; `aborts`: by itself, since nobody turns what it raises into a status."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        del request
        if aborts:
            status = failure.to_status()
            await context.abort(status.code, status.details, status.trailing_metadata)
        del context  # the failure keeps this frame, and this frame the failure
        raise failure

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        yield await refuse(request, context)

    return handler_of(handler, refuse_stream if handler.response_streaming else refuse, None)
