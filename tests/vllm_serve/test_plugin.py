"""The plugin with other engines, with an unsupported vLLM, and with invalid settings."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

import residuum
from inference_svc import vllm_serve
from inference_svc.tap_settings import TapSettings
from inference_svc.vllm_serve import plugin
from svc_common.launcher import ROOT
from svc_common.settings import BadSettingsError, from_environment
from tests import warm_start


def config(worker_cls, replicas=1, api_servers=1):
    parallel = {"worker_cls": worker_cls, "data_parallel_size": replicas, "_api_process_count": api_servers}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel))


def test_vllm_finds_the_plugin():
    (found,) = {entry.value for entry in entry_points(group="vllm.general_plugins", name="residuum")}
    assert found == "inference_svc.vllm_serve.plugin:register"


def test_other_engines_are_unchanged(monkeypatch):
    monkeypatch.setenv("RESIDUUM_STORE", "no store at all")
    for worker in ("auto", "vllm.v1.worker.gpu_worker.Worker", "inference_svc.taps.vllm.cpu_worker.TappedCpuWorker"):
        assert plugin._front_end_factory(config(worker)) is None


def test_data_parallelism_is_refused_before_the_model_is_loaded():
    with pytest.raises(SystemExit, match="data parallelism is not supported"):
        plugin._front_end_factory(config(vllm_serve.WORKER, replicas=2))
    assert plugin._front_end_factory(config("auto", replicas=2)) is None


def test_fewer_active_vectors_than_api_servers_are_refused_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setenv("RESIDUUM_MAX_ACTIVE_VECTORS", "3")
    with pytest.raises(SystemExit, match="RESIDUUM_MAX_ACTIVE_VECTORS is 3, but the 4 API servers"):
        plugin._front_end_factory(config(vllm_serve.WORKER, api_servers=4))


def test_bad_settings_are_reported_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setenv("RESIDUUM_STORE", "no store at all")
    monkeypatch.setenv("RESIDUUM_CAPTURE_SITES", "resid")
    monkeypatch.setenv("RESIDUUM_RING_MB", "7")
    with pytest.raises(SystemExit, match=r"(?s)RESIDUUM_STORE.*RESIDUUM_CAPTURE_SITES.*resid.*RESIDUUM_RING_MB: "):
        plugin._front_end_factory(config(vllm_serve.WORKER))


@pytest.mark.parametrize(("text", "why"), [(None, "cannot be read: No such file"), ("[[rule]]\nname = 1", "name")])
def test_a_wrong_file_of_rules_is_reported_before_the_model_is_loaded(monkeypatch, tmp_path, text, why):
    path = tmp_path / "rules.toml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("RESIDUUM_RULES_FILE", str(path))
    with pytest.raises(SystemExit, match=rf"bad settings\nrules: {path}.*{why}"):
        plugin._front_end_factory(config(vllm_serve.WORKER))


def test_settings_are_the_same_as_the_services(monkeypatch):
    monkeypatch.setenv("RESIDUUM_STORE", "a=h:1,b=h:2")
    monkeypatch.setenv("RESIDUUM_RING_MIB", "7")
    monkeypatch.setenv("RESIDUUM_LISTEN", "0.0.0.0:1")  # the service would refuse to start with this
    settings = from_environment(TapSettings)
    assert [store.name for store in settings.stores] == ["a", "b"]
    assert settings.ring_mib == 7
    monkeypatch.setenv("RESIDUUM_RING_MIB", "0")
    with pytest.raises(BadSettingsError, match="RESIDUUM_RING_MIB"):
        from_environment(TapSettings)


class Plain:
    """An engine with the three methods of vLLM's that the plugin wraps."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config

    async def generate(self, prompt, sampling_params, request_id):
        yield request_id, sampling_params.extra_args

    def shutdown(self):
        """Stop."""


@pytest.fixture
def untapped():
    class Wrapped(Plain):
        __init__, generate, shutdown = Plain.__init__, Plain.generate, Plain.shutdown

    plugin._wrap(Wrapped)
    return Wrapped(config("auto"))


@pytest.mark.parametrize(
    "extra_args",
    [
        residuum.vllm_xargs(residuum.Capture()),
        residuum.vllm_xargs(steer=[residuum.Add(residuum.Vector.from_array(np.ones(4, np.float32)), layer=1)]),
        {"residuum_vectors": []},
    ],
    ids=["capture", "steering", "vectors alone"],
)
async def test_without_the_tapped_worker_a_capture_request_is_refused(untapped, extra_args):
    """Otherwise vLLM would answer without a capture."""
    with pytest.raises(VLLMValidationError, match=f"--worker-cls {vllm_serve.WORKER}") as refused:
        untapped.generate("x", SamplingParams(extra_args=extra_args), "r")  # not awaited
    assert refused.value.parameter == "vllm_xargs"


@pytest.mark.parametrize("extra_args", [None, {}, {"kv_transfer_params": {}}, {"residuum_plan": {}}])
async def test_without_the_tapped_worker_other_requests_pass(untapped, extra_args):
    """Among them are those of the inference service, which have plans."""
    outputs = [output async for output in untapped.generate("x", SamplingParams(extra_args=extra_args), "r")]
    assert outputs == [("r", extra_args)]


class Other:
    """A vLLM with another name for something."""

    abort = collective_rpc = errored = get_supported_tasks = shutdown = None

    def generate(self, prompt, sampling_params, request_id):
        """Accept vLLM's parameters."""


class Reordered(Other):
    def generate(self, request_id, prompt, sampling_params):
        """Accept the same parameters in another order."""


def test_an_unsupported_vllm_is_recognized():
    assert plugin._missing(Other) is None
    assert "takes self, request_id, prompt" in plugin._missing(Reordered)
    assert "no abort, collective_rpc" in plugin._missing(object)


@pytest.mark.slow
def test_a_worker_without_the_front_end_does_not_start(tmp_path, monkeypatch):
    environments = [
        {},
        {"VLLM_PLUGINS": "another"},
        {"VLLM_USE_RUST_FRONTEND": "1"},
        {"VLLM_PLUGINS": "residuum", "VLLM_USE_RUST_FRONTEND": "0"},
    ]
    log = tmp_path / "log"
    log.write_text("")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    process = warm_start.launch("tests.vllm_serve.started_workers", [json.dumps(environments)], ROOT, log)
    assert process.wait(120) == 0, log.read_text()[-2000:]
    plain, other_plugin, rust, both = json.loads(log.read_text().splitlines()[-1])
    assert plain is None
    assert "VLLM_PLUGINS" in other_plugin
    assert "VLLM_USE_RUST_FRONTEND" in rust
    assert both is None
