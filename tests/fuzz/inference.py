"""The inference service under hostile calls: the real servicer and checks over gRPC, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from vllm.config import StructuredOutputsConfig

from inference_svc.engine.engine import Engine
from inference_svc.resources.score_board import ScoreBoard, ScoreMemory
from inference_svc.taps.plan import ScoreRegion
from residuum.rpc.channels import open_channel
from residuum.v1 import (
    capture_pb2,
    errors_pb2,
    inference_pb2,
    inference_pb2_grpc,
    probe_pb2,
    rule_pb2,
    sae_pb2,
    selection_pb2,
    steering_pb2,
    store_pb2_grpc,
    tensor_pb2,
)
from residuum.wire.digests import vector_message
from residuum.wire.sae import EncoderShape
from tests.fuzz.calls import SECONDS, Answer, Caller, methods
from tests.fuzz.messages import Choices, Words, made, some
from tests.inference.service_support import (
    ADD_JOY,
    CAPTURE,
    FACTS,
    HIDDEN,
    JOY,
    FakeEngine,
    FakeStore,
    ask,
    listening,
    running_service,
    spec,
)

_T = TypeVar("_T")

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_IDS = ["a", "b", "c"]
_VECTORS = [vector_message(np.full(HIDDEN, value, np.float32)) for value in (0.5, -1.0, 0.0)]


def _encoder() -> tuple[sae_pb2.SAEHeader, bytes]:
    header = sae_pb2.SAEHeader(
        features=2, width=HIDDEN, dtype=tensor_pb2.DATA_TYPE_FLOAT32, activation=sae_pb2.SAE_ACTIVATION_RELU
    )
    shape = EncoderShape.of(header)
    data = bytes(shape.nbytes)
    digest = shape.begin_digest()
    digest.update(data)
    header.digest = digest.digest()
    return header, data


_SAE, _SAE_DATA = _encoder()


class Tokenizer:
    """A tokenizer with a token for each character, and a chat template for two roles."""

    max_chars_per_token = 1
    max_token_id = FACTS.vocab_size - 1

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) % FACTS.vocab_size for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, **_: object) -> list[int] | str:
        for message in messages:
            if message["role"] not in ("user", "assistant"):
                raise ValueError(f"unknown role {message['role']}")
        text = "".join(message["content"] for message in messages)
        return [7, *self.encode(text)] if tokenize else text


_CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(
        max_logprobs=FACTS.max_logprobs, is_diffusion=False, get_vocab_size=lambda: FACTS.vocab_size
    ),
    speculative_config=None,
    structured_outputs_config=StructuredOutputsConfig(),
)
"""What vLLM's own checks of sampling parameters read."""


class _ReadyBoard(ScoreBoard):
    """A score board on which every inner product is 1."""

    async def read(self, region: ScoreRegion, first: int, count: int) -> np.ndarray:
        return np.ones((count, region.columns), np.float32)


