"""A scripted engine and a scripted store, and the real service between them, over gRPC on loopback."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tokenizers
import transformers

from inference_svc.captures.stores import Stores
from inference_svc.engine.streams import Delta
from inference_svc.engine.unembedding import Predicted
from inference_svc.metrics import InferenceMetrics, ServiceCollector
from inference_svc.model_facts import ModelFacts
from inference_svc.parts import Parts
from inference_svc.requests.replies import ReplyReader
from inference_svc.requests.tokenizer_thread import TokenizerThread
from inference_svc.servicer import InferenceServicer
from inference_svc.settings import InferenceSettings
from residuum.rpc.channels import SERVER_OPTIONS, open_aio_channel
from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.v1 import (
    capture_pb2,
    inference_pb2,
    inference_pb2_grpc,
    selection_pb2,
    steering_pb2,
    store_pb2,
    store_pb2_grpc,
    tensor_pb2,
)
from residuum.wire.digests import vector_message
from residuum.wire.placement import StoreAddress, parse_stores
from svc_common.logs import get_logger
from svc_common.rpc.serving import AioErrorInterceptor
from svc_common.rpc.stall_timeouts import AioStallInterceptor
from svc_common.security.access import Access
from svc_common.security.authentication import AioAccessInterceptor

HIDDEN = 4
FACTS = ModelFacts(
    name="tiny",
    num_layers=3,
    hidden_size=HIDDEN,
    dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
    max_model_len=64,
    vocab_size=100,
    tensor_parallel_size=2,
    pipeline_parallel_size=1,
    eager=True,
    vllm_version="1.2.3",
    max_num_seqs=8,
    sites=(capture_pb2.SITE_RESID_POST,),
    pool_bytes=1000,
    table_bytes=500,
    ring_bytes=2000,
    control_paths=(),
)
DEADLINE = 20.0
"""Timeout, in seconds, for events that must happen."""
LAYERS = selection_pb2.LayerSelection(all=True)
CAPTURE = capture_pb2.CaptureSpec(layers=LAYERS)


def vector(*values):
    return vector_message(np.array(values or (1,) * HIDDEN, dtype=np.float32))


JOY = vector(1, 2, 3, 4)
ADD_JOY = steering_pb2.SteeringOperation(layers=LAYERS, add=steering_pb2.Add(digest=JOY.digest, scale=2.0))


def spec(request_id="", capture=None, operations=(), *, updatable=False):
    steering = None
    if operations or updatable:
        steering = steering_pb2.SteeringSpec(operations=operations, updatable=updatable)
    return inference_pb2.RequestSpec(request_id=request_id, capture=capture, steering=steering)


def ask(target="", ids=(5, 6, 7), **sampling):
    """A GenerateRequest with a request ID, or with an inline spec."""
    by = {"request_id": target} if isinstance(target, str) and target else {"spec": target or spec()}
    parameters = inference_pb2.SamplingParameters(**sampling)
    return inference_pb2.GenerateRequest(**by, token_ids=inference_pb2.TokenIds(ids=ids), sampling=parameters)


@dataclass
class EngineCall:
    """The arguments of one call of the engine."""

    engine_id: str
    prompt: list
    sampling: Any
    plan: Any
    cache_salt: str | None
    adapter: str


def without_attempt(name):
    """A request's name in the engine without the random number of its attempt: "r#0" for "r@7c3#0"."""
    return re.sub("@[0-9a-f]+", "", name)


def plain_plan(plan):
    """The same plan with names that have no attempts."""
    if plan is None:
        return None
    capture = plan.capture and replace(plan.capture, capture_id=without_attempt(plan.capture.capture_id))
    return replace(plan, capture=capture, name=without_attempt(plan.name))


