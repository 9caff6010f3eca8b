"""The worker class for `vllm serve`: the tapped worker, with settings from the environment."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from inference_svc.engine.worker_settings import taps_fingerprint, worker_settings
from inference_svc.resources.score_board import ScoreMemory
from inference_svc.tap_settings import TapSettings
from inference_svc.taps.errors import UnsupportedEngineError
from inference_svc.taps.vllm.worker import SETTINGS_VARIABLE
from inference_svc.vllm_serve import plugin
from residuum.rpc.extras import install_server
from svc_common.scratch_folder import PREFIX, own_folder, remove_abandoned_folders
from svc_common.settings import from_environment

if TYPE_CHECKING:
    from inference_svc.taps.vllm.worker import TappedWorker


class ServedWorker:
    """Mixin for a tapped worker. It reads the settings that the inference service would otherwise pass on."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        """Check that the plugin is loaded, and add the taps' settings to the key of vLLM's compile cache."""
        _check_front_end()
        self._tap_settings = from_environment(TapSettings)
        self._num_stages = vllm_config.parallel_config.pipeline_parallel_size
        vllm_config.additional_config = {**vllm_config.additional_config, **taps_fingerprint(self._tap_settings)}
        super().__init__(vllm_config, *arguments, **options)  # type: ignore[call-arg]  # vLLM's worker comes next

    def load_model(self, **options: Any) -> None:
        """Load the model with taps. The ring's control socket is in a new folder, which the front end removes."""
        remove_abandoned_folders()
        folder = tempfile.mkdtemp(prefix=PREFIX)
        own_folder(folder)
        # Steps of several stages have no common order: see `score_board`. The API servers open the memory.
        has_probes = self._tap_settings.score_mib and self._num_stages == 1
        self._scores = ScoreMemory(self._tap_settings.score_mib << 20) if has_probes else None
        settings = worker_settings(
            self._tap_settings, folder, os.getppid(), self._scores.path if self._scores is not None else ""
        )
        os.environ[SETTINGS_VARIABLE] = json.dumps(settings)
        try:
            super().load_model(**options)  # type: ignore[misc]
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # the front end never learns of it
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
    """Check that vLLM's API server has the front end. Without it, vLLM would answer requests and capture nothing.

    Raises:
        UnsupportedEngineError: The API server does not have the front end.
    """
    if (problem := plugin.problem()) is not None:
        raise UnsupportedEngineError(
            f"vLLM's API server has not loaded residuum's plugin: {problem}. In vLLM's environment, "
            f"{install_server()}. If you set VLLM_PLUGINS, add `residuum` to it."
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in {"", "0"}:
        raise UnsupportedEngineError("residuum's plugin needs vLLM's Python API server; unset VLLM_USE_RUST_FRONTEND.")
