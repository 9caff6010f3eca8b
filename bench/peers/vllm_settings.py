"""What peers that stand on vLLM are given: the arguments that our service would give it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.capture.child import settings_of
from bench.capture.workload import Job, Mode

if TYPE_CHECKING:
    from bench.peers.child import PeerJob
    from inference_svc.settings import InferenceSettings


def settings_of_peer(job: PeerJob, **more: object) -> InferenceSettings:
    """Return the settings whose `engine_arguments` stock vLLM gets, with more of them."""
    settings = settings_of(Job((Mode.STOCK,), job.round, job.workload, job.folder, job.runner))
    return settings.model_copy(update={"engine_args": {**settings.engine_args, **more}})
