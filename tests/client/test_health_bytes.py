"""The client reads health answers by their bytes; they are those of the standard's own messages."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from residuum import _health


def test_the_bytes_are_the_standards():
    assert health_pb2.HealthCheckRequest().SerializeToString() == _health.REQUEST
    for status in health_pb2.HealthCheckResponse.ServingStatus.values():
        answer = health_pb2.HealthCheckResponse(status=status)
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        assert _health.status_of_answer(answer.SerializeToString()) == name
