"""The app: its routes, and what their endpoints share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from residuum.exceptions import EmptyCaptureWarning, OutageWarning, SilentStoreWarning
from residuum.ui import access
from residuum.ui.answers import FAILURES, failed
from residuum.ui.api import captures, directions, generations, grids, health, sweeps
from residuum.ui.api.grids import GridCache
from residuum.ui.gallery import Gallery

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from residuum.aio import AsyncClient
    from residuum.ui.api.health import Diagnosis

STATIC = Path(__file__).parent / "static"


def make_app(client: AsyncClient, *, token: str, gallery: Path, diagnose: Diagnosis, store: str = "") -> ASGIApp:
    """Return the app.

    Args:
        client: The client of both services. The app closes it at its end.
        token: The token that the page's URL has.
        gallery: The folder with directions.
        diagnose: Returns the findings that the page shows under Health.
        store: The stores that the client was created with; empty if the inference service names them.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # The page shows each of these. The filter is that of the process, because all tasks share it.
        for category in (OutageWarning, SilentStoreWarning, EmptyCaptureWarning):
            warnings.simplefilter("ignore", category)
        async with client:
            app.state.client = client
            app.state.gallery = Gallery(gallery)
            app.state.grids = GridCache(client)
            app.state.diagnose = diagnose
            app.state.store = store
            yield

    app = Starlette(routes=[], lifespan=lifespan, exception_handlers=dict.fromkeys(FAILURES, failed))
    guard = access.Guard(app, token=token)
    app.routes.extend(
        [
            Route(access.SESSION, guard.open_session, methods=["POST"]),
            *(Route(f"/api/{path}", endpoint, methods=["GET"]) for path, endpoint in _READS.items()),
            *(Route(f"/api/{path}", endpoint, methods=["POST"]) for path, endpoint in _CALLS.items()),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ]
    )
    return guard


_READS = {
    "about": health.session,
    "model": health.model,
    "health": health.health,
    "doctor": health.doctor,
    "captures": captures.list_page,
    "capture": captures.describe,
    "tokens": captures.tokens,
    "grid": grids.grid,
    "scores": grids.scores,
    "row": grids.row,
    "directions": directions.list_all,
    "direction": directions.describe,
    "direction/file": directions.download,
    "direction/tokens": directions.promoted,
}
_CALLS = {
    "capture/label": captures.label,
    "capture/delete": captures.delete,
    "live": grids.live,
    "generate": generations.generate,
    "steer": generations.steer,
    "stop": generations.stop,
    "direction/make": directions.make,
    "direction/upload": directions.upload,
    "direction/rename": directions.rename,
    "direction/delete": directions.delete,
    "search": directions.search,
    "sweep": sweeps.sweep,
}
