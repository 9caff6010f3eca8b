"""The two entry points, gRPC and `vllm serve`, with an engine and a store that a test scripts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

import residuum
from inference_svc.captures.store_link import NoAnswerError
from inference_svc.engine.streams import Delta
from inference_svc.parts import Parts
from inference_svc.settings import InferenceSettings
from inference_svc.tap_settings import TapSettings
from inference_svc.taps.plan import RequestPlan
from inference_svc.vllm_serve.front import FrontEnd
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, steering_pb2
from residuum.wire.ids import make_id
from tests.inference.service_support import ADD_JOY, CAPTURE, JOY, FakeEngine, ask, spec, tokenizer

PROMPT = [5, 6, 7]
REQUEST_ID = "r"
DEAD = object()
"""A script's item for the death of the engine."""


class ScriptedStore:
    """Opens captures as `opening` says: "ok", "refused" or "no answer".

    With "later, " before it, after `answers` is set. With "queued, ", too, but it takes rows before. With "early, ", it
    takes them even before it is asked to open the capture.
    """

    def __init__(self, opening):
        self.opening = opening
        self.answers = asyncio.Event()
        self.opened = []
        self.seals = []
        self.completed = []
        self.make_id = make_id

    def takes_early_rows(self, capture_id, *, is_new_id, if_exists):
        return self.opening.startswith("early")

    async def open(self, description, *, is_new_id, if_exists, on_queued):
        assert not is_new_id
        self.opened.append(description)
        when, _, how = self.opening.rpartition(", ")
        if when == "queued":
            on_queued()
        if when:
            await self.answers.wait()
        if how == "refused":
            raise Failure(Reason.ERROR_REASON_STORE_FULL, "scripted")
        if how == "no answer":
            raise NoAnswerError(Reason.ERROR_REASON_STORE_UNREACHABLE, "scripted")

    def seal(self, request, complete):
        self.seals.append(request)
        self.completed.append(asyncio.ensure_future(complete(request)))

    def handle(self, capture_id):
        return inference_pb2.CaptureHandle(capture_id=capture_id)


class HeldBurst:
    """A burst of requests that ends when a test calls `end`."""

    def __init__(self):
        self.callbacks = []
        self.is_over = False
        self.num_ended = 0
        """How many ended requests have waited for it, or wait."""

    def call_after(self, callback):
        self.callbacks.append(callback)
        if self.is_over:
            self.end()

    async def wait_after_end(self):
        self.num_ended += 1

    async def wait_on(self, loop):
        """Note a call from the thread of the stores' client, which is that of the test."""
        assert loop is asyncio.get_running_loop()
        self.num_ended += 1

    def end(self):
        self.is_over = True
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback)


class Face:
    """One entry point. Sequence i generates `scripts[i]`: (token IDs, finish reason), exceptions, or DEAD."""

    def __init__(self, store, num_sequences):
        self.store = store
        self.num_sequences = num_sequences
        self.scripts = [asyncio.Queue() for _ in range(num_sequences)]
        self.handed_on = [[] for _ in range(num_sequences)]
        """The tokens that the caller got."""
        self.error = None
        self.updates = []
        self.burst = HeldBurst()

    def start(self):
        self.consumer = asyncio.create_task(self._consume())

    async def _consume(self):
        try:
            async for output in self.answers():
                self.take(output)
        except Exception as error:  # noqa: BLE001 - the caller's error is the result
            self.error = error

    def abort(self):
        """Abort the request by a call. If the entry point has no such call, the client disconnects."""
        self.consumer.cancel()

    def update(self):
        """Change the steering, if the entry point allows it."""

    def is_clean(self):
        """Whether all resources of the request are released."""
        return not self.registry.running


