"""What benchmarks ask of vLLM's workers, whichever class they are: vLLM mixes it in (`worker_extension_cls`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

EXTENSION = f"{__name__}.WorkerExtension"
"""What vLLM is told."""


class WorkerExtension:
    """Methods for `collective_rpc`; in stock vLLM as in ours, so that they are no difference."""

    def bench_synchronise(self) -> None:
        """Wait until the device has done all that it was given."""
        worker: Any = self
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)

    def bench_profile(self, folder: str) -> None:
        """Begin to trace this worker; or end it, and write the trace to a folder (empty: begin)."""
        worker: Any = self
        if not folder:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if worker.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            worker._bench_profiler = torch.profiler.profile(activities=activities)  # noqa: SLF001 - its own name
            worker._bench_profiler.start()  # noqa: SLF001 - see above
            return
        worker._bench_profiler.stop()  # noqa: SLF001 - see above
        Path(folder).mkdir(parents=True, exist_ok=True)
        worker._bench_profiler.export_chrome_trace(str(Path(folder, f"rank{worker.rank}.json.gz")))  # noqa: SLF001
