"""A plain loop with transformers: forward hooks on the layers, one forward pass for all, one file for each batch.

It computes no logits and stops after the last captured layer. A thread writes the files of one batch while the device
computes the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.capture.child import check_layers
from bench.documents.job import DocumentsJob, Written
from bench.peers.hugging_face import load

_UNWRITTEN = 2
"""Batches that may wait for the thread that writes."""


class _Stopped(Exception):  # noqa: N818 - it is no error
    """The last captured layer is computed."""


class Loop:
    """See `DocumentsWay`."""

    def __init__(self, model: Any, job: DocumentsJob) -> None:
        """Hook the layers of a loaded model."""
        self._job = job
        self._device = model.device
        self._base = model.base_model  # without the head
        self._rows: dict[str, torch.Tensor] = {}
        for layer in job.layers:
            self._base.layers[layer].register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[..., None]:
        def keep(module: Any, arguments: Any, output: Any) -> None:
            del module, arguments
            self._rows[str(layer)] = output[0] if isinstance(output, tuple) else output
            if layer == self._job.layers[-1]:
                raise _Stopped

        return keep

    async def extract(self, prompts: Sequence[Sequence[int]], folder: Path) -> None:
        """See `DocumentsWay`."""
        writing: list[Future[None]] = []
        with ThreadPoolExecutor(1) as thread, torch.inference_mode():
            for number, first in enumerate(range(0, len(prompts), self._job.batch)):
                ids = torch.tensor(prompts[first : first + self._job.batch])
                with suppress(_Stopped):
                    self._base(ids.to(self._device), use_cache=False)
                # To pinned memory, so that the copies do not hold up the next batch.
                rows = {name: found.to("cpu", non_blocking=True) for name, found in self._rows.items()}
                self._rows = {}
                copied = torch.cuda.Event() if self._device.type == "cuda" else None
                if copied is not None:
                    copied.record()
                file = folder / f"{number:05}.safetensors"
                writing.append(thread.submit(_write, {**rows, "token_ids": ids}, file, copied))
                if len(writing) > _UNWRITTEN:
                    writing[-1 - _UNWRITTEN].result()
            for written in writing:
                written.result()

    def read(self, folder: Path) -> Written:
        """See `DocumentsWay`."""
        tokens: list[list[int]] = []
        sample: dict[int, torch.Tensor] = {}
        size = 0
        for file in sorted(folder.glob("*.safetensors")):
            found = load_file(file)
            tokens += found.pop("token_ids").tolist()
            size += sum(rows.nbytes for rows in found.values())
            sample = sample or {int(layer): rows[0].clone() for layer, rows in found.items()}
        return Written(sum(map(len, tokens)), size, tokens, sample)

    def shutdown(self) -> None:
        """See `DocumentsWay`."""


def _write(tensors: dict[str, torch.Tensor], file: Path, copied: Any) -> None:
    if copied is not None:
        copied.synchronize()
    save_file(tensors, file)


async def start(job: DocumentsJob) -> Loop:
    """Load the model."""
    model = load(job.peer())
    check_layers(job.layers, model.config.num_hidden_layers)
    return Loop(model, job)
