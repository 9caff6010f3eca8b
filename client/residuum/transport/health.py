"""gRPC's standard health check, written by hand so that the client does not depend on grpcio-health-checking."""

from __future__ import annotations

from google.protobuf import wrappers_pb2

from residuum.exceptions import DeadlineExceeded, NotFound, ResiduumError, Unreachable

CHECK = "/grpc.health.v1.Health/Check"

REQUEST = b""
"""A HealthCheckRequest for the server as a whole. Its only field, the service's name, is empty."""

SERVICES = {"inference": "residuum.v1.InferenceService", "store": "residuum.v1.StoreService"}
"""The full names of our services, by their short names."""

_STATUSES = {1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


def request_for(service: str) -> bytes:
    """Return the serialised HealthCheckRequest for a service: one of SERVICES, a full name, or "" for the server.

    The message's only field is a text with the number 1. StringValue has the same bytes.
    """
    return wrappers_pb2.StringValue(value=SERVICES.get(service, service)).SerializeToString()


def status_of_answer(answer: bytes) -> str:
    """Return the status in a serialised HealthCheckResponse, such as "SERVING".

    The message's only field is an enum with the number 1. Int32Value has the same bytes.
    """
    return _STATUSES.get(wrappers_pb2.Int32Value.FromString(answer).value, "UNKNOWN")


def status_of_failure(failure: ResiduumError) -> str:
    """Return the status of a service whose health check failed."""
    if isinstance(failure, NotFound):
        return "SERVICE_UNKNOWN"  # as the health protocol's Watch reports it; Check fails with NOT_FOUND
    return "UNREACHABLE" if isinstance(failure, (Unreachable, DeadlineExceeded)) else str(failure)
