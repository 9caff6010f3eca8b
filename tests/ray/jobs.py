"""What the tests of jobs share: prompts, the comparison of their rows, and processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

import residuum

CAPTURE = residuum.Capture(layers=[0, 2])
POINTS = {"blocks.0.hook_resid_post": 0, "blocks.2.hook_resid_post": 2}
TEXTS = [f"The {word} number {number} is" for number in range(20) for word in ("sea", "train", "book")]


def by_prompt(table):
    """Return the rows of each prompt in the order of their positions, as {id: {point: array}}."""
    found = {}
    ids, positions = table["id"].to_numpy(), table["positions"].to_numpy()
    for at in np.unique(ids).tolist():
        rows = np.flatnonzero(ids == at)
        rows = rows[np.argsort(positions[rows])]
        found[at] = {
            name: np.stack([np.asarray(item, np.float32) for item in table[name].take(rows).to_pylist()])
            for name in POINTS
        }
    return found


def check_rows(table, client, folder, texts=TEXTS):
    reference = client.extract(texts, folder, capture=CAPTURE, progress=False)
    found = by_prompt(table)
    assert sorted(found) == list(range(len(texts)))
    for at, rows in found.items():
        for name, layer in POINTS.items():
            expected = np.asarray(reference.layer(layer)[reference.prompt == at], np.float32)
            np.testing.assert_allclose(rows[name], expected, rtol=1e-3, atol=1e-4)
    assert sorted(table["token_ids"].to_pylist()) == sorted(reference.token_ids.tolist())


def processes():
    """Return the processes that are descendants of this one, by their IDs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, fresh = set(), {os.getpid()}
    while fresh:
        found |= fresh
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
    return found


def command_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
