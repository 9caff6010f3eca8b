"""The standard health check, without the package that serves it: the client installs no more than it must."""

from __future__ import annotations

from google.protobuf import wrappers_pb2

from residuum.exceptions import DeadlineExceeded, NotFound, ResiduumError, Unreachable

CHECK = "/grpc.health.v1.Health/Check"

REQUEST = b""
"""A HealthCheckRequest for the server as a whole: its only field, the name of a service, is empty."""

SERVICES = {"inference": "residuum.v1.InferenceService", "store": "residuum.v1.StoreService"}
"""Our services as health checks name them, by what people call them."""

_STATUSES = {1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


def request_for(service: str) -> bytes:
    """Return the HealthCheckRequest for a service: one of SERVICES, another's full name, or "" for the server.

    Its only field is a text of number 1, and so has the same bytes as StringValue.
    """
    return wrappers_pb2.StringValue(value=SERVICES.get(service, service)).SerializeToString()


def status_of_answer(answer: bytes) -> str:
    """Return what a HealthCheckResponse says, such as "SERVING".

    Its only field is an enum of number 1, and so has the same bytes as Int32Value.
    """
    return _STATUSES.get(wrappers_pb2.Int32Value.FromString(answer).value, "UNKNOWN")


def status_of_failure(failure: ResiduumError) -> str:
    """Return what it means that the check itself failed."""
    if isinstance(failure, NotFound):
        return "SERVICE_UNKNOWN"  # the standard's word for it in a watch; a check that finds no service fails
    return "UNREACHABLE" if isinstance(failure, (Unreachable, DeadlineExceeded)) else str(failure)