def tokenizer():
    """A tokenizer of the library tokenizers, in which the text of token 7 is "t7"."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"t{number}": number for number in range(FACTS.vocab_size)}, "t0")
    )
    words.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


def texts_of(*token_ids):
    """The message for the texts of these tokens."""
    texts = [f"t{token_id}" for token_id in token_ids]
    return capture_pb2.TokenTexts(text="".join(texts), lengths=map(len, texts))


class FakeEngine:
    """Replaces `inference_svc.engine.engine.Engine`.

    `script` is an async generator function that yields the deltas of a call.
    """

    def __init__(self):
        self.facts = FACTS
        self.scores = None
        self.script = three_tokens
        self.prompts = SimpleNamespace(text=self.prompt_text)
        self.replies = ReplyReader(TokenizerThread(tokenizer()))
        self.replies.text = self.reply_text
        self.calls = []
        self.closed = []
        """Engine IDs of generators that have ended, in any way."""
        self.bank = {}
        self.signs = []
        """The arguments of each call of `keep_signs`."""
        self.saes = []
        """The arguments of each call of `keep_saes`, with the bytes of the files."""
        self.sae_state = True
        self.signs_ready = asyncio.Event()
        self.signs_ready.set()
        self.changes = []
        """The arguments of each call of `change_steering`."""
        self.positions = {}
        """The first position of a sequence's change, by the sequence's engine ID; 0 by default."""
        self.answers = asyncio.Event()
        self.answers.set()
        self.change_error = None
        self.forgotten = []
        self.unembedded = []
        """How many rows each call of `unembed` had."""
        self.changed = asyncio.Condition()

    async def tokenize(self, request):
        return [5, 6, 7] if request.WhichOneof("prompt") == "text" else list(request.token_ids.ids)

    async def prompt_text(self, request, token_ids):
        if request.WhichOneof("prompt") == "token_ids":
            raise Failure(Reason.ERROR_REASON_INVALID_FIELD, "It has no text.", field="capture.keep_prompt")
        return request.text

    async def reply_text(self, prompt_token_ids, token_ids):
        return "".join(f"t{token}" for token in token_ids)

    async def generate(self, engine_id, prompt_token_ids, sampling, plan, cache_salt, adapter):
        engine_id = without_attempt(engine_id)
        call = EngineCall(engine_id, list(prompt_token_ids), sampling, plain_plan(plan), cache_salt, adapter)
        try:
            await self.note(self.calls, call)
            async for delta in self.script(call):
                yield delta
        finally:
            await self.note(self.closed, engine_id)

    async def unembed(self, rows, num_top, tokens):
        """Each row's logits are its elements, then very small ones."""
        await self.note(self.unembedded, len(rows))
        logits = np.full((len(rows), self.facts.vocab_size), -100.0, np.float32)
        logits[:, :HIDDEN] = rows
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        order = np.argsort(-logprobs, axis=-1, kind="stable")
        own = np.take_along_axis(logprobs[: len(tokens)], np.array(tokens, np.int64).reshape(-1, 1), axis=-1)
        ranks = (logprobs[: len(tokens)] > own).sum(axis=-1) + 1
        top_ids = order[:, :num_top]
        return Predicted(top_ids, np.take_along_axis(logprobs, top_ids, axis=-1), own[:, 0], ranks)

    async def map_rows(self, rows, name, /):
        """W x + b, with the weights and biases of the file that `keep_saes` got."""
        data = next(kept[name][1] for kept in reversed(self.saes) if kept.get(name, (b"", b""))[1])
        width = rows.shape[1]
        weights, bias = np.split(np.frombuffer(data, "<f4"), [width * width])
        with np.errstate(over="ignore", invalid="ignore"):
            return rows @ weights.reshape(width, width).T + bias

    async def keep_signs(self, projections, owner=0):
        await self.note(self.signs, list(projections))
        return [self.signs_ready.is_set()] * len(projections)

    async def keep_saes(self, wanted):
        self.saes.append({name: (header, _bytes_of(path)) for name, header, path, _ in wanted})
        return [self.sae_state] * len(wanted)

    async def load_vectors(self, rows):
        self.bank.update(rows)

    async def change_steering(self, changes):
        await self.note(self.changes, {without_attempt(name): change for name, change in changes.items()})
        await self.answers.wait()
        if self.change_error:
            raise self.change_error
        return {name: self.positions.get(without_attempt(name), 0) for name in changes}

    async def forget(self, names):
        await self.note(self.forgotten, [without_attempt(name) for name in names])

    async def note(self, log, item):
        log.append(item)
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition):
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), DEADLINE)


def _bytes_of(path):
    return Path(path).read_bytes() if path else b""


async def until(holds):
    """Poll for a condition that has no event to wait for."""
    async with asyncio.timeout(DEADLINE):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


async def three_tokens(call):
    for number in (1, 2):
        yield Delta(text=f"t{number}", token_ids=[number])
    yield Delta(text="t3", token_ids=[3], finish_reason="length")


def stuck_after(*deltas):
    """A script that yields these deltas and then waits for ever."""

    async def script(call):
        for delta in deltas:
            yield delta
        await asyncio.Event().wait()

    return script


