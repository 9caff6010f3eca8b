"""The front end opens and seals captures through another thread, and failures become HTTP statuses."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

import residuum
from inference_svc.requests.registry import RequestRegistry
from inference_svc.session.capture_session import CaptureSession
from inference_svc.tap_settings import TapSettings
from inference_svc.vllm_serve.delivery import Delivery
from inference_svc.vllm_serve.requests.refusals import as_http_errors, http_error
from residuum.rpc.errors import CODES, Failure, Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from svc_common.launcher import start_store
from tests.inference.service_support import CAPTURE, FACTS, FakeStore, listening
from tests.inference.spec_support import spec_of


def description(name, model="tiny"):
    layers = selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=[0]))
    return capture_pb2.CaptureDescription(
        capture_id=name,
        model=model,
        hidden_size=4,
        num_layers=1,
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        spec=capture_pb2.CaptureSpec(
            layers=layers,
            sites=[capture_pb2.SITE_RESID_POST],
            encoding=capture_pb2.ENCODING_RAW,
            overflow=capture_pb2.OVERFLOW_POLICY_WAIT,
            reduction=capture_pb2.REDUCTION_NONE,
        ),
        prompt_token_ids=[1],
        num_sequences=1,
    )


async def test_seals_are_sent_before_the_stores_close(tmp_path):
    store = start_store(tmp_path)
    try:
        store.wait_until_serving(60)
        delivery = Delivery(TapSettings(store=store.endpoint))
        await delivery.open(description("one"), is_new_id=False)
        with pytest.raises(Failure, match="one"):
            await delivery.open(description("one", model="another"), is_new_id=False)
        delivery.seal(
            store_pb2.SealCaptureRequest(
                capture_id="one",
                outcome=capture_pb2.CAPTURE_STATE_INCOMPLETE,
                incomplete_reason=capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED,
                sequences=[capture_pb2.SequenceOutcome(finish_reason="abort")],
            )
        )
        delivery.close_stores()
        delivery.close()
        with residuum.Client(store.endpoint, store=store.endpoint) as client:
            assert client.manifest("one", wait=30).reason == "REQUEST_FAILED"
    finally:
        store.stop()


class StrictStore(FakeStore):
    """Takes rows before the open of their capture. Notes seals of captures that it has not opened."""

    def __init__(self):
        super().__init__()
        self.takes_early_rows = True
        self.too_early = []

    async def SealCapture(self, request, context):
        if request.capture_id not in {description.capture_id for description in self.opened}:
            self.too_early.append(request.capture_id)
        return await super().SealCapture(request, context)


async def test_captures_of_callers_that_leave_before_the_open_are_opened_and_then_sealed():
    store = StrictStore()
    async with listening(store_pb2_grpc.add_StoreServiceServicer_to_server, store) as endpoint:
        delivery = Delivery(TapSettings(store=endpoint))
        await delivery.open(description("first"), is_new_id=True)
        registry = RequestRegistry(0.0, 0)

        async def leave(name):
            running = registry.start_inline(spec_of(name, CAPTURE))
            with suppress(asyncio.CancelledError):
                async with CaptureSession(FACTS, running, [1], 1, lambda: delivery):
                    raise asyncio.CancelledError

        names = {f"r{number}" for number in range(32)}
        await asyncio.gather(*map(leave, names))
        await store.until(lambda: len(store.seals) == len(names))
        assert store.too_early == []
        assert {description.capture_id for description in store.opened} == {"first", *names}
        await asyncio.to_thread(delivery.close_stores)
        delivery.close()


async def test_no_capture_is_opened_after_the_stores_closed():
    delivery = Delivery(TapSettings(store="127.0.0.1:9"))
    delivery.close_stores()
    with pytest.raises(Failure, match="is stopping") as caught:
        await delivery.open(description("late"), is_new_id=True)
    assert caught.value.reason == Reason.ERROR_REASON_STORE_UNREACHABLE
    delivery.close()


async def test_a_seal_after_the_stores_closed_is_logged(capfd):
    delivery = Delivery(TapSettings(store="127.0.0.1:9"))
    delivery.close_stores()
    delivery.seal(store_pb2.SealCaptureRequest(capture_id="late", outcome=capture_pb2.CAPTURE_STATE_ABORTED))
    delivery.close()
    assert "not sealed" in (told := "".join(capfd.readouterr()))
    assert "late" in told


async def test_an_unreachable_store_gives_status_503():
    delivery = Delivery(TapSettings(store="127.0.0.1:9"))
    with pytest.raises(GracefulHTTPError, match="STORE_UNREACHABLE") as caught, as_http_errors():
        await delivery.open(description("one"), is_new_id=False)
    assert caught.value.http_status == 503
    delivery.close_stores()
    delivery.close()


def test_only_a_limit_that_a_retry_may_not_exceed_gives_status_503():
    reached = http_error(Failure(Reason.ERROR_REASON_LIMIT_REACHED, "full", limit="score_mib"))
    assert isinstance(reached, GracefulHTTPError)
    assert reached.http_status == 503
    never = http_error(Failure(Reason.ERROR_REASON_LIMIT_REACHED, "too much", limit="score_mib", needed=5, allowed=2))
    assert isinstance(never, VLLMValidationError)  # status 400


@pytest.mark.parametrize("reason", CODES)
def test_every_failure_has_a_status(reason):
    error = http_error(Failure(reason, "What is wrong."))
    assert "What is wrong." in str(error)
    assert Reason.Name(reason).removeprefix("ERROR_REASON_") in str(error)
    assert isinstance(error, (VLLMValidationError, GracefulHTTPError))
