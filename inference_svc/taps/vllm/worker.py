"""A vLLM worker with taps: the mixin for vLLM's worker classes on every device.

The inference service calls its methods by name, through vLLM's `collective_rpc`. Their names start with `residuum_`.
They never raise; see `_answered`.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from inference_svc.logs import configure_worker_logs
from inference_svc.shipping.worker.allotment import least_ring_bytes, reserve_bytes
from inference_svc.shipping.worker.producer import RingProducer
from inference_svc.taps import op
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.encodings.signs import max_sign_bytes
from inference_svc.taps.model import insertion
from inference_svc.taps.model.hooked_runs import CannotTapError
from inference_svc.taps.plan import Operation
from inference_svc.taps.points import TapPoints
from inference_svc.taps.ring_writer import ModelRows
from inference_svc.taps.sink import BlockSink
from inference_svc.taps.steps.runtime import TapRuntime
from inference_svc.taps.vllm import norms, runner_v1, runner_v2
from inference_svc.taps.vllm.eager_runs import EagerRuns
from inference_svc.taps.vllm.limits import UnsupportedEngineError, refuse_unsupported
from inference_svc.taps.vllm.missing_names import IncompatibleEngineError
from inference_svc.taps.vllm.watchdog import end_with
from residuum.wire.limits import BLOCK_TOKENS, MAX_PROJECTION_VECTORS
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

_T = TypeVar("_T")

REFUSAL_FILE = "refused"
"""The file, in the folder of the control sockets, in which a worker writes why the taps refused to start."""

SETTINGS_VARIABLE = "RESIDUUM_WORKER_SETTINGS"
"""The environment variable that carries the settings to the workers; see `engine.worker_settings`.

vLLM's `additional_config` does not serve: it is part of the compile cache's key, and these settings change with every
start."""


_log = get_logger(__name__)

_PROBE_SECONDS = 30.0

_STEPS_LEAVING = 1
"""On a GPU, how many steps' blocks may still be leaving the device while the next step runs."""

_BLOCKS_IN_RING = 8
"""How many blocks of the largest size fit the ring: some are written while others are sent."""

_LARGEST_BLOCK_BYTES = 128 << 20
"""Limit for a block with more than 32 positions. A larger block saves no time, and its rows would arrive later."""


