"""Says why a job waits: one of its stores is full, or does not answer. Reads wait for both, for minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from residuum.exceptions import DeadlineExceeded, OutageWarning, ResiduumError, Unavailable
from residuum.extraction.running.service import Service
from residuum.protocol.caller import warn_caller

_QUIET_SECONDS = 5.0
"""The time without a prompt that ends after which the stores are asked, and the time that they have to answer."""


async def watch_stores(services: Sequence[Service], num_ended: Callable[[], int]) -> None:
    """Warn if the job waits for a store, once for each reason, and when it goes on. Runs until it is cancelled.

    Args:
        services: The job's services. Those that are away are known to be.
        num_ended: Returns how many prompts have ended.
    """
    before, told = num_ended(), ""
    while True:
        await asyncio.sleep(_QUIET_SECONDS)
        if num_ended() != before:
            before = num_ended()
            if told:
                told = ""
                warn_caller("The job goes on.", OutageWarning)
            continue
        kind, why = await _reason(services)
        if kind not in ("", told):
            told = kind
            warn_caller(f"The job waits: {why}", OutageWarning)


async def _reason(services: Sequence[Service]) -> tuple[str, str]:
    """Return the kind of the reason to wait, and the reason; empty if the stores have room."""
    for client in [service.client for service in services if not service.is_away]:
        try:
            stores = await asyncio.wait_for(client.stats(), _QUIET_SECONDS)
        except asyncio.TimeoutError:
            return "away", f"{client.endpoint} or one of its stores does not answer."
        except (Unavailable, DeadlineExceeded) as failure:
            return "away", str(failure)
        except ResiduumError:
            continue
        for store in stores:
            if store.why_full:
                return "full", (
                    f"the store {store.endpoint} is full, because {store.why_full}. Delete captures (residuum rm), or "
                    "give it more room."
                )
    return "", ""
