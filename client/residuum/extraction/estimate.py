"""Estimates what a job costs, from a sample of its prompts."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from residuum._async.client import AsyncClient
from residuum.extraction.job import Job, cut, run_in_thread

SAMPLE = 64
"""The prompts of a sample."""


@dataclass(frozen=True)
class Estimate:
    """What a job is expected to take.

    Attributes:
        prompts: The prompts of the job.
        sampled: The prompts of the sample.
        failed: How many of them failed.
        tokens: The tokens of the whole job.
        bytes: The bytes of its rows.
        seconds: How long it takes, with `pack` including the time in which it reads all documents before the first
            prompt.
        free_bytes: The free space on the disk of its folder.
    """

    prompts: int
    sampled: int
    failed: int
    tokens: int
    bytes: int
    seconds: float
    free_bytes: int


def estimate(job: Job, clients: Callable[[], Sequence[AsyncClient]]) -> Estimate:
    """Run a random sample of a job in a temporary folder, and scale what it took to the whole job.

    Raises:
        ResiduumError: As for the job itself.
    """
    with contextlib.closing(job.items()) as items:
        began = time.monotonic()
        for _ in cut(job, items):
            pass
        cutting, total = time.monotonic() - began, len(items)
    with tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        spec = replace(job.spec, limit=min(SAMPLE, total), shuffle=0)
        sample = replace(
            job, folder=Path(folder, "sample"), spec=spec, on_error="skip", keep_captures=False, is_sample=True
        )
        rows = run_in_thread(sample, clients)
        done = rows.summary
    if done is None:
        raise RuntimeError("a job that has run has a summary")
    scale = total / done.prompts
    return Estimate(
        prompts=total,
        sampled=done.prompts,
        failed=done.failed,
        tokens=round(done.tokens * scale),
        bytes=round(done.bytes * scale),
        seconds=cutting + done.seconds * scale,
        free_bytes=shutil.disk_usage(_existing(Path(job.folder))).free,
    )


def _existing(path: Path) -> Path:
    """Return the folder, or the first one above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
