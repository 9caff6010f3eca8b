"""A vLLM worker with taps: the mixin for vLLM's worker classes on every device.

The inference service calls its methods by name, through vLLM's `collective_rpc`. Their names start with `residuum_`.
They never raise; see `_answered`.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import vllm
from vllm.distributed.parallel_state import get_pp_group

from inference_svc.logs import configure_worker_logs
from inference_svc.taps import op
from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.encodings.sae_cache import WantedSAE
from inference_svc.taps.errors import UnsupportedEngineError
from inference_svc.taps.model import insertion
from inference_svc.taps.model.hooked_runs import CannotTapError
from inference_svc.taps.model.logits_check import most_likely
from inference_svc.taps.plan import Operation, RequestPlan
from inference_svc.taps.points import RowShape
from inference_svc.taps.ring_writer import ModelRows
from inference_svc.taps.steps.capturing_ranks import CapturingRanks
from inference_svc.taps.steps.runtimes import TapRuntimes
from inference_svc.taps.vllm.capture_path import CapturePath, points_of
from inference_svc.taps.vllm.eager_runs import EagerRuns
from inference_svc.taps.vllm.layers import norms, tensor_parallel
from inference_svc.taps.vllm.layers.attention import attention_of
from inference_svc.taps.vllm.limits import refuse_unsupported
from inference_svc.taps.vllm.missing_names import IncompatibleEngineError
from inference_svc.taps.vllm.runners import runner_v1, runner_v2
from inference_svc.taps.vllm.watchdog import end_with
from svc_common.logs import get_logger
from svc_common.machine import machine_id

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

_SHUTDOWN_SECONDS = 2.0
"""How long a worker that shuts down waits until the stores have its rows. vLLM gives its processes a few seconds, but
`vllm serve` without `--shutdown-timeout` kills them at once."""


_log = get_logger(__name__)


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


def _plan_of(request: Any) -> RequestPlan | None:
    """Return the plan of a request that vLLM's scheduler reports as new; None if it has none."""
    parameters = request.sampling_params  # None for a request that generates nothing
    return RequestPlan.from_extra_args(parameters.extra_args) if parameters else None


