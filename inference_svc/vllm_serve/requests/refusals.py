"""Translates failures into the exceptions that vLLM's API server turns into HTTP statuses."""

from __future__ import annotations

from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import grpc
from vllm import exceptions

from residuum.rpc.errors import Failure, Reason, with_site_names

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUSY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
_SERVER_ERRORS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAUTHENTICATED}


@contextmanager
def as_http_errors() -> Iterator[None]:
    """Raise each `Failure` in the context as the exception that `http_error` returns."""
    try:
        yield
    except Failure as failure:
        raise http_error(failure) from failure


def http_error(failure: Failure) -> Exception:
    """Return the exception for a failure.

    vLLM answers it with status 503 if a retry may succeed, 500 if the server is at fault, and 400 otherwise, such as
    for a request that needs more than the server has in total. An older vLLM without `GracefulHTTPError` answers 500
    instead of 503.
    """
    text = f"{failure.reason_name}: {_message(failure)}"
    error: Exception
    never_passes = failure.reason == Reason.ERROR_REASON_LIMIT_REACHED and "needed" in failure.metadata
    is_stopped = failure.reason == Reason.ERROR_REASON_ABORTED  # by this server: its callers have no Abort
    if never_passes or (failure.code not in _BUSY | _SERVER_ERRORS and not is_stopped):
        error = exceptions.VLLMValidationError(text, parameter="vllm_xargs")
    elif hasattr(exceptions, "GracefulHTTPError"):
        busy = failure.code in _BUSY or is_stopped
        status = HTTPStatus.SERVICE_UNAVAILABLE if busy else HTTPStatus.INTERNAL_SERVER_ERROR
        error = exceptions.GracefulHTTPError(text, status)
    else:
        error = RuntimeError(text)  # vLLM answers this with 500
    return error


def _message(failure: Failure) -> str:
    """Return a failure's text, with the client's names of sites and the variable that enables sites here."""
    if failure.reason != Reason.ERROR_REASON_UNKNOWN_SITE:
        return failure.message
    return with_site_names(failure.message.replace("--capture-sites", "RESIDUUM_CAPTURE_SITES"))
