"""The settings that vLLM's workers read: plain data, passed in an environment variable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference_svc.tap_settings import SITES
from svc_common.machine import machine_id

if TYPE_CHECKING:
    from inference_svc.tap_settings import TapSettings

LONGEST_STEP_SECONDS = 7 * 24 * 3600
"""vLLM's limit for one step. With the policy WAIT, a step may wait for the store for days, until an operator acts.
vLLM's own default would kill the engine after five minutes."""

_TAPS_VERSION = 2
"""Increment it whenever the ops in the graph change."""


def worker_settings(
    settings: TapSettings, control_dir: str, owner_pid: int, score_board: str = "", sae_bytes: int = 0
) -> dict[str, Any]:
    """Return the settings that a worker reads.

    Args:
        settings: The settings of the service.
        control_dir: A private folder for the control sockets of the rings.
        owner_pid: The process of the service. The worker ends when this process ends.
        score_board: The file of the score board; empty: no probes.
        sae_bytes: How many bytes the encoders of sparse autoencoders may take; 0: there are none.
    """
    return {
        "control_dir": control_dir,
        "service_pid": owner_pid,
        "machine": machine_id(),
        "ring_bytes": settings.ring_mib << 20,
        "stores": [store.name for store in settings.stores],
        "bank_rows": settings.max_active_vectors,
        "sites": site_numbers(settings),
        "fold_norms": settings.fold_norms,
        "score_board": score_board,
        "sae_bytes": sae_bytes,
    }


def site_numbers(settings: TapSettings) -> list[int]:
    """Return the sites that requests may capture, ascending."""
    return sorted(SITES[name] for name in settings.capture_sites)


def taps_fingerprint(settings: TapSettings) -> dict[str, Any]:
    """Return the part of vLLM's compile cache key that identifies the taps.

    It keeps vLLM from reusing a graph that was compiled without the ops, or with other ops.
    """
    return {
        "residuum_taps": _TAPS_VERSION,
        "residuum_sites": sorted(settings.capture_sites),
        "residuum_fold_norms": settings.fold_norms,
    }
