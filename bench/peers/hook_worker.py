"""The worker's part of capture by forward hooks, like systems that patch eager vLLM. vLLM mixes it into its worker.

After each decoder layer, a forward hook adds `hidden` and `residual`, then slices and clones the rows of each request.
Rows of a prompt are kept as they are. Rows of generated tokens are concatenated to the earlier rows, one by one or 32
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import Tensor

from bench.capture.workers.extension import WorkerExtension
from inference_svc.taps.model.insertion import find_decoder_layers
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.vllm.runners import runner_v1, runner_v2

EXTENSION = f"{__name__}.HookWorker"
"""The value of vLLM's `worker_extension_cls`."""


class HookWorker(WorkerExtension):
    """Methods for `collective_rpc`."""

    def hooks_install(self, layers: Sequence[int], flush_every: int) -> None:
        """Hook these layers, or all if empty. Concatenate the rows of `flush_every` generated tokens at a time."""
        worker: Any = self
        config = worker.vllm_config.model_config
        found = find_decoder_layers(worker.model_runner.get_model(), config.get_total_num_hidden_layers())
        captures = Captures(flush_every)
        adapter = runner_v2 if worker.use_v2_model_runner else runner_v1
        adapter.attach(worker.model_runner, captures.place, vllm.__version__)
        for layer in layers or sorted(found):
            found[layer].register_forward_hook(captures.hook(layer))
        worker._hook_captures = captures  # noqa: SLF001 - its own name

    def hooks_write(self, folder: str, names: Sequence[str], positions: int) -> None:
        """Write the rows of each request to NAME.bin, [layers, positions, hidden] as raw bytes, and drop them."""
        worker: Any = self
        for name, rows in worker._hook_captures.take(names, positions).items():  # noqa: SLF001 - see above
            rows.view(torch.uint8).numpy().tofile(Path(folder, f"{name}.bin"))


class Captures:
    """The captured rows of each request, layer by layer."""

    def __init__(self, flush_every: int) -> None:
        self._flush_every = flush_every
        self._rows: StepRows | None = None
        self._captured: dict[str, dict[int, Tensor]] = {}
        self._buffers: dict[str, dict[int, list[Tensor]]] = {}

    def place(self, rows: Callable[[], StepRows]) -> None:
        """Take the assignment of the batch's rows to requests. Called before each forward pass."""
        self._rows = rows()

    def hook(self, layer: int) -> Callable[..., None]:
        """Return the forward hook of a layer."""

        def capture(module: Any, arguments: Any, output: Any) -> None:
            del module, arguments
            if self._rows is None:
                return  # vLLM runs the model without requests, such as to profile its memory
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            stream = hidden if residual is None else hidden + residual
            at = 0
            for request_id, count in zip(self._rows.request_ids, self._rows.counts, strict=False):
                self._add(request_id, layer, stream[at : at + int(count)].detach().clone())
                at += int(count)

        return capture

    def take(self, names: Sequence[str], positions: int) -> dict[str, Tensor]:
        """Return the rows of each request in host memory, [layers, positions, hidden], and drop them.

        Rows beyond `positions` are left out, because vLLM may compute a step too many. Names are matched by prefix,
        because vLLM appends a suffix to request IDs.
        """
        taken = {}
        for request_id in list(self._captured):
            name = next((name for name in names if request_id in {name, f"{name}-{request_id[-8:]}"}), None)
            for layer in list(self._buffers.get(request_id, {})):
                self._flush(request_id, layer)
            layers = self._captured.pop(request_id)
            self._buffers.pop(request_id, None)
            if name is not None:
                taken[name] = torch.stack([layers[layer][:positions] for layer in sorted(layers)]).cpu()
        return taken

    def _add(self, request_id: str, layer: int, rows: Tensor) -> None:
        captured = self._captured.setdefault(request_id, {})
        if len(rows) > 1 or layer not in captured:
            existing = captured.get(layer)
            captured[layer] = rows if existing is None else torch.cat([existing, rows], dim=0)
            return
        buffer = self._buffers.setdefault(request_id, {}).setdefault(layer, [])
        buffer.append(rows)
        if len(buffer) >= self._flush_every:
            self._flush(request_id, layer)

    def _flush(self, request_id: str, layer: int) -> None:
        buffer = self._buffers[request_id][layer]
        if buffer:
            self._captured[request_id][layer] = torch.cat([self._captured[request_id][layer], *buffer], dim=0)
            buffer.clear()
