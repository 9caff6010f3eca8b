"""The worker class for `vllm serve`: the service's own, with settings from the environment."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from inference_svc.engine.tap_settings import TapSettings
from inference_svc.engine.worker_settings import taps_fingerprint, worker_settings
from inference_svc.taps.vllm.limits import UnsupportedEngineError
from inference_svc.taps.vllm.worker import SETTINGS_VARIABLE
from inference_svc.vllm_serve import plugin
from residuum.rpc.extras import install_server
from svc_common.settings import from_environment

if TYPE_CHECKING:
    from inference_svc.taps.vllm.worker import TappedWorker


class ServedWorker:
    """Mixed in before a tapped worker: there is no service that tells this one its settings."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        """Check that the plugin is there, and give vLLM's compile cache a key that knows of the taps."""
        _check_front_end()
        self._tap_settings = from_environment(TapSettings)
        vllm_config.additional_config = {**vllm_config.additional_config, **taps_fingerprint(self._tap_settings)}
        super().__init__(vllm_config, *arguments, **options)  # type: ignore[call-arg]  # vLLM's worker comes next

    def load_model(self, **options: Any) -> None:
        """Load and hook the model; the rings' control sockets go to a new folder, which the front end removes."""
        folder = tempfile.mkdtemp(prefix="residuum-")
        os.environ[SETTINGS_VARIABLE] = json.dumps(worker_settings(self._tap_settings, folder, os.getppid()))
        try:
            super().load_model(**options)  # type: ignore[misc]
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # no front end ever hears of it
            raise


@functools.cache
def worker_class() -> type[TappedWorker]:
    """Return the worker class for this machine."""
    kind: Any
    if current_platform.is_cpu():
        from inference_svc.taps.vllm.cpu_worker import TappedCpuWorker as kind  # noqa: N813 - one of two
    else:
        from inference_svc.taps.vllm.gpu_worker import TappedGpuWorker as kind  # noqa: N813 - the other
    return type("Worker", (ServedWorker, kind), {"__doc__": f"{kind.__doc__} For `vllm serve`."})


def _check_front_end() -> None:
    """Make sure that vLLM's API server has the front end: without it, requests would be served and never captured.

    Raises:
        UnsupportedEngineError: It has not.
    """
    if (problem := plugin.problem()) is not None:
        raise UnsupportedEngineError(
            f"vLLM's API server does not know residuum: {problem}. Its plugin is called `residuum`: name it in "
            f"VLLM_PLUGINS if you set that, and in vLLM's environment {install_server()}."
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in {"", "0"}:
        raise UnsupportedEngineError(
            "residuum's plugin lives in vLLM's Python API server; unset VLLM_USE_RUST_FRONTEND."
        )
