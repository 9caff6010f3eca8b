"""The process of another way to write the rows of documents; see `bench.child`."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from bench.documents.job import DocumentsJob, Way
from bench.plain import restore
from bench.processes import hand_over

if TYPE_CHECKING:
    from bench.documents.job import DocumentsWay, Written

_MODULES = {Way.LOOP: "loop", Way.SAELENS: "saelens", Way.LENS: "lens"}


class WrongFilesError(RuntimeError):
    """A way has written other rows than it should, so the run is invalid."""


def main() -> None:
    """Run the job in the first file, and write its measurements to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    job = restore(DocumentsJob, json.loads(job_file.read_text()))
    asyncio.run(run(job, result_file))


async def run(job: DocumentsJob, result_file: Path) -> None:
    """Run a job; does not return unless it fails."""
    way: DocumentsWay = await importlib.import_module(f"bench.documents.{_MODULES[job.way]}").start(job)
    try:
        hand_over(result_file, await measure(job, way))
    finally:
        way.shutdown()


async def measure(job: DocumentsJob, way: DocumentsWay) -> dict[str, Any]:
    """Return the seconds of each round, the bytes of rows for each token, and how far rows are from the reference."""
    seconds = []
    written: Written | None = None
    for number in range(-1, job.rounds):  # round -1 is a warm-up
        prompts = job.prompts(number)
        if number < 0:
            prompts = prompts[: max(job.batch, 1)]
        folder = Path(job.folder, f"rows{number}")
        folder.mkdir()  # noqa: ASYNC240 - nothing else runs
        began = time.perf_counter()
        await way.extract(prompts, folder)
        taken = time.perf_counter() - began
        written = way.read(folder)
        check(job, prompts, written)
        shutil.rmtree(folder)
        if number >= 0:
            seconds.append(taken)
    assert written is not None  # noqa: S101 - there is a warm-up
    found = {"seconds": seconds, "bytes_per_token": written.row_bytes / written.rows}
    return {**found, "relative_difference": difference(job, written)} if job.reference else found


def check(job: DocumentsJob, prompts: Sequence[Sequence[int]], written: Written) -> None:
    """Check the rows of a round.

    Raises:
        WrongFilesError: Rows or tokens are missing or wrong, or rows are not finite or only zeros.
    """
    if written.rows != len(prompts) * job.prefill:
        raise WrongFilesError(f"{written.rows} rows of {len(prompts)} documents of {job.prefill} tokens")
    if [list(tokens) for tokens in written.token_ids] != [list(prompt) for prompt in prompts]:
        raise WrongFilesError("the tokens are not those of the documents")
    if set(written.sample) != set(job.layers):
        raise WrongFilesError(f"rows of layers {sorted(written.sample)} instead of {list(job.layers)}")
    for layer, rows in written.sample.items():
        if len(rows) != job.prefill or not bool(torch.isfinite(rows).all()) or not bool(rows.any()):
            raise WrongFilesError(f"the rows of the first document at layer {layer} are not finite, or only zeros")


def difference(job: DocumentsJob, written: Written) -> float:
    """Return the greatest relative difference of a layer's rows of the first document from the reference."""
    reference = load_file(job.reference)
    return max(
        float((rows.float() - reference[str(layer)].float()).norm() / reference[str(layer)].float().norm())
        for layer, rows in written.sample.items()
    )
