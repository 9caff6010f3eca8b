"""Shared by the tests of the archive: captures with known rows, and what the store and the archive have of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from residuum.rpc.objects import MissingObjectError, Objects
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.archive import CAPTURES, CHUNKS, unpack_capture
from tests.store.support import Cell, Client, describe, grid, make_chunk
from tests.waiting import wait_for

PENDING, COPIED = capture_pb2.ARCHIVE_STATE_PENDING, capture_pb2.ARCHIVE_STATE_COPIED
MOVED = capture_pb2.ARCHIVE_STATE_MOVED

LAYERS = (0, 1, 2)
PROMPT = 4
WIDTH = 4


def capture(
    client: Client,
    capture_id: str = "a",
    *,
    width: int = WIDTH,
    prompt: int = PROMPT,
    at_once: int = 1,
    **fields: object,
) -> set[Cell]:
    """Write a capture that ends COMPLETE; return its cells. Each chunk has `at_once` positions."""
    description = describe(capture_id, layers=LAYERS, prompt=prompt, width=width)
    for name, value in fields.items():
        setattr(description, name, value)
    client.open(description)
    starts = range(0, prompt, at_once)
    chunks = [make_chunk(LAYERS, range(at, min(at + at_once, prompt)), width=width) for at in starts]
    client.append(chunks, capture_id)
    client.seal(capture_id, generated=(1,))
    assert client.get(capture_id, wait=10).state == capture_pb2.CAPTURE_STATE_COMPLETE
    return grid(LAYERS, range(prompt))


def state(client: Client, capture_id: str = "a") -> int:
    return client.get(capture_id).archive_state


def wait_for_state(client: Client, wanted: int, capture_ids: Sequence[str] = ("a",), seconds: float = 30) -> None:
    for capture_id in capture_ids:
        wait_for(lambda: state(client, capture_id) == wanted, f"{capture_id} in state {wanted}", seconds)  # noqa: B023


def listed_states(client: Client) -> dict[str, int]:
    """Return the states of all captures, as a list has them: a moment later than `state`."""
    found = client.stub.ListCaptures(store_pb2.ListCapturesRequest()).captures
    return {item.capture_id: item.archive_state for item in found}


def files_under(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its subfolders. The store may delete some of them meanwhile."""
    return [name for _, _, names in os.walk(folder) for name in names]


def stats(client: Client) -> store_pb2.ArchiveStats:
    return client.stub.GetStats(store_pb2.GetStatsRequest()).archive


def archived_ids(objects: Objects) -> list[str]:
    """Return the IDs of the captures in an archive."""
    found = []
    for path in objects.list(CAPTURES):
        with contextlib.suppress(MissingObjectError):  # it was deleted meanwhile
            found.append(unpack_capture(objects.get(path)).manifest.description.capture_id)
    return sorted(found)


def chunk_objects(objects: Objects) -> list[str]:
    """Return the paths of all objects with chunks."""
    return sorted(objects.list(CHUNKS))


def file_url(folder: Path) -> str:
    return f"file://{folder}"
