"""A vLLM worker with taps: what is added to vLLM's own worker class, whatever the device.

vLLM names the methods that the inference service may call by `collective_rpc`; ours start with `residuum_`.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from inference_svc.logs import configure_worker_logs
from inference_svc.shipping.producer import RingProducer
from inference_svc.taps import model as model_taps
from inference_svc.taps import op, runner_v1, runner_v2
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu import CpuTap
from inference_svc.taps.limits import refuse_unsupported
from inference_svc.taps.runtime import TapRuntime
from inference_svc.taps.sink import BlockSink, RowFormat
from inference_svc.taps.watchdog import end_with
from residuum.v1 import tensor_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTINGS_VARIABLE = "RESIDUUM_WORKER_SETTINGS"
"""The environment variable that carries `WorkerSettings` to the workers.

Not vLLM's `additional_config`: that is part of the compile cache's key, and these change with every start."""

_DTYPES = {
    torch.float32: tensor_pb2.DATA_TYPE_FLOAT32,
    torch.float16: tensor_pb2.DATA_TYPE_FLOAT16,
    torch.bfloat16: tensor_pb2.DATA_TYPE_BFLOAT16,
}


_PROBE_SECONDS = 30.0

_STEPS_LEAVING = 1
"""Steps whose blocks a GPU copies out while the next one runs."""


class TappedWorker:
    """Mixed into vLLM's worker class: hooks the model when it is loaded, and follows each step."""

    def load_model(self, **options: Any) -> None:
        """Load the model, then hook it, before vLLM's first run traces it."""
        super().load_model(**options)  # type: ignore[misc]
        configure_worker_logs()
        worker: Any = self
        self._residuum = _Taps(worker)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step with the taps around it."""
        taps = self._residuum
        taps.runtime.begin_step(
            scheduler_output.finished_req_ids,
            [
                (request.req_id, request.sampling_params.extra_args if request.sampling_params else None)
                for request in scheduler_output.scheduled_new_reqs
            ],
        )
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        taps.runtime.finish_step()  # not after a failure: then no row of the step can be trusted
        return output

    def residuum_describe(self) -> dict[str, Any]:
        """Return what this rank taps."""
        return self._residuum.describe()

    def residuum_load_vectors(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Write vectors into rows of the bank; see `VectorBank.load`."""
        self._residuum.bank.load(rows)

    def residuum_take_probe(self, capture_id: str) -> list[tuple[list[int], list[int], bytes]]:
        """Return the rows of a self-test: (layers, positions, float32 values [layers, positions, hidden]) a block."""
        return self._residuum.take_probe(capture_id)

    def residuum_drain(self, timeout_seconds: float) -> bool:
        """Wait until everything that was captured is acknowledged; tell whether it is.

        Tells False at once while a request is open: its last rows leave in a step, and steps wait for this call.
        """
        taps = self._residuum
        if taps.runtime.open_requests:
            return False
        return taps.drain(timeout_seconds)


class _Taps:
    """Everything that is added to one worker."""

    def __init__(self, worker: Any) -> None:
        settings = json.loads(os.environ[SETTINGS_VARIABLE])
        end_with({settings["service_pid"], os.getppid()})
        config = worker.vllm_config
        runner = worker.model_runner
        refuse_unsupported(config)
        num_layers = config.model_config.get_total_num_hidden_layers()
        layers = model_taps.find_decoder_layers(runner.get_model(), num_layers)
        self._format = RowFormat(
            first_layer=min(layers),
            num_layers=len(layers),
            hidden=config.model_config.get_hidden_size(),
            dtype=_DTYPES[config.model_config.dtype],
        )
        self._rank = worker.rank
        self._pipeline_rank = get_pp_group().rank_in_group
        self.bank = VectorBank(settings["bank_rows"], self._format.hidden, worker.device)
        captures = get_tp_group().rank_in_group == 0
        self.pool = self._make_pool(config, worker.device) if captures else None
        self.producer = self._make_producer(settings, self.pool) if self.pool else None
        self._sink = self._make_sink(worker.device) if self.pool and self.producer else None
        tap = self._make_tap(config, worker.device)
        self.runtime = TapRuntime(tap, self.pool, self._sink)
        op.install(tap)
        model_taps.hook_layers(layers)
        adapter = runner_v2 if worker.use_v2_model_runner else runner_v1
        adapter.attach(runner, self.runtime.place, vllm.__version__)

    def describe(self) -> dict[str, Any]:
        """Return what this rank taps, as plain data."""
        return {
            "rank": self._rank,
            "pipeline_rank": self._pipeline_rank,
            "first_layer": self._format.first_layer,
            "num_layers": self._format.num_layers,
            "hidden": self._format.hidden,
            "dtype": int(self._format.dtype),
            "captures": self._sink is not None,
            "pool_bytes": self.pool.nbytes if self.pool else 0,
            "ring_bytes": self._ring_bytes if self.producer else 0,
            "control_path": self._control_path if self.producer else "",
        }

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until every row that left a request is acknowledged; tell whether it is."""
        if self._sink is None or self.producer is None:
            return True
        deadline = time.monotonic() + timeout_seconds
        return self._sink.flush(timeout_seconds) and self.producer.drain(max(deadline - time.monotonic(), 0.0))

    def take_probe(self, capture_id: str) -> list[tuple[list[int], list[int], bytes]]:
        """See `TappedWorker.residuum_take_probe`."""
        if self._sink is None:
            return []
        self._sink.flush(_PROBE_SECONDS)
        first, count = self._format.first_layer, self._format.num_layers
        return [
            (list(range(first, first + count)), positions, rows.float().cpu().numpy().tobytes())
            for positions, rows in self._sink.take_probe(capture_id)
        ]

    def _make_pool(self, config: Any, device: torch.device) -> BlockPool:
        scheduler = config.scheduler_config
        leaving = _STEPS_LEAVING if device.type == "cuda" else 0
        blocks = BlockPool.blocks_needed(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, leaving)
        return BlockPool(blocks, self._format.num_layers, self._format.hidden, config.model_config.dtype, device)

    def _make_sink(self, device: torch.device) -> BlockSink:
        assert self.pool is not None  # noqa: S101 - asked only where rows are captured
        assert self.producer is not None  # noqa: S101 - see above
        if device.type == "cuda":
            from inference_svc.taps.streamed_sink import StreamedSink

            return StreamedSink(self.pool, self._format, self.producer)
        return BlockSink(self.pool, self._format, self.producer)

    def _make_tap(self, config: Any, device: torch.device) -> Any:
        layers = range(self._format.first_layer, self._format.first_layer + self._format.num_layers)
        if device.type == "cuda":
            from inference_svc.taps.cuda import CudaTap  # Triton is there on GPU machines alone

            sizes = config.compilation_config.cudagraph_capture_sizes or [0]
            return CudaTap(self.bank, self.pool, layers, max(config.scheduler_config.max_num_batched_tokens, *sizes, 1))
        return CpuTap(self.bank, self.pool, layers.start)

    def _make_producer(self, settings: dict[str, Any], pool: BlockPool) -> RingProducer:
        slots = max(2, settings["ring_bytes"] // pool.block_bytes)
        self._ring_bytes = slots * pool.block_bytes
        self._control_path = os.path.join(settings["control_dir"], f"rank{self._rank}.sock")  # noqa: PTH118
        producer = RingProducer(self._control_path, num_slots=slots, slot_bytes=pool.block_bytes)
        producer.start()
        return producer