class ScriptedEngine(FakeEngine):
    """A fake engine that reads prompts like the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = dataclasses.replace(FACTS, probe_sites=(capture_pb2.SITE_RESID_POST,), sae_bytes=1 << 16)
        self.scores = _ReadyBoard(ScoreMemory(1 << 20))
        self._real = Engine(SimpleNamespace(vllm_config=_CONFIG), Tokenizer(), FACTS)  # type: ignore[arg-type]

    async def tokenize(self, request: inference_pb2.GenerateRequest) -> list[int]:
        return await self._real.tokenize(request)

    async def note(self, log: list, item: object) -> None:
        """Record nothing, because runs are long."""


class FuzzedInference(contextlib.AbstractContextManager):
    """The service in a separate thread, with a hostile and a good client."""

    def __init__(self, **settings: object) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service")
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.service = self._run(self._start(settings))
        self.channel = open_channel(self.service.endpoint, options=[("grpc.enable_retries", 0)])
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.caller = Caller(self.channel, SERVICE)
        self._words = Words([*_IDS, "", "tiny", "user", "assistant"], [item.digest for item in (JOY, *_VECTORS)])
        self._kept = self._register()

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, data: bytes) -> None:
        """Make the calls that are derived from some bytes."""
        choices = Choices(data)
        for _ in range(choices.randrange(1, 6)):
            self.call(choices, choices.choice(methods(SERVICE)))

    def call(self, choices: Choices, method: str) -> Answer:
        """Make a hostile call of a method."""
        messages = [made(choices, seed, self._words) for seed in some(choices, _seeds(method))]
        answer = self.caller.call(method, messages)
        for response in answer.responses:
            if isinstance(response, inference_pb2.PutVectorsResponse):
                errors = [item.error for item in response.results]
                assert all(error.reason != errors_pb2.ERROR_REASON_INTERNAL for error in errors)
                assert all(len(error.message) < 4096 for error in errors)
        return answer

    def check(self) -> None:
        """Check that a registration that hostile calls cannot name is unchanged, and that requests are served."""
        request = ask(self._kept)
        events = list(self.stub.Generate(request, timeout=SECONDS))
        assert [token for event in events for token in event.delta.token_ids] == [1, 2, 3]
        assert events[0].started.capture.capture_id == self._kept
        assert events[-1].WhichOneof("event") == "finished"
        self._kept = self._register()
        registry = self.service.registry
        assert not registry.running, "a request still runs after its caller has left"

    def _register(self) -> str:
        name = f"kept-{secrets.token_hex(8)}"
        self.stub.PutVectors(iter([inference_pb2.PutVectorsRequest(vector=JOY)]), timeout=SECONDS)
        request = inference_pb2.RegisterRequestRequest(spec=spec(name, CAPTURE, [ADD_JOY]))
        assert not self.stub.RegisterRequest(request, timeout=SECONDS).missing_digests
        return name

    async def _start(self, settings: dict[str, object]) -> Any:
        add = store_pb2_grpc.add_StoreServiceServicer_to_server
        endpoint = await self._stack.enter_async_context(listening(add, _ForgetfulStore()))
        return await self._stack.enter_async_context(running_service(endpoint, ScriptedEngine(), **settings))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


class _ForgetfulStore(FakeStore):
    """Answers like a store, and records nothing."""

    async def OpenCapture(self, request: Any, context: Any) -> Any:
        self.opened.clear()
        return await super().OpenCapture(request, context)

    async def SealCapture(self, request: Any, context: Any) -> Any:
        self.seals.clear()
        return await super().SealCapture(request, context)


def _seeds(method: str) -> list[Message]:
    """Return valid requests of a method; for a stream, in order."""
    positions = selection_pb2.PositionSelection(
        ranges=[selection_pb2.PositionRange(first=-2), selection_pb2.PositionRange(first=0, last=3)], every=2
    )
    layers = selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=[0, 2]))
    digests = [item.digest for item in _VECTORS[:2]]
    steering = [
        ADD_JOY,
        steering_pb2.SteeringOperation(layers=layers, positions=positions, ablate=steering_pb2.Ablate(scale=1.0)),
        steering_pb2.SteeringOperation(layers=layers, cap=steering_pb2.Cap(digest=JOY.digest, min=-1.0, max=1.0)),
        steering_pb2.SteeringOperation(layers=layers, replace=steering_pb2.Replace(digest=JOY.digest, value=2.0)),
    ]
    steering[1].layer_digests.extend(digests)
    full = spec("a", capture_pb2.CaptureSpec(layers=layers, positions=positions), steering, updatable=True)
    probes = probe_pb2.ProbeSpec(score_prompt=True)
    outputs = [probe_pb2.ProbeOutput(digest=digest, bias=0.5) for digest in digests]
    smoothing = probe_pb2.Smoothing(ema=0.5)
    for name, activation in (("p", probe_pb2.PROBE_ACTIVATION_SIGMOID), ("q", probe_pb2.PROBE_ACTIVATION_SOFTMAX)):
        probes.probes.add(name=name, layer=1, outputs=outputs, activation=activation, smoothing=smoothing)
    probes.probes[0].further_places.add(layer=0, digests=digests)
    probes.rules.add(name="a", probe="p", output=1, above=0.25, for_tokens=2, action=rule_pb2.RULE_ACTION_ABORT)
    probes.rules.add(name="b", probe="q", below=0.75, action=rule_pb2.RULE_ACTION_STEER, steering=full.steering)
    judged = inference_pb2.RequestSpec(capture=CAPTURE, probes=probes)
    sampled = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"], "num_sequences": 2}
    bias = [inference_pb2.LogitBias(token_id=token, bias=2.0) for token in (1, 2)]
    further = {"logit_bias": bias, "bad_words": ["no"], "min_p": 0.5, "stop_token_ids": [3], "logprobs": 2}
    return {
        "GetModelInfo": [inference_pb2.GetModelInfoRequest(check_store=True)],
        "RegisterRequest": [
            inference_pb2.RegisterRequestRequest(spec=item) for item in (full, spec("b", CAPTURE), judged)
        ],
        "FindMissingVectors": [inference_pb2.FindMissingVectorsRequest(digests=digests)],
        "PutVectors": [inference_pb2.PutVectorsRequest(vector=item) for item in _VECTORS],
        "PutSAE": [inference_pb2.PutSAERequest(header=_SAE), inference_pb2.PutSAERequest(data=_SAE_DATA)],
        "Generate": [
            ask(spec("", CAPTURE, [ADD_JOY]), **sampled),
            ask("a"),
            ask(judged, **sampled),
            inference_pb2.GenerateRequest(spec=full, text="ab", sampling=inference_pb2.SamplingParameters(**sampled)),
            ask(spec("", CAPTURE), max_tokens=0, prompt_logprobs=1),
            ask(json_schema='{"type": "object"}', repetition_penalty=1.5, **further),
            ask(regex="a+b", presence_penalty=0.5, frequency_penalty=-0.5),
            inference_pb2.GenerateRequest(
                spec=spec(), chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hm")])
            ),
        ],
        "UpdateSteering": [inference_pb2.UpdateSteeringRequest(request_id="a", steering=full.steering)],
        "Abort": [inference_pb2.AbortRequest(request_id=name) for name in _IDS],
        "Unembed": [
            inference_pb2.UnembedRequest(rows=bytes(32), num_top=2, token_ids=[1, 2]),
            inference_pb2.UnembedRequest(rows=bytes(16)),
            inference_pb2.UnembedRequest(rows=bytes(16), map=inference_pb2.LensMap(digest=bytes(32), is_added=True)),
        ],
    }[method]
