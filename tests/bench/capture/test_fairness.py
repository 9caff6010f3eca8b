"""Stock vLLM gets the same arguments as the service's, except for the taps, so the difference is the taps' cost."""

import dataclasses

import pytest

from bench.capture import subjects
from bench.capture.child import settings_of
from bench.capture.subjects import StockSubject
from bench.capture.workload import Job, Mode, Workload
from inference_svc.engine import arguments as engine_arguments
from inference_svc.settings import InferenceSettings

WORKLOAD = Workload(
    "m",
    batch_size=100,
    prefill=500,
    decode=12,
    eager=True,
    engine_args={"load_format": "dummy", "tensor_parallel_size": 2},
)


@pytest.fixture
def given(monkeypatch):
    """The arguments that vLLM got, engine by engine."""
    given = []

    def keep(**values):
        given.append(values)
        return values

    monkeypatch.setattr(engine_arguments, "AsyncEngineArgs", keep)
    monkeypatch.setattr(subjects, "AsyncEngineArgs", keep)
    return given


async def test_stock_differs_from_the_service_only_in_the_taps(given, monkeypatch):
    settings = settings_of(Job((Mode.STOCK,), 0, WORKLOAD, "/tmp/x"))
    monkeypatch.setattr(subjects.AsyncLLM, "from_engine_args", lambda values: None)
    with pytest.raises(AttributeError):  # no engine was started
        await StockSubject.start(settings)
    engine_arguments.tapped_engine_args(settings)
    stock, tapped = given
    assert tapped.pop("worker_cls")
    assert tapped.pop("additional_config")
    assert stock == tapped


async def test_sites_and_folding_affect_only_the_taps(given, monkeypatch):
    monkeypatch.setattr(subjects.AsyncLLM, "from_engine_args", lambda values: None)
    chosen = dataclasses.replace(WORKLOAD, capture_sites=("resid_pre", "mlp_out"), fold_norms=False)
    for workload in (WORKLOAD, chosen):
        with pytest.raises(AttributeError):
            await StockSubject.start(settings_of(Job((Mode.STOCK,), 0, workload, "/tmp/x")))
    assert given[0] == given[1]


def test_the_service_gets_sites_and_folding():
    settings = settings_of(Job((Mode.IDLE,), 0, WORKLOAD, "/tmp/x"))
    defaults = InferenceSettings(model="m")
    assert (settings.capture_sites, settings.fold_norms) == (defaults.capture_sites, defaults.fold_norms)
    chosen = dataclasses.replace(WORKLOAD, capture_sites=("resid_pre", "mlp_out"), fold_norms=False)
    settings = settings_of(Job((Mode.IDLE,), 0, chosen, "/tmp/x"))
    assert (settings.capture_sites, settings.fold_norms) == (("resid_pre", "mlp_out"), False)


def test_both_get_the_arguments_that_the_workload_needs():
    arguments = engine_arguments.engine_arguments(settings_of(Job((Mode.STOCK,), 0, WORKLOAD, "/tmp/x")))
    assert arguments["enable_prefix_caching"] is False
    assert arguments["max_num_seqs"] == 100
    assert arguments["max_model_len"] == 512
    assert arguments["tensor_parallel_size"] == 2


def test_a_model_has_room_for_the_self_test():
    assert settings_of(Job((Mode.IDLE,), 0, Workload("m", prefill=1, decode=1), "/tmp/x")).max_model_len == 16