class FakeStore(store_pb2_grpc.StoreServiceServicer):
    """Records the calls of a store.

    `refuse` is a reason to refuse OpenCapture with, `refuse_seal` one for SealCapture. Calls hang until `gate` is set.
    With `is_older`, it is older than the calls that open or seal many captures. With `takes_early_rows`, rows may be
    sent before the answer to an open.
    """

    def __init__(self):
        self.opened = []
        self.seals = []
        self.changed = asyncio.Condition()
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse = None
        self.failing_seals = 0
        self.refuse_seal = None
        self.away = False
        self.is_older = False
        self.takes_early_rows = False
        self.checks = 0
        self.batches = []
        """The number of captures of each call that opens many."""

    async def OpenCapture(self, request, context):
        async with self.changed:
            self.opened.append(request.description)
            self.changed.notify_all()
        await self.gate.wait()
        if self.refuse:
            raise Failure(self.refuse, "scripted")
        return store_pb2.OpenCaptureResponse()

    async def OpenCaptures(self, request, context):
        if self.is_older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self.batches.append(len(request.opens))
        response = store_pb2.OpenCapturesResponse(takes_early_rows=self.takes_early_rows)
        for index, item in enumerate(request.opens):
            result = response.results.add(index=index)
            try:
                result.opened.CopyFrom(await self.OpenCapture(item, context))
            except Failure as failure:
                result.error.CopyFrom(failure.to_item_error())
        yield response

    async def SealCaptures(self, request, context):
        if self.is_older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        response = store_pb2.SealCapturesResponse()
        for item in request.seals:
            result = response.results.add()
            try:
                await self.SealCapture(item, context)
            except Failure as failure:
                result.error.CopyFrom(failure.to_item_error())
        return response

    async def SealCapture(self, request, context):
        if self.failing_seals:
            self.failing_seals -= 1
            raise Failure(Reason.ERROR_REASON_STORE_FULL, "scripted")
        if self.refuse_seal:
            raise Failure(self.refuse_seal, "scripted")
        async with self.changed:
            self.seals.append(request)
            self.changed.notify_all()
        return store_pb2.SealCaptureResponse()

    async def GetStats(self, request, context):
        self.checks += 1
        if self.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        return store_pb2.GetStatsResponse()

    async def until(self, condition):
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), DEADLINE)

    async def seal(self):
        """Wait for the only seal and return it."""
        await self.until(lambda: self.seals)
        (seal,) = self.seals
        return seal


@asynccontextmanager
async def listening(add, servicer, port=0, on_end=None, access=None, before=(), patience=20.0, stall=600.0):
    """Serve on loopback, by default on a free port, and yield the endpoint. `before` are interceptors."""
    asking = AioAccessInterceptor(access or Access(None, []))
    log = get_logger("test")
    interceptors = [*before, AioErrorInterceptor(log, on_end), asking, AioStallInterceptor(log, patience, stall)]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    add(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Service:
    """The inference service, its parts, and a client's stub for it."""

    def __init__(self, engine, stores, settings, access):
        self.engine = engine
        self.metrics = InferenceMetrics()
        self.parts = Parts.assemble(engine, settings, stores, self.metrics, access.limits_of)
        self.registry, self.cache, self.places = self.parts.registry, self.parts.vectors, self.parts.places
        self.metrics.registry.register(ServiceCollector(self.registry, self.cache, self.parts.activator, stores))
        self.servicer = InferenceServicer()
        self.endpoint = self.channel = self.stub = None

    def serve(self):
        self.servicer.load(self.parts)
        self.servicer.set_serving(serving=True)

    async def register(self, request_spec):
        return await self.stub.RegisterRequest(inference_pb2.RegisterRequestRequest(spec=request_spec))

    async def put(self, *vectors):
        messages = [inference_pb2.PutVectorsRequest(vector=item) for item in vectors]
        return (await self.stub.PutVectors(iter(messages))).results

    async def events(self, request):
        return [event async for event in self.stub.Generate(request)]

    async def update(self, request_id, *operations):
        """Change the steering, and return the first positions."""
        request = inference_pb2.UpdateSteeringRequest(
            request_id=request_id, steering=steering_pb2.SteeringSpec(operations=operations)
        )
        return list((await self.stub.UpdateSteering(request)).first_positions)

    async def abort(self, request_id):
        await self.stub.Abort(inference_pb2.AbortRequest(request_id=request_id))


@asynccontextmanager
async def running_service(store_endpoint=None, engine=None, before=(), **settings):
    """Start the service on a fake engine, by default a new one.

    `store_endpoint` None: without a store; a list: several, each "name=host:port". `before` are interceptors.
    """
    values = InferenceSettings(model="tiny", **settings)
    stores = None
    if store_endpoint:
        own = parse_stores([store_endpoint] if isinstance(store_endpoint, str) else store_endpoint)
        told = [StoreAddress(own[0].name, "store.example:1")] if isinstance(store_endpoint, str) else own
        stores = Stores(own, told, fixed=values.fixed_stores)
    access = Access(values.tokens, [])
    service = Service(engine or FakeEngine(), stores, values, access)
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    once = [("grpc.enable_retries", 0)]
    async with (
        listening(
            add,
            service.servicer,
            on_end=service.metrics.calls.note,
            access=access,
            before=before,
            patience=values.first_message_seconds,
            stall=values.stall_seconds,
        ) as endpoint,
        open_aio_channel(endpoint, options=once) as channel,
    ):
        service.endpoint = endpoint
        service.stub, service.channel = inference_pb2_grpc.InferenceServiceStub(channel), channel
        service.serve()
        yield service
    if stores:
        await stores.close(0)


async def failure_of(call):
    """Await a call that must fail as the contract says, and return the Failure that the client sees."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    failure = failure_from_rpc_error(caught.value)
    assert failure is not None, f"the error carries no reason: {caught.value}"
    assert failure.code == caught.value.code()
    return failure
