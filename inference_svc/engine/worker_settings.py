"""What vLLM's workers are told of the settings: plain data, in the environment that they inherit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference_svc.engine.tap_settings import SITES

if TYPE_CHECKING:
    from inference_svc.engine.tap_settings import TapSettings

LONGEST_STEP_SECONDS = 7 * 24 * 3600
"""How long a step may take: it may wait for the store for as long as the operator lets it (policy WAIT). vLLM by itself
kills the engine after five minutes."""

_TAPS_VERSION = 2
"""Raised whenever the ops in the graph change."""


def worker_settings(settings: TapSettings, control_dir: str, owner_pid: int) -> dict[str, Any]:
    """Return what a worker has to know.

    Args:
        settings: The settings.
        control_dir: A private folder for the control sockets of the rings.
        owner_pid: The process without which the worker has nothing left to do: it ends with it.
    """
    return {
        "control_dir": control_dir,
        "service_pid": owner_pid,
        "ring_bytes": settings.ring_mib << 20,
        "stores": [store.name for store in settings.stores],
        "bank_rows": settings.max_active_vectors,
        "sites": site_numbers(settings),
        "fold_norms": settings.fold_norms,
    }


def site_numbers(settings: TapSettings) -> list[int]:
    """Return the sites that are armed, ascending."""
    return sorted(SITES[name] for name in settings.capture_sites)


def taps_fingerprint(settings: TapSettings) -> dict[str, Any]:
    """Return what goes into vLLM's compile cache's key.

    A graph that was compiled without the ops, or with others, is never taken for this one.
    """
    return {
        "residuum_taps": _TAPS_VERSION,
        "residuum_sites": sorted(settings.capture_sites),
        "residuum_fold_norms": settings.fold_norms,
    }
