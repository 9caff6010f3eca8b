"""Each mistake of a client causes a clear error. Nothing is lost, and the service continues to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

import residuum
from residuum.rpc.errors import failure_from_rpc_error
from residuum.v1 import errors_pb2, inference_pb2, inference_pb2_grpc, tensor_pb2
from residuum.wire.digests import vector_message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from svc_common.launcher import Service

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]


@pytest.fixture(autouse=True)
def still_serving(client: residuum.Client) -> Iterator[None]:
    """Check after each test that the next request is served correctly."""
    yield
    assert client.generate("The capital of France is", max_tokens=1).text == " Paris"


@pytest.fixture(scope="module")
def channel(services: tuple[Service, Service]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(services[1].endpoint, options=[("grpc.max_send_message_length", -1)]) as opened:
        yield opened


def vector(size: int = 576) -> residuum.Vector:
    return residuum.Vector.from_array(np.ones(size, dtype=np.float32))


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"capture": residuum.Capture(layers=[30])}, residuum.UnknownLayer, "0 to 29"),
        ({"steer": [residuum.Add(vector(), layer=99, scale=1.0)]}, residuum.UnknownLayer, "99"),
        ({"steer": [residuum.Add(vector(64), layer=1, scale=1.0)]}, residuum.BadVector, "576"),
        ({"model": "another"}, residuum.UnknownModel, "SmolLM2"),
        ({"prompt": ""}, residuum.EmptyPrompt, "empty"),
        ({"prompt": []}, residuum.EmptyPrompt, "no tokens"),
        ({"prompt": [49152]}, residuum.InvalidRequest, "vocabulary"),
        ({"prompt": [5] * 1025}, residuum.PromptTooLong, "1024"),
        ({"max_tokens": 1024}, residuum.PromptTooLong, "1024"),
        ({"max_tokens": -1}, residuum.InvalidRequest, "max_tokens"),
        ({"temperature": 5.0}, residuum.InvalidRequest, "temperature"),
        ({"top_p": 0.0}, residuum.InvalidRequest, "top_p"),
        ({"registration": "never-registered"}, residuum.UnknownRequest, "never-registered"),
        ({"request_id": "-no"}, residuum.InvalidRequest, "1 to 128"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_invalid_requests_are_refused(client: residuum.Client, asked: dict, error: type[Exception], says: str) -> None:
    arguments = {"prompt": "Hello", "max_tokens": 4, **asked}
    with pytest.raises(error, match=says):
        client.generate(arguments.pop("prompt"), **arguments)


def test_an_id_is_refused_while_it_is_taken(client: residuum.Client) -> None:
    client.register(capture=residuum.Capture(layers=[1]), request_id="taken")
    with pytest.raises(residuum.RequestExists, match="taken"):
        client.register(capture=residuum.Capture(layers=[2]), request_id="taken")
    client.abort("taken")
    client.generate("Hello", max_tokens=1, request_id="taken")
    client.generate("Hello", max_tokens=1, request_id="taken", capture=residuum.Capture(layers=[1]))
    with pytest.raises(residuum.CaptureExists, match="taken"):
        client.generate("Hello", max_tokens=1, request_id="taken", capture=residuum.Capture(layers=[1]))
    client.delete("taken")
    client.generate("Hello", max_tokens=1, request_id="taken", capture=residuum.Capture(layers=[2]))


def test_an_unknown_capture_is_reported(client: residuum.Client) -> None:
    for call in (client.activations, client.manifest, client.delete):
        with pytest.raises(residuum.UnknownCapture, match="nowhere"):
            call("nowhere")


def test_each_invalid_vector_is_refused(channel: grpc.Channel) -> None:
    fine = vector_message(np.ones(576, np.float32))
    wrong_digest = tensor_pb2.Vector(digest=bytes(32), dtype=fine.dtype, values=fine.values)
    nan = vector_message(np.full(576, np.nan, np.float32))
    short = vector_message(np.ones(575, np.float32))
    half = tensor_pb2.Vector(digest=bytes(32), dtype=tensor_pb2.DATA_TYPE_FLOAT16, values=bytes(1152))
    requests = [inference_pb2.PutVectorsRequest(vector=item) for item in (wrong_digest, nan, short, half, fine)]
    response = inference_pb2_grpc.InferenceServiceStub(channel).PutVectors(iter(requests))
    assert [result.error.reason for result in response.results] == [
        errors_pb2.ERROR_REASON_DIGEST_MISMATCH,
        errors_pb2.ERROR_REASON_BAD_VALUES,
        errors_pb2.ERROR_REASON_WRONG_LENGTH,
        errors_pb2.ERROR_REASON_WRONG_DTYPE,
        errors_pb2.ERROR_REASON_UNSPECIFIED,
    ]


def test_an_unknown_operation_is_refused(channel: grpc.Channel) -> None:
    # A steering operation with a field that this version does not know: it arrives without an operation.
    spec = inference_pb2.RequestSpec()
    spec.steering.operations.add().layers.all = True
    error = refused(channel, inference_pb2.GenerateRequest(spec=spec, text="Hello"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    failure = failure_from_rpc_error(error)
    assert failure is not None
    assert failure.reason_name == "UNKNOWN_OPERATION"


def test_a_zero_direction_is_refused(channel: grpc.Channel) -> None:
    zero = vector_message(np.zeros(576, np.float32))
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    stub.PutVectors(iter([inference_pb2.PutVectorsRequest(vector=zero)]))
    spec = inference_pb2.RequestSpec()
    operation = spec.steering.operations.add()
    operation.layers.all = True
    operation.ablate.digest = zero.digest
    error = refused(channel, inference_pb2.GenerateRequest(spec=spec, text="Hello"))
    failure = failure_from_rpc_error(error)
    assert failure is not None
    assert failure.reason_name == "BAD_VALUES"


def test_steering_to_infinity_does_not_affect_later_requests(client: residuum.Client) -> None:
    # Infinity would become NaN in cached keys and values that later requests share: see `still_serving`.
    far = residuum.Add(vector(), layer=1, scale=3e38)
    reply = client.generate("Hello", max_tokens=4, steer=[far, far], capture=residuum.Capture(layers=[1, 29]))
    acts = client.activations(reply)
    np.testing.assert_allclose(acts[1], 1e16, rtol=2**-7)
    assert np.isfinite(acts[29]).all()


def test_a_request_without_a_prompt_is_refused(channel: grpc.Channel) -> None:
    error = refused(channel, inference_pb2.GenerateRequest(spec=inference_pb2.RequestSpec()))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in error.details()


def test_malformed_protobuf_is_refused(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/residuum.v1.InferenceService/RegisterRequest")
    with pytest.raises(grpc.RpcError) as raised:
        call(b"\xff\xff\xff not protobuf", timeout=10)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_over_the_limit_is_refused(channel: grpc.Channel) -> None:
    error = refused(channel, inference_pb2.GenerateRequest(text="x" * (5 << 20)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_missing_vectors_are_named_and_the_registration_stays(client: residuum.Client, channel: grpc.Channel) -> None:
    spec = inference_pb2.RequestSpec(request_id="waits-for-vectors")
    operation = spec.steering.operations.add()
    operation.layers.all = True
    operation.add.digest = bytes(range(32))
    operation.add.scale = 1.0
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    answer = stub.RegisterRequest(inference_pb2.RegisterRequestRequest(spec=spec))
    assert list(answer.missing_digests) == [bytes(range(32))]
    for _ in range(2):
        error = refused(channel, inference_pb2.GenerateRequest(request_id="waits-for-vectors", text="Hello"))
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        failure = failure_from_rpc_error(error)
        assert failure is not None
        assert failure.metadata["digests"] == bytes(range(32)).hex()
    client.abort("waits-for-vectors")


def refused(channel: grpc.Channel, request: inference_pb2.GenerateRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=30))
    return raised.value
