"""The standard health check, without the package that serves it: the client installs no more than it must."""

from __future__ import annotations

from google.protobuf import wrappers_pb2

from residuum.exceptions import DeadlineExceeded, ResiduumError, Unreachable

CHECK = "/grpc.health.v1.Health/Check"

REQUEST = b""
"""A HealthCheckRequest for the server as a whole: its only field, the name of a service, is empty."""

_STATUSES = {1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


def status_of_answer(answer: bytes) -> str:
    """Return what a HealthCheckResponse says, such as "SERVING".

    Its only field is an enum of number 1, and so has the same bytes as Int32Value.
    """
    return _STATUSES.get(wrappers_pb2.Int32Value.FromString(answer).value, "UNKNOWN")


def status_of_failure(failure: ResiduumError) -> str:
    """Return what it means that the check itself failed."""
    return "UNREACHABLE" if isinstance(failure, (Unreachable, DeadlineExceeded)) else str(failure)
