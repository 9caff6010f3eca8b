"""The client parses health answers by hand. The bytes match those of the standard's messages."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from residuum.transport import health
from residuum.v1 import inference_pb2, store_pb2


def test_health_messages_match_the_standard():
    assert health_pb2.HealthCheckRequest().SerializeToString() == health.REQUEST == health.request_for("")
    for name in (*health.SERVICES.values(), "grpc.health.v1.Health", "é" * 200):
        assert health_pb2.HealthCheckRequest(service=name).SerializeToString() == health.request_for(name)
    for status in health_pb2.HealthCheckResponse.ServingStatus.values():
        answer = health_pb2.HealthCheckResponse(status=status)
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        assert health.status_of_answer(answer.SerializeToString()) == name


def test_short_names_belong_to_the_contracts_services():
    services = {**inference_pb2.DESCRIPTOR.services_by_name, **store_pb2.DESCRIPTOR.services_by_name}
    assert set(health.SERVICES.values()) == {service.full_name for service in services.values()}
    for name, full_name in health.SERVICES.items():
        assert health.request_for(name) == health.request_for(full_name)
