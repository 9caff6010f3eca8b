"""vllm-lens: each request returns its rows, and a thread writes them to a file of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.documents.job import DocumentsJob, Written
from bench.peers.lens import Lens
from bench.peers.lens import start as start_lens


class LensDocuments:
    """See `DocumentsWay`."""

    def __init__(self, lens: Lens, job: DocumentsJob) -> None:
        """Wrap a running engine."""
        self._lens = lens
        self._job = job
        self._round = 0

    async def extract(self, prompts: Sequence[Sequence[int]], folder: Path) -> None:
        """See `DocumentsWay`."""
        self._round += 1
        room = asyncio.Semaphore(2 * self._job.concurrency)  # as many as a job of residuum sends

        async def one(index: int, prompt: Sequence[int]) -> None:
            async with room:
                rows = await self._lens.capture(f"lens-{self._round}-{index}", prompt)
                await asyncio.to_thread(_write, rows, prompt, folder / f"{index:05}.safetensors")

        await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))

    def read(self, folder: Path) -> Written:
        """See `DocumentsWay`."""
        tokens: list[list[int]] = []
        sample: dict[int, torch.Tensor] = {}
        count = size = 0
        for file in sorted(folder.glob("*.safetensors")):
            found = load_file(file)
            tokens.append(found["token_ids"].tolist())
            rows = found["rows"]
            count += rows.shape[1]
            size += rows.nbytes
            sample = sample or dict(zip(self._job.layers, rows, strict=True))
        return Written(count, size, tokens, sample)

    def shutdown(self) -> None:
        """See `DocumentsWay`."""
        self._lens.shutdown()


def _write(rows: torch.Tensor, prompt: Sequence[int], file: Path) -> None:
    save_file({"rows": rows.contiguous(), "token_ids": torch.tensor(prompt)}, file)


async def start(job: DocumentsJob) -> LensDocuments:
    """Start the engine."""
    return LensDocuments(await start_lens(job.peer()), job)