def _answered(method: Callable[..., _T]) -> Callable[..., _T | str]:
    """Make a method return its error as a text instead of raising it; see `engine.ranks.check_answers`.

    vLLM's executor stops reading at the first rank that raised. The answers of the ranks after it would stay in their
    queues, and vLLM would take them for the answers to its next calls, steps included.
    """

    @functools.wraps(method)
    def call(worker: Any, *arguments: Any) -> _T | str:
        try:
            return method(worker, *arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank has to answer
            _log.exception("a call of the service failed in this worker", method=method.__name__)
            return f"{type(error).__name__}: {error}"

    return call


class TappedWorker:
    """A mixin for vLLM's worker classes. It puts the taps into the loaded model and drives them in each step."""

    def load_model(self, **options: Any) -> None:
        """Load the model and put the taps into it, before vLLM's first run traces it."""
        super().load_model(**options)  # type: ignore[misc]
        configure_worker_logs()
        worker: Any = self
        try:
            self._residuum = _Taps(worker)
        except (CannotTapError, UnsupportedEngineError, IncompatibleEngineError) as error:
            folder = json.loads(os.environ[SETTINGS_VARIABLE])["control_dir"]
            Path(folder, REFUSAL_FILE).write_text(str(error))
            raise

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
        taps.runtime.finish_step()  # skipped if the step failed: its rows may be wrong
        return output

    def execute_dummy_batch(self) -> None:
        """Run the model without requests, and without the taps, which would repeat what they did in the last step.

        With data parallelism, an idle replica of a mixture of experts takes part in the steps of the others.
        """
        self._residuum.runtime.pass_through()
        super().execute_dummy_batch()  # type: ignore[misc]

    @_answered
    def residuum_describe(self) -> dict[str, Any]:
        """Return the description of this rank's taps, as plain data."""
        return self._residuum.describe()

    @_answered
    def residuum_load_vectors(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Write vectors into rows of the vector bank; see `VectorBank.load`."""
        self._residuum.bank.load(rows)

    @_answered
    def residuum_change_steering(self, changes: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, int | None]:
        """Replace the operations of requests; see `TapRuntime.change_steering`.

        Args:
            changes: The new operations of each request, by name, as plain data (see `Operation.to_data`).

        Returns:
            For each request, the first position with the new operations; None if the request has ended.
        """
        runtime = self._residuum.runtime
        return {
            name: runtime.change_steering(name, tuple(Operation.from_data(item) for item in operations))
            for name, operations in changes.items()
        }

    @_answered
    def residuum_keep_signs(self, projections: Sequence[tuple[int, int, bool]]) -> list[bool | str]:
        """Keep the signs of projections; see `BlockSink.keep_signs`. A rank that does not capture needs none."""
        return self._residuum.keep_signs(projections)

    @_answered
    def residuum_forget(self, names: Sequence[str]) -> None:
        """Drop steering changes of requests that will never start."""
        self._residuum.runtime.forget(names)

    @_answered
    def residuum_take_probe(self, capture_id: str) -> list[tuple[list[int], list[int], list[int], bytes]]:
        """Return the blocks of the self-test's capture as (sites, layers, positions, values).

        The values are the bytes of float32 [sites, layers, positions, hidden].
        """
        return self._residuum.take_probe(capture_id)

    @_answered
    def residuum_listen_to_logits(self) -> None:
        """Record the inputs of the unembedding from now on, for `residuum_explain_logits`."""
        self._residuum.eager_runs.listen()

    @_answered
    def residuum_explain_logits(self, rows: bytes, tokens: Sequence[int]) -> tuple[float, float] | None:
        """Compare the self-test's served tokens with those that its captured rows predict.

        Args:
            rows: The last layer's `resid_post` at the positions before each token, the bytes of float32 [tokens,
                hidden].
            tokens: The served token IDs.

        Returns:
            The fields of an `Explanation`; None on ranks that compute no logits.
        """
        return self._residuum.explain_logits(rows, tokens)

    @_answered
    def residuum_drain(self, timeout_seconds: float) -> bool:
        """Wait until the stores have acknowledged every captured row, and return whether they have.

        Returns False at once while a request is open: its last rows leave in a later step, and steps wait for this
        call.
        """
        taps = self._residuum
        if taps.runtime.open_requests:
            return False
        return taps.drain(timeout_seconds)


class _Taps:
    """All parts of the taps in one worker."""

    def __init__(self, worker: Any) -> None:
        settings = json.loads(os.environ[SETTINGS_VARIABLE])
        end_with({settings["service_pid"], os.getppid()})
        config = worker.vllm_config
        runner = worker.model_runner
        refuse_unsupported(config)
        num_layers = config.model_config.get_total_num_hidden_layers()
        layers = insertion.find_decoder_layers(runner.get_model(), num_layers)
        points = TapPoints(min(layers), len(layers))
        self._points = points
        self._sites = tuple(settings["sites"])
        hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        self._rank = worker.rank
        self._device = worker.device
        self._pipeline_rank = get_pp_group().rank_in_group
        self.bank = VectorBank(settings["bank_rows"], hidden, worker.device)
        self._format = ModelRows(hidden, WIRE_TYPES[dtype])
        self.pool: BlockPool | None = None
        self.producer: RingProducer | None = None
        self._sink: BlockSink | None = None
        if get_tp_group().rank_in_group == 0:
            self._make_capture_path(settings, config, worker.device)
        tap = self._make_tap(config, worker.device)
        self._table_bytes = tap.nbytes
        self.runtime = TapRuntime(points, tap, self.pool, self._sink)
        self.eager_runs = EagerRuns(worker, layers)
        structure = self.eager_runs.observe(self._sites)
        op.install(tap)
        folds = settings["fold_norms"] if settings["fold_norms"] is not None else worker.device.type == "cuda"
        self._folded = insertion.put_taps(
            layers, points, structure, self._sites, lambda norm, point: folds and _fold(norm, point, dtype)
        )
        adapter = runner_v2 if worker.use_v2_model_runner else runner_v1
        adapter.attach(runner, self.runtime.place, vllm.__version__)

    def describe(self) -> dict[str, Any]:
        """See `TappedWorker.residuum_describe`."""
        return {
            "rank": self._rank,
            "pipeline_rank": self._pipeline_rank,
            "first_layer": self._points.first_layer,
            "num_layers": self._points.num_layers,
            "sites": list(self._sites),
            "folded_norms": self._folded,
            "hidden": self._format.hidden,
            "dtype": int(self._format.dtype),
            "captures": self._sink is not None,
            "pool_bytes": self.pool.nbytes if self.pool else 0,
            "table_bytes": self._table_bytes + self.bank.nbytes + (self._sink.nbytes if self._sink else 0),
            "ring_bytes": self.producer.ring_bytes if self.producer else 0,
            "control_path": self._control_path if self.producer else "",
        }

    def room_for_signs(self) -> torch.Tensor | None:
        """Allocate as much device memory as the signs of random projections may take; None if this rank needs none."""
        if self._sink is None:
            return None
        return torch.empty(max_sign_bytes(self._format.hidden), dtype=torch.uint8, device=self._device)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until every sent row is acknowledged, and return whether it is."""
        if self._sink is None or self.producer is None:
            return True
        deadline = time.monotonic() + timeout_seconds
        return self._sink.flush(timeout_seconds) and self.producer.drain(max(deadline - time.monotonic(), 0.0))

    def keep_signs(self, projections: Sequence[tuple[int, int, bool]]) -> list[bool | str]:
        """See `TappedWorker.residuum_keep_signs`."""
        return [True] * len(projections) if self._sink is None else self._sink.keep_signs(projections)

    def take_probe(self, capture_id: str) -> list[tuple[list[int], list[int], list[int], bytes]]:
        """See `TappedWorker.residuum_take_probe`."""
        if self._sink is None:
            return []
        self._sink.flush(_PROBE_SECONDS)
        return [
            (
                [int(site) for site in probe.capture.sites],
                list(probe.capture.layers),
                probe.positions,
                probe.rows.float().cpu().numpy().tobytes(),
            )
            for probe in self._sink.take_probe(capture_id)
        ]

    def explain_logits(self, rows: bytes, tokens: Sequence[int]) -> tuple[float, float] | None:
        """See `TappedWorker.residuum_explain_logits`."""
        self.runtime.pass_through()
        values = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(len(tokens), -1)
        return self.eager_runs.explain(values.to(self._device), tokens)

    def _make_capture_path(self, settings: dict[str, Any], config: Any, device: torch.device) -> None:
        """Allocate the block pool and the ring, and make the sink that moves rows from one to the other."""
        scheduler = config.scheduler_config
        row_bytes = self._format.hidden * config.model_config.dtype.itemsize
        units = self._points.num_layers * len(self._sites)
        smallest_block = BLOCK_TOKENS * units * row_bytes
        # Encoding can make rows longer: twice as long, or even more if rows of a narrow model are projected to many
        # vectors. Each store's reserve must hold an encoded block of the smallest size.
        growth = max(2, -(-4 * MAX_PROJECTION_VECTORS // row_bytes))
        stores = settings["stores"] or [""]  # without a store, only the self-test captures, and its rows stay here
        ring_bytes = max(settings["ring_bytes"], least_ring_bytes(growth * smallest_block, len(stores)))
        reserve = reserve_bytes(ring_bytes, len(stores)) // growth
        largest = min(ring_bytes // _BLOCKS_IN_RING, reserve, _LARGEST_BLOCK_BYTES)
        leaving = _STEPS_LEAVING if device.type == "cuda" else 0
        rows = BlockPool.rows_needed(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, units, leaving)
        self.pool = BlockPool(
            rows,
            self._format.hidden,
            config.model_config.dtype,
            device,
            largest_block=largest // row_bytes,
        )
        replica = config.parallel_config.data_parallel_index  # ranks are numbered within a replica
        self._control_path = os.path.join(settings["control_dir"], f"replica{replica}-rank{self._rank}.sock")  # noqa: PTH118
        self.producer = RingProducer(self._control_path, ring_bytes=ring_bytes, stores=stores)
        self.producer.start()
        if device.type == "cuda":
            from inference_svc.taps.gpu.streamed_sink import StreamedSink

            self._sink = StreamedSink(self.pool, self._format, self.producer, self.bank)
        else:
            self._sink = BlockSink(self.pool, self._format, self.producer, self.bank)
        self._sink.check_encodings()

    def _make_tap(self, config: Any, device: torch.device) -> Any:
        if device.type == "cuda":
            from inference_svc.taps.gpu.tap import CudaTap  # only GPU installations have Triton

            sizes = config.compilation_config.cudagraph_capture_sizes or [0]
            max_rows = max(config.scheduler_config.max_num_batched_tokens, *sizes, 1)
            return CudaTap(self.bank, self.pool, self._points, max_rows, config.scheduler_config.max_num_seqs)
        return CpuTap(self.bank, self.pool, self._points)


def _fold(norm: nn.Module, point: int, dtype: torch.dtype) -> bool:
    if not norms.can_fold(norm, dtype):
        return False
    norms.fold(norm, point)
    return True