class TappedWorker:
    """A mixin for vLLM's worker classes. It puts the taps into the loaded model and drives them in each step."""

    _has_computed = False
    """Whether the model has computed a step that is not finished."""

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
        self._finish_step()  # the last one, if it is not finished
        taps = self._residuum
        taps.runtime.begin_step(
            scheduler_output.finished_req_ids,
            [(request.req_id, _plan_of(request)) for request in scheduler_output.scheduled_new_reqs],
            scheduler_output.preempted_req_ids or (),
        )
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        taps.runtime.send_scores()
        self._has_computed = True  # not if the step failed: its rows may be wrong
        if output is not None or not self._may_run_ahead():
            self._finish_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the step's tokens, and then finish the step, unless `execute_model` has done so.

        The device may do copies to the host in the order in which they were started. So the tokens, for which the
        engine waits, come first, and the step's rows after them.

        A later pipeline stage finishes the step when the next one begins. The engine has the tokens by then, and the
        stage would have to wait for the one before it anyway. After the last step of a request, vLLM always begins one
        that reports its end. Only while the engine is paused with open requests do rows wait for it to go on.
        """
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if not self._residuum.is_later_stage:
            self._finish_step()
        return output

    def _may_run_ahead(self) -> bool:
        """Return whether the next step may start before the host has the tokens: asynchronous scheduling.

        Otherwise `sample_tokens` waits for the tokens, and the step is better finished while the device computes.
        """
        return bool(self.vllm_config.scheduler_config.async_scheduling)  # type: ignore[attr-defined]

    def _finish_step(self) -> None:
        if self._has_computed:
            self._has_computed = False
            self._residuum.runtime.finish_step()

    def execute_dummy_batch(self) -> None:
        """Run the model without requests, and without the taps, which would repeat what they did in the last step.

        With data parallelism, an idle replica of a mixture of experts takes part in the steps of the others.
        """
        self._finish_step()
        self._residuum.runtime.pass_through()
        super().execute_dummy_batch()  # type: ignore[misc]

    def shutdown(self) -> None:
        """Wait a little until the stores have all rows, and shut down. vLLM ends this process next."""
        taps = getattr(self, "_residuum", None)
        try:
            if taps is not None and not taps.path.drain(_SHUTDOWN_SECONDS):
                _log.warning("not all captured rows have reached their stores; their captures may end INCOMPLETE")
        finally:
            super().shutdown()  # type: ignore[misc]

    @_answered
    def residuum_describe(self) -> dict[str, Any]:
        """Return the description of this rank's taps, as plain data."""
        return self._residuum.describe()

    @_answered
    def residuum_load_vectors(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Write vectors into rows of the vector banks; see `CapturePath.load_vectors`."""
        self._residuum.path.load_vectors(rows)

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
    def residuum_keep_signs(self, projections: Sequence[tuple[int, int, bool]], owner: int) -> list[bool | str]:
        """Keep the signs of projections; see `BlockSink.keep_signs`. A rank that does not capture needs none."""
        return self._residuum.path.keep_signs(projections, owner)

    @_answered
    def residuum_keep_saes(self, wanted: Sequence[tuple[str, bytes, str, int]]) -> list[bool | str]:
        """Keep encoders of sparse autoencoders, as the fields of `WantedSAE`; see `SAECache.keep`."""
        return self._residuum.path.keep_saes([WantedSAE(*item) for item in wanted])

    @_answered
    def residuum_forget(self, names: Sequence[str]) -> None:
        """Drop steering changes of requests that will never start."""
        self._residuum.runtime.forget(names)

    @_answered
    def residuum_take_probe(self, capture_id: str) -> list[tuple[list[tuple[int, int]], list[int], bytes]]:
        """Return the blocks of the self-test's capture as (units, positions, values).

        A unit is a (site, layer). The values are the bytes of float32 [units, positions, width].
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
    def residuum_unembed(self, rows: bytes, num_top: int, tokens: Sequence[int]) -> tuple[bytes, ...] | None:
        """Return the tokens that rows of the residual stream predict; None on ranks that compute no logits.

        Args:
            rows: The bytes of float32 [rows, hidden].
            num_top: How many of the most likely tokens to return: k.
            tokens: A token for each row, or none.

        Returns:
            The bytes of: the most likely tokens, int64 [rows, k]; their log-probabilities, float32 [rows, k]; those of
            `tokens`, float32 [tokens]; and the ranks of these, int64 [tokens].
        """
        return self._residuum.unembed(rows, num_top, tokens)

    @_answered
    def residuum_map_rows(self, rows: bytes, name: str) -> bytes | None:
        """Return what an encoder without activation makes of rows; None on all ranks but the first of each stage.

        Args:
            rows: The bytes of float32 [rows, hidden].
            name: The encoder's name; see `WantedSAE`.

        Returns:
            The bytes of float32 [rows, features].
        """
        return self._residuum.map_rows(rows, name)

    @_answered
    def residuum_drain(self, timeout_seconds: float) -> bool:
        """Wait until the stores have acknowledged every captured row, and return whether they have.

        Returns False at once while a request is open: its last rows leave in a later step, and steps wait for this
        call.
        """
        taps = self._residuum
        if taps.runtime.open_requests:
            return False
        return taps.path.drain(timeout_seconds)


class _Taps:
    """All parts of the taps in one worker."""

    def __init__(self, worker: Any) -> None:
        settings = json.loads(os.environ[SETTINGS_VARIABLE])
        is_near = settings["machine"] == machine_id()
        end_with({os.getppid(), settings["service_pid"]} if is_near else {os.getppid()})
        config = worker.vllm_config
        runner = worker.model_runner
        refuse_unsupported(config)
        num_layers = config.model_config.get_total_num_hidden_layers()
        layers = insertion.find_decoder_layers(runner.get_model(), num_layers)
        self._sites = tuple(settings["sites"])
        hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        self._rank = worker.rank
        self._device = worker.device
        self._pipeline_rank = get_pp_group().rank_in_group
        self.eager_runs = EagerRuns(worker, layers)
        structure = self.eager_runs.observe(self._sites)
        shape_of = functools.partial(tensor_parallel.shape_of, config)
        shapes = insertion.row_shapes(layers, structure, self._sites, shape_of)
        self._site_layers = insertion.layers_of_sites(layers, structure, self._sites)
        points = points_of(min(layers), len(layers), shapes)
        self._points = points.groups[0]
        self._widths = [shapes[site].whole if site in shapes else hidden for site in self._sites]
        self._steering_sites = insertion.steering_sites(self._sites, structure, shapes)
        self._attention = [attention_of(layers[index], config) for index in sorted(layers)]
        self._format = ModelRows(hidden, WIRE_TYPES[dtype])
        group_shapes = [RowShape(hidden), *(shapes[group.inner[0]] for group in points.groups[1:])]
        places = dict(zip(self._sites, self._site_layers, strict=True))
        self.path = CapturePath(
            config, worker.device, points, group_shapes, places, settings["bank_rows"], settings["sae_bytes"]
        )
        scores, self._score_board = None, ""
        self._tensor_rank = tensor_parallel.own_rank()
        capturing = tensor_parallel.capturing_ranks()
        if self._tensor_rank in capturing:
            replica = config.parallel_config.data_parallel_index  # ranks are numbered within a replica
            self._control_path = os.path.join(settings["control_dir"], f"replica{replica}-rank{self._rank}.sock")  # noqa: PTH118
            # Without a store, only the self-test captures, and its rows stay here.
            ring_bytes = settings["ring_bytes"] // len(capturing)
            self.path.make_ring(self._control_path, ring_bytes, settings["stores"] or [""])
            # vLLM returns the tokens of the first rank, so only its scores are there before the tokens.
            self._score_board = settings["score_board"] if self._tensor_rank == 0 else ""
            if self._score_board:
                scores = self.path.make_scores(self._score_board)
        taps, self._table_bytes = self.path.make_taps()
        ranks = CapturingRanks(capturing, self._tensor_rank) if tensor_parallel.num_ranks() > 1 else None
        self.runtime = TapRuntimes(self.path.runtimes(taps, tensor_parallel.join, ranks), scores, ranks)
        op.install(taps, points.firsts)
        folds = settings["fold_norms"] if settings["fold_norms"] is not None else worker.device.type == "cuda"
        self._folded = insertion.put_taps(
            layers, points, structure, self._sites, lambda norm, point: folds and _fold(norm, point, dtype)
        )
        adapter = runner_v2 if worker.use_v2_model_runner else runner_v1
        adapter.attach(runner, self.runtime.place, vllm.__version__)

    @property
    def is_later_stage(self) -> bool:
        """Whether the worker belongs to a pipeline stage that gets its input from another."""
        return bool(self._pipeline_rank)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the taps take for as long as the worker runs."""
        return (
            self.path.pool_bytes
            + self._table_bytes
            + self.path.bank_bytes
            + self.path.sink_bytes
            + self.path.score_bytes
            + self.path.sae_bytes
        )

    def describe(self) -> dict[str, Any]:
        """See `TappedWorker.residuum_describe`."""
        producer = self.path.producer
        return {
            "rank": self._rank,
            "tensor_rank": self._tensor_rank,
            "machine": machine_id(),
            "pipeline_rank": self._pipeline_rank,
            "first_layer": self._points.first_layer,
            "num_layers": self._points.num_layers,
            "sites": list(self._sites),
            "site_widths": self._widths if set(self._widths) != {self._format.hidden} else [],
            "site_layers": self._site_layers,
            "steering_sites": self._steering_sites,
            "attention": self._attention,
            "folded_norms": self._folded,
            "hidden": self._format.hidden,
            "dtype": int(self._format.dtype),
            "captures": producer is not None,
            "pool_bytes": self.path.pool_bytes,
            "table_bytes": self.device_bytes - self.path.pool_bytes,
            "ring_bytes": producer.ring_bytes if producer else 0,
            "control_path": self._control_path if producer else "",
            "score_board": self._score_board,
        }

    def take_probe(self, capture_id: str) -> list[tuple[list[tuple[int, int]], list[int], bytes]]:
        """See `TappedWorker.residuum_take_probe`."""
        return [
            (
                [(int(site), layer) for site, layers in probe.capture.places for layer in layers],
                probe.positions,
                probe.rows.float().cpu().numpy().tobytes(),
            )
            for probe in self.path.take_probe(capture_id)
        ]

    def explain_logits(self, rows: bytes, tokens: Sequence[int]) -> tuple[float, float] | None:
        """See `TappedWorker.residuum_explain_logits`."""
        self.runtime.pass_through()
        values = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(len(tokens), -1)
        return self.eager_runs.explain(values.to(self._device), tokens)

    def unembed(self, rows: bytes, num_top: int, tokens: Sequence[int]) -> tuple[bytes, ...] | None:
        """See `TappedWorker.residuum_unembed`."""
        self.runtime.pass_through()
        values = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(-1, self._format.hidden)
        logits = self.eager_runs.logits(values.to(self._device))
        if logits is None:
            return None
        return tuple(part.cpu().numpy().tobytes() for part in most_likely(logits, num_top, tokens))

    def map_rows(self, rows: bytes, name: str) -> bytes | None:
        """See `TappedWorker.residuum_map_rows`."""
        encoder = self.path.sae(name)
        if encoder is None or self._tensor_rank:  # the first rank's answer is enough
            return None
        values = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(-1, self._format.hidden).to(self._device)
        with torch.inference_mode():
            mapped: bytes = encoder.outputs(values).cpu().numpy().tobytes()
            return mapped


def _fold(norm: nn.Module, point: int, dtype: torch.dtype) -> bool:
    if not norms.can_fold(norm, dtype):
        return False
    norms.fold(norm, point)
    return True
