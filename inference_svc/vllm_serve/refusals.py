"""How failures of ours are told to a caller of the OpenAI API: by the exceptions that vLLM makes HTTP statuses of."""

from __future__ import annotations

from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import grpc
from vllm import exceptions

from residuum.rpc.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUSY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
_OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAUTHENTICATED}


@contextmanager
def told_to_http() -> Iterator[None]:
    """Raise failures as vLLM's own exceptions."""
    try:
        yield
    except Failure as failure:
        raise http_error(failure) from failure


def http_error(failure: Failure) -> Exception:
    """Return the exception of which vLLM makes an answer: 400, or 503 where another try may do."""
    text = f"{failure.reason_name}: {failure.message}"
    error: Exception
    if failure.code not in _BUSY | _OURS:
        error = exceptions.VLLMValidationError(text, parameter="vllm_xargs")
    elif hasattr(exceptions, "GracefulHTTPError"):
        busy = failure.code in _BUSY
        status = HTTPStatus.SERVICE_UNAVAILABLE if busy else HTTPStatus.INTERNAL_SERVER_ERROR
        error = exceptions.GracefulHTTPError(text, status)
    else:
        error = RuntimeError(text)  # an older vLLM: 500
    return error
