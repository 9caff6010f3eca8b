"""The methods that benchmarks call in vLLM's workers. vLLM mixes them into any worker (`worker_extension_cls`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

EXTENSION = f"{__name__}.WorkerExtension"
"""The value of vLLM's `worker_extension_cls`."""


class WorkerExtension:
    """Methods for `collective_rpc`. Stock and tapped workers have them alike, so they do not affect a comparison."""

    def bench_synchronise(self) -> None:
        """Wait until the device is idle."""
        worker: Any = self
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)

    def bench_profile(self, folder: str) -> None:
        """Begin to trace this worker if `folder` is empty; otherwise end the trace and write it to the folder."""
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