class GrpcFace(Face):
    gives_up_by = Failure(Reason.ERROR_REASON_INTERNAL, "The engine stopped the request (error).")

    def __init__(self, store, num_sequences):
        super().__init__(store, num_sequences)
        engine = FakeEngine()
        engine.script = self._script
        self.parts = Parts.assemble(engine, InferenceSettings(model="tiny"), store)
        self.parts.vectors.put(JOY)
        self.registry = self.parts.registry
        self.parts.runner._burst = self.burst

    async def _script(self, call):
        index = int(call.engine_id.rpartition("#")[2])
        while True:
            item = await self.scripts[index].get()
            if item is DEAD:
                raise Failure(Reason.ERROR_REASON_ENGINE_DEAD, "The engine has died; the service is stopping.")
            if isinstance(item, Exception):
                raise item
            token_ids, finish_reason = item
            if finish_reason in ("abort", "error"):  # like `engine.stream`
                raise self.gives_up_by
            yield Delta("x", token_ids, finish_reason)
            if finish_reason:
                return

    def answers(self):
        request = ask(spec(REQUEST_ID, CAPTURE, updatable=True), PROMPT, num_sequences=self.num_sequences)
        return self.parts.runner.run(request)

    def take(self, event):
        if event.HasField("delta"):
            self.handed_on[event.delta.sequence] += event.delta.token_ids

    def abort(self):
        self.registry.abort(REQUEST_ID)

    def update(self):
        steering = steering_pb2.SteeringSpec(operations=[ADD_JOY])
        self.updates.append(asyncio.create_task(self.parts.runner.update_steering(REQUEST_ID, steering)))

    def is_clean(self):
        return super().is_clean() and not self.parts.activator.num_active and not self.parts.places.num_taken


RANK = {
    "captures": True, "tensor_rank": 0, "site_widths": [], "site_layers": [[0, 1, 2]],
    "steering_sites": [capture_pb2.SITE_RESID_POST], "attention": [], "first_layer": 0, "pool_bytes": 0,
    "table_bytes": 0, "ring_bytes": 0, "control_path": "", "score_board": "", "folded_norms": 0,
}  # fmt: skip
"""What the only worker says of itself."""


class OpenAIFace(Face):
    def __init__(self, store, num_sequences):
        super().__init__(store, num_sequences)
        model = SimpleNamespace(
            served_model_name="tiny", max_model_len=64, dtype=torch.float32, enforce_eager=True,
            get_total_num_hidden_layers=lambda: 3, get_hidden_size=lambda: 4, get_vocab_size=lambda: 16,
            max_logprobs=20, skip_tokenizer_init=False,
        )  # fmt: skip
        llm = SimpleNamespace(
            errored=False,
            get_tokenizer=tokenizer,
            get_supported_tasks=_nothing,
            input_processor=SimpleNamespace(process_inputs=lambda *arguments, **options: None),
            vllm_config=SimpleNamespace(
                model_config=model,
                parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
                scheduler_config=SimpleNamespace(max_num_seqs=4),
                use_v2_model_runner=False,
            ),
        )
        self.front = FrontEnd(TapSettings(), None, llm, self._generate, index=1, count=1)
        self.front._startup._task.cancel()
        self.front._startup = SimpleNamespace(check=lambda: None, wait=_nothing)
        self.front._delivery = store
        self.front._serve([RANK])
        self.registry = self.front._registry
        self.front._serving.runner._burst = self.burst

    async def _generate(self, prompt, sampling_params, request_id, **options):
        index = RequestPlan.from_extra_args(sampling_params.extra_args).capture.sequence
        while True:
            item = await self.scripts[index].get()
            if item is DEAD:
                raise EngineDeadError
            if isinstance(item, Exception):
                raise item
            token_ids, finish_reason = item
            completion = CompletionOutput(0, "x", token_ids, None, None, finish_reason=finish_reason)
            yield RequestOutput(request_id, None, PROMPT, None, [completion], bool(finish_reason))
            if finish_reason:
                return

    def answers(self):
        sampling = SamplingParams(
            n=self.num_sequences,
            max_tokens=50,
            output_kind=RequestOutputKind.DELTA,
            extra_args=residuum.vllm_xargs(residuum.Capture(), request_id=REQUEST_ID),
        )
        return self.front.generate({"type": "token", "prompt_token_ids": PROMPT}, sampling, "cmpl-1", {})

    def take(self, output):
        for completion in output.outputs:
            self.handed_on[completion.index] += completion.token_ids


async def _nothing():
    pass


FACES = {"grpc": GrpcFace, "openai": OpenAIFace}
