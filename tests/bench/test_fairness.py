"""Stock is given what the service gives vLLM, but for the taps: else their difference would not be the taps' cost."""

from bench.capture.child import settings_of
from bench.capture.subjects import stock_arguments
from bench.capture.workload import Job, Mode, Workload
from inference_svc import engine


def test_stock_differs_from_the_service_in_the_taps_alone(monkeypatch):
    given = {}
    monkeypatch.setattr(engine, "AsyncEngineArgs", lambda **values: given.update(values))
    workload = Workload("m", batch_size=100, eager=True, engine_args={"load_format": "dummy"})
    settings = settings_of(Job(Mode.STOCK, 0, workload, "/tmp/x"))
    engine._engine_args(settings)
    tapped = dict(given)
    assert tapped.pop("worker_cls")
    assert tapped.pop("additional_config")
    # One device, which is vLLM's default as well.
    assert tapped.pop("tensor_parallel_size") == tapped.pop("pipeline_parallel_size") == 1
    assert stock_arguments(settings) == tapped
    assert tapped["enable_prefix_caching"] is False
    assert tapped["max_num_seqs"] == 100
