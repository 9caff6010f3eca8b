"""Endpoints for the state of the services: health, space, and the findings of `residuum doctor`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import residuum
from residuum.exceptions import ResiduumError
from residuum.ui.answers import describe

if TYPE_CHECKING:
    from residuum.aio import AsyncClient
    from residuum.values.model.info import ModelInfo
    from residuum.values.replies.service_status import StoreStats

Diagnosis = Callable[[], Iterable[Any]]
"""Returns findings with `check`, `ok`, `warning` and `detail`. The command line provides it: it has `doctor`."""


_WAIT_SECONDS = 3.0


async def session(request: Request) -> Response:
    """Return what the page needs at its start."""
    client: AsyncClient = request.app.state.client
    return JSONResponse(
        {"version": residuum.__version__, "endpoint": client.endpoint, "store": request.app.state.store}
    )


async def model(request: Request) -> Response:
    """Return the facts of the served model that the page offers as choices."""
    client: AsyncClient = request.app.state.client
    return JSONResponse(_model(await client.info()))


async def health(request: Request) -> Response:
    """Return whether the services are serving, and what the stores hold. A service that is away is no failure."""
    client: AsyncClient = request.app.state.client
    answer: dict[str, Any] = {"inference": "", "stores": {}, "stats": [], "problems": [], "load": None}
    status, stats, info = await asyncio.gather(
        _soon(client.health()), _soon(client.stats(allow_partial=True)), _soon(_info(client))
    )
    if info is not None and not isinstance(info, ResiduumError):  # the status says why there is none
        answer["load"] = _load(info)
    if status is not None:
        answer |= {"inference": status.inference or "", "stores": dict(status.stores)}
    if isinstance(stats, ResiduumError):
        answer["problems"].append(describe(stats)["message"])
    elif stats is not None:
        answer["stats"] = [_stats(item) for item in stats]
    if status is None or stats is None:
        named = " and ".join(filter(None, (client.endpoint, request.app.state.store)))
        answer["problems"].append(
            f"A service does not answer within {_WAIT_SECONDS:g} seconds: {named}, or a store that it names."
        )
    return JSONResponse(answer)


async def _info(client: AsyncClient) -> ModelInfo | None:
    return await client.info() if client.endpoint else None


def _load(info: ModelInfo) -> dict[str, Any] | None:
    """Return what the service does, and its clock, so that the page can tell how fast the counts grow."""
    if info.load is None or info.server_time is None:
        return None
    limits = {"ring_bytes": info.limits["ring_bytes"], "max_running_requests": info.limits["max_running_requests"]}
    return {**dataclasses.asdict(info.load), **limits, "at": info.server_time.timestamp()}


async def _soon(call: Awaitable[Any]) -> Any:
    """Return the result or the failure of a call; None if it takes too long, as with a service that hangs."""
    try:
        return await asyncio.wait_for(call, _WAIT_SECONDS)
    except asyncio.TimeoutError:
        return None
    except ResiduumError as error:
        return error


async def doctor(request: Request) -> Response:
    """Return the findings of `residuum doctor`."""
    diagnose: Diagnosis = request.app.state.diagnose
    findings = await asyncio.to_thread(lambda: [vars(finding) for finding in diagnose()])
    return JSONResponse({"findings": findings})


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "model": info.model, "layers": info.num_layers, "hidden_size": info.hidden_size, "sites": info.sites,
        "max_model_len": info.max_model_len, "vllm": info.vllm_version, "version": info.server_version,
    }  # fmt: skip


def _stats(item: StoreStats) -> dict[str, Any]:
    known = dataclasses.asdict(item)
    return {
        name: known[name]
        for name in ("store", "endpoint", "captures", "num_bytes", "used_bytes", "append_limit_bytes",
                     "free_disk_bytes", "why_full", "server_version", "tenant")
    }  # fmt: skip
