"""vLLM leaves the taps' memory out of the KV cache. Here its own code measures a simulated GPU."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker

from inference_svc.taps.vllm import worker as tapped_worker
from inference_svc.taps.vllm.gpu_worker import TappedGpuWorker

GIB = 1 << 30
TOTAL, USABLE = 80 * GIB, 72 * GIB
CONTEXT, WEIGHTS, BLOCKS, TABLES, ROOM, ACTIVATIONS = (size * GIB for size in (1, 20, 10, 2, 3, 4))
DEVICE = torch.device("cuda:0")


class Memory:
    """Allocated memory, until it is deleted."""

    def __init__(self, nbytes):
        self.nbytes = nbytes


class Gpu:
    """The memory of a GPU, as torch's allocator reports it. It keeps freed memory until its cache is emptied."""

    def __init__(self):
        self.allocated = self.peak = self.reserved = 0

    def allocate(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        memory = Memory(size)
        weakref.finalize(memory, self.free, size)
        return memory

    def free(self, size):
        self.allocated -= size

    def stats(self, device=None):
        return {"allocated_bytes.all.peak": self.peak, "allocated_bytes.all.current": self.allocated}

    def reset_peak(self, device=None):
        self.peak = self.allocated

    def empty_cache(self):
        self.reserved = self.allocated


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    for name, function in {
        "memory_stats": gpu.stats,
        "get_memory_info": lambda device=None: (TOTAL - CONTEXT - gpu.reserved, TOTAL),
        "memory_reserved": lambda device=None: gpu.reserved,
        "reset_peak_memory_stats": gpu.reset_peak,
        "empty_cache": gpu.empty_cache,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    monkeypatch.setattr(gpu_worker.Worker, "__del__", lambda self: None, raising=False)
    return gpu


class Runner:
    """A model runner that allocates."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.model_memory_usage = 0

    def load(self):
        self.weights = self.gpu.allocate(WEIGHTS)
        self.model_memory_usage = WEIGHTS

    def profile_run(self, **options):
        self.gpu.allocate(ACTIVATIONS)  # and free them


class Taps:
    """Taps that allocate what real ones do; the sizes are their own."""

    device_bytes = BLOCKS + TABLES

    def __init__(self, worker):
        gpu = worker.model_runner.gpu
        self.memory = [gpu.allocate(BLOCKS), gpu.allocate(TABLES)]
        self.path = SimpleNamespace(room_for_encoding=lambda: gpu.allocate(ROOM))


@pytest.fixture
def worker(gpu, monkeypatch):
    """A worker whose model is not loaded yet."""
    monkeypatch.setattr(tapped_worker, "_Taps", Taps)
    monkeypatch.setattr(tapped_worker, "configure_worker_logs", lambda: None)  # other tests of this process read logs
    monkeypatch.setattr(gpu_worker.Worker, "load_model", lambda self, **options: self.model_runner.load())
    worker = object.__new__(TappedGpuWorker)
    worker.vllm_config = VllmConfig()
    for name in ("cache_config", "parallel_config", "compilation_config"):
        setattr(worker, name, getattr(worker.vllm_config, name))
    worker.model_config = SimpleNamespace(multimodal_config=None)
    worker.device, worker.requested_memory = DEVICE, USABLE
    worker.init_snapshot = MemorySnapshot(device=DEVICE)
    worker.model_runner = Runner(gpu)
    return worker


def test_the_kv_cache_leaves_the_taps_memory_free(worker, gpu):
    worker.load_model()
    assert worker.determine_available_memory() == USABLE - WEIGHTS - BLOCKS - TABLES - ROOM - ACTIVATIONS
    assert gpu.allocated == gpu.reserved == WEIGHTS + BLOCKS + TABLES, "the room for signs is free again"
    assert worker.model_runner.model_memory_usage == WEIGHTS + BLOCKS + TABLES


def test_a_rank_that_captures_nothing_needs_no_room_for_signs(worker):
    worker.load_model()
    worker._residuum.path.room_for_encoding = lambda: None
    assert worker.determine_available_memory() == USABLE - WEIGHTS - BLOCKS - TABLES - ACTIVATIONS
