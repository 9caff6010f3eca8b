"""A scripted inference service for tests of the client. It follows the real contract.

It runs no model: a reply continues counting from the prompt's tokens, and a captured row is a function of its place
(`row`), so that tests can identify each row. Captures go to a real store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import grpc
import ml_dtypes
import numpy as np
import structlog
from google.protobuf import duration_pb2, timestamp_pb2
from grpc_health.v1 import health

from inference_svc.admission.captures import resolve_capture
from inference_svc.model_facts import CaptureDefaults
from residuum.rpc.channels import SERVER_OPTIONS, open_channel
from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.v1 import (
    capture_pb2,
    inference_pb2,
    inference_pb2_grpc,
    probe_pb2,
    rule_pb2,
    steering_pb2,
    store_pb2,
    store_pb2_grpc,
    tensor_pb2,
)
from residuum.wire.digests import digest_of_bytes
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.ids import make_id
from residuum.wire.placement import parse_stores
from residuum.wire.probes.arithmetic import evaluate
from residuum.wire.probes.rules import RuleWatch
from residuum.wire.rows.encodings import ENCODINGS, RowFormat, basis_of
from residuum.wire.rows.frames import checksum
from residuum.wire.sae import Encoder, EncoderShape
from residuum.wire.selection import expected_rows, is_reduced, resolve_layers, wanted_positions
from svc_common.rpc.serving import ErrorInterceptor, add_health_and_reflection
from tests import ports

LAYERS, HIDDEN = 6, 8
SERVICE = "residuum.v1.InferenceService"
BLOCK = 4
POST, PRE = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE
REDUCED = {
    capture_pb2.REDUCTION_LAST: lambda rows: rows[:, -1],
    capture_pb2.REDUCTION_MEAN: lambda rows: rows.mean(axis=1),
    capture_pb2.REDUCTION_MAX: lambda rows: rows.max(axis=1),
    capture_pb2.REDUCTION_SUM: lambda rows: rows.sum(axis=1),
}
"""Rows [layers, positions, HIDDEN] as one a layer."""


def row(sequence: int, site: int, layer: int, position: int) -> np.ndarray:
    """Return the captured row at a place: bfloat16 [HIDDEN], unique to the place and exact in bfloat16."""
    values = np.zeros(HIDDEN, np.float32)
    values[:4] = sequence, site, layer, position % 256
    values[4] = position // 256
    return values.astype(ml_dtypes.bfloat16)


def rows(sequence: int, site: int, layer: int, positions) -> np.ndarray:
    return np.stack([row(sequence, site, layer, int(position)) for position in positions])


def facts() -> SimpleNamespace:
    """The model facts that the service's checks of captures need."""
    return SimpleNamespace(
        name="peer", num_layers=LAYERS, hidden_size=HIDDEN, dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
        sites=tuple(capture_pb2.Site.values()), encodings=tuple(ENCODINGS.values()),
        reductions=tuple(capture_pb2.Reduction.values()[1:]), capture_defaults=CaptureDefaults(),
        width=lambda site: HIDDEN, layers_at=lambda site: range(LAYERS),
    )  # fmt: skip


def logprobs(token_ids, k):
    """The log-probabilities of tokens: a function of each token."""
    return inference_pb2.Logprobs(
        tokens=[-token_id / 8 for token_id in token_ids],
        num_top=k,
        top_token_ids=[token_id + rank for token_id in token_ids for rank in range(k)],
        top=[-(token_id + rank) / 8 for token_id in token_ids for rank in range(k)],
    )


def _prompt_logprobs(prompt, k):
    """The deltas with the log-probabilities of a prompt, one for each token, as if they were long."""
    for part in [[token_id] for token_id in prompt[1:]] or [[]]:
        delta = inference_pb2.TokenDelta(prompt_logprobs=logprobs(part, k))
        yield inference_pb2.GenerateResponse(delta=delta)


@dataclass
class Script:
    """The scripted behaviour of the peer. Tests change it; `Peer.reset` restores the default."""

    failures: list = field(default_factory=list)  # one for each of the next calls; None: the call succeeds
    store_endpoints: list | None = None  # None: the real one
    stores: list | None = None  # "name=host:port" each; None: those of `store_endpoints`, without names
    handle_store: str = ""  # the name of the real store, in the captures' handles
    hold: threading.Event | None = None  # generation waits here after its first token
    model: str = "peer"  # the name that GetModelInfo has
    drop_vectors: bool = False  # forget all vectors before the next Generate or UpdateSteering
    truncate: bool = False  # end the stream without the last event
    adapter: str = ""  # the LoRA adapter of the captures
    num_layers: int = LAYERS  # what the service says of its model
    outcome: int = capture_pb2.CAPTURE_STATE_COMPLETE
    load: dict = field(default_factory=dict)  # what it says of its load
    lost_layers: tuple = ()  # layers whose rows are shed
    bad_order: bool = False  # a delta before `started`
    extra_rows: int = 0  # rows past the last token, as async scheduling makes them
    delay_seal: threading.Event | None = None  # the capture is sealed only then
    store_error: str = ""  # why this service cannot reach its store
    clock_skew: float = 0.0  # seconds by which this service's clock is ahead
    skipped: bool = False  # say that the capture existed already
    scored_probes: int | None = None  # send the scores of only so many probes
    dtype: int = tensor_pb2.DATA_TYPE_BFLOAT16  # of the model
    stated_dtype: int = 0  # what GetModelInfo has instead
    default_encoding: int = capture_pb2.ENCODING_RAW
    places: Callable | None = None  # returns a context for the time that a generation runs, which may refuse it
    may_rule_steer: bool = False  # refuse updatable requests, as with an operator's rule that steers
    has_rules: bool = True  # of probes
    is_old: bool = False  # an older service, which reports neither its clock nor its check of the store


ABORT = rule_pb2.RULE_ACTION_ABORT


class Peer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, store_endpoint: str | None) -> None:
        self.store_endpoint = store_endpoint
        self.channel = open_channel(store_endpoint) if store_endpoint else None
        self.reset()

    def reset(self) -> None:
        self.script = Script()
        self.vectors: dict[bytes, bytes] = {}
        self.ended_by: dict[tuple[str, int], str] = {}  # the rule that fired last, by request and sequence
        self.saes: dict[bytes, Encoder] = {}
        self.registrations: dict[str, inference_pb2.RequestSpec] = {}
        self.used: set[str] = set()
        self.updatable: dict[str, list[int]] = {}  # the prompts of requests whose steering can be changed
        self.done: dict[str, list[list[int]]] = {}
        self.changes: dict[str, list] = {}
        self.calls: list[str] = []
        self.requests: list = []
        self.vectors_received = 0
        self.replayed = 0
        self.cancelled = threading.Event()
        self.generating = threading.Event()
        self.running: dict[str, threading.Event] = {}
        self.sealers: list[threading.Thread] = []

    def _begin(self, name: str, request) -> None:
        self.calls.append(name)
        self.requests.append(request)
        failure = self.script.failures.pop(0) if self.script.failures else None
        if failure:
            raise failure

    def GetModelInfo(self, request, context):
        self._begin("GetModelInfo", request)
        stores = self.script.store_endpoints
        if stores is None:
            stores = [self.store_endpoint] if self.store_endpoint else []
        response = inference_pb2.GetModelInfoResponse(
            model=self.script.model, num_layers=self.script.num_layers, hidden_size=HIDDEN,
            dtype=self.script.stated_dtype or self.script.dtype,
            sites=[capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE],
            steering_operations=["add", "ablate", "cap", "replace", "set"], encodings=ENCODINGS.values(),
            reductions=facts().reductions, default_encoding=self.script.default_encoding,
            limits=inference_pb2.Limits(
                max_model_len=4096, max_operations=256, max_vectors=1000, max_probe_outputs=256,
                max_rules=16 if self.script.has_rules else 0,
                capture_pool_bytes=3 << 30, ring_bytes=1 << 28, table_bytes=5 << 20,
            ),
            vllm_version="0.0.peer", server_version="0.1.0", store_endpoints=stores,
            layout=capture_pb2.ParallelLayout(tensor_parallel_size=1, pipeline_parallel_size=1),
        )  # fmt: skip
        for store in parse_stores(self.script.stores or ()):
            response.stores.add(name=store.name, endpoint=store.endpoint)
        if not self.script.is_old:
            response.steering_sites.extend([capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT])
            response.gate_measures.extend([steering_pb2.GATE_MEASURE_PROJECTION, steering_pb2.GATE_MEASURE_COSINE])
            response.probe_sites.extend([capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT])
            response.server_time.FromNanoseconds(int((time.time() + self.script.clock_skew) * 1e9))
            response.load.CopyFrom(inference_pb2.ServiceLoad(**self.script.load))
            if request.check_store and self.store_endpoint:
                response.store_check.CopyFrom(self._check_store())
        return response

    def _check_store(self):
        check = inference_pb2.StoreCheck(endpoint=self.store_endpoint)
        if self.script.store_error:
            check.error.reason = Reason.ERROR_REASON_STORE_UNREACHABLE
            check.error.message = self.script.store_error
        else:
            check.server_version = self.store.GetStats(store_pb2.GetStatsRequest(), timeout=10).server_version
        return check

    def FindMissingVectors(self, request, context):
        self._begin("FindMissingVectors", request)
        return inference_pb2.FindMissingVectorsResponse(missing_digests=self._missing(request.digests))

    def PutVectors(self, request_iterator, context):
        self._begin("PutVectors", None)
        return inference_pb2.PutVectorsResponse(results=[self._put(item.vector) for item in request_iterator])

    def PutSAE(self, request_iterator, context):
        self._begin("PutSAE", None)
        header = next(request_iterator).header
        data = b"".join(item.data for item in request_iterator)
        existed = header.digest in self.saes
        if not existed and not data:
            raise Failure(Reason.ERROR_REASON_MISSING_SAE, "Send its bytes.", digest=header.digest.hex())
        shape = EncoderShape.of(header)
        if shape.width != HIDDEN:
            raise Failure(Reason.ERROR_REASON_WRONG_LENGTH, f"It takes rows of {shape.width} elements, not {HIDDEN}.")
        if not existed:
            weights = np.frombuffer(data, numpy_dtype(shape.dtype), shape.features * HIDDEN)
            numbers = np.frombuffer(data, np.float32, offset=shape.weight_bytes).reshape(-1, shape.features)
            threshold = numbers[1] if len(numbers) > 1 else None
            self.saes[header.digest] = Encoder(shape, weights.reshape(-1, HIDDEN), numbers[0], threshold)
        return inference_pb2.PutSAEResponse(existed=existed, num_bytes=shape.nbytes, free_bytes=1 << 20)

    def _put(self, vector):
        self.vectors_received += 1
        result = inference_pb2.PutVectorResult(digest=vector.digest)
        length = len(vector.values) // 4
        if length != HIDDEN:
            failure = Failure(Reason.ERROR_REASON_WRONG_LENGTH, f"The vector has {length} elements, not {HIDDEN}.")
            result.error.CopyFrom(failure.to_item_error())
        elif digest_of_bytes(vector.dtype, vector.values) != vector.digest:
            failure = Failure(Reason.ERROR_REASON_DIGEST_MISMATCH, "The digest is another vector's.")
            result.error.CopyFrom(failure.to_item_error())
        else:
            self.vectors[vector.digest] = vector.values
        return result

    def RegisterRequest(self, request, context):
        self._begin("RegisterRequest", request)
        spec = request.spec
        name = spec.request_id or make_id()
        self._check(spec)
        if name in self.used or self.registrations.get(name, spec) != spec:
            raise Failure(Reason.ERROR_REASON_REQUEST_EXISTS, f"{name} is taken.", request_id=name)
        self.registrations[name] = spec
        return inference_pb2.RegisterRequestResponse(
            request_id=name, missing_digests=self._missing(_digests(spec)),
            expire_time=timestamp_pb2.Timestamp(seconds=2_000_000_000), time_to_live=duration_pb2.Duration(seconds=600),
        )  # fmt: skip

    def Abort(self, request, context):
        self._begin("Abort", request)
        if request.request_id in self.running:
            self.running[request.request_id].set()
        elif self.registrations.pop(request.request_id, None) is None and request.request_id not in self.used:
            raise Failure(Reason.ERROR_REASON_UNKNOWN_REQUEST, "No such request.", request_id=request.request_id)
        return inference_pb2.AbortResponse()

    def Unembed(self, request, context):
        """Predicts token i + 1 after a row whose first element is i, and then the tokens after it."""
        self._begin("Unembed", request)
        if request.HasField("map") and request.map.digest not in self.saes:
            raise Failure(Reason.ERROR_REASON_MISSING_SAE, "Send it with PutSAE.", digest=request.map.digest.hex())
        first = np.frombuffer(request.rows, "<f4").reshape(-1, HIDDEN)[:, 0].astype(int).clip(0)
        k = request.num_top
        top_ids = first[:, None] + 1 + np.arange(k)
        own = np.array(request.token_ids, int)
        return inference_pb2.UnembedResponse(
            logprobs=inference_pb2.Logprobs(
                tokens=-0.5 * own, num_top=k, top_token_ids=top_ids.ravel(),
                top=np.tile(-0.25 * np.arange(k), len(first)),
            ),
            ranks=np.abs(own - first[: len(own)]),
            texts=[
                inference_pb2.TokenText(token_id=token, text=f"<{token}>") for token in np.unique(top_ids).tolist()
            ],
        )  # fmt: skip

    def UpdateSteering(self, request, context):
        self._begin("UpdateSteering", request)
        if self.script.drop_vectors:
            self.script.drop_vectors = False
            self.vectors.clear()
            self.saes.clear()
        if request.request_id not in self.running:
            raise Failure(Reason.ERROR_REASON_UNKNOWN_REQUEST, "It is not running.", request_id=request.request_id)
        if request.request_id not in self.updatable:
            raise Failure(Reason.ERROR_REASON_NOT_UPDATABLE, "It cannot be changed.", request_id=request.request_id)
        self._check_vectors(request)
        firsts = [len(self.updatable[request.request_id]) + len(tokens) for tokens in self.done[request.request_id]]
        change = steering_pb2.SteeringChange(steering=request.steering, first_positions=firsts)
        self.changes.setdefault(request.request_id, []).append(change)
        return inference_pb2.UpdateSteeringResponse(first_positions=firsts)

    def _check_vectors(self, what):
        """Check that the vectors of a spec or of a steering change are on the server."""
        missing = self._missing(_digests(what))
        if missing:
            digests = ",".join(digest.hex() for digest in missing)
            raise Failure(Reason.ERROR_REASON_MISSING_VECTORS, "Send them with PutVectors.", digests=digests)
        sae = what.capture.encoding_options.sae.digest if isinstance(what, inference_pb2.RequestSpec) else b""
        if sae and sae not in self.saes:
            raise Failure(Reason.ERROR_REASON_MISSING_SAE, "Send it with PutSAE.", digest=sae.hex())

    def Generate(self, request, context):
        self._begin("Generate", request)
        with self.script.places() if self.script.places else nullcontext():
            yield from self._generate(request, context)

    def _generate(self, request, context):
        if self.script.drop_vectors:
            self.script.drop_vectors = False
            self.vectors.clear()
            self.saes.clear()
        name, spec = self._claim(request)
        prompt = _tokens(request)
        self._check(spec)
        self._check_vectors(spec)
        self.used.add(name)
        if spec.steering.updatable:
            self.updatable[name] = prompt
        count = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else 16
        sequences = request.sampling.num_sequences or 1
        captures = spec.HasField("capture")
        if captures:
            existing = self._open(name, spec, prompt, sequences, request.text)
            if existing.HasField("existing"):
                yield from self._replay(existing.existing)
                return
        yield from self._events(name, spec, prompt, count, sequences, request.sampling, context)

    def _claim(self, request):
        if request.WhichOneof("target") != "request_id":
            name = request.spec.request_id or make_id()
            if name in self.used and request.spec.if_exists < capture_pb2.IF_EXISTS_REPLACE:
                raise Failure(Reason.ERROR_REASON_REQUEST_EXISTS, f"{name} was used before.", request_id=name)
            return name, request.spec
        name = request.request_id
        if name not in self.registrations:
            raise Failure(Reason.ERROR_REASON_UNKNOWN_REQUEST, f"{name} is not registered.", request_id=name)
        return name, self.registrations[name]

    def _check(self, spec):
        if spec.model not in ("", "peer"):
            raise Failure(Reason.ERROR_REASON_UNKNOWN_MODEL, "Here is peer.", model=spec.model, serving="peer")
        if self.script.may_rule_steer and spec.steering.updatable:
            raise Failure(
                Reason.ERROR_REASON_INVALID_FIELD, "The operator's rules may steer.", field="steering.updatable"
            )
        if spec.HasField("capture"):
            if not self.store_endpoint:
                raise Failure(Reason.ERROR_REASON_STORE_UNREACHABLE, "No store at nowhere:1.", endpoint="nowhere:1")
            try:
                resolve_layers(spec.capture.layers, LAYERS)
            except IndexError as error:
                layer = error.args[0]
                raise Failure(
                    Reason.ERROR_REASON_UNKNOWN_LAYER, f"No layer {layer}.", layer=layer, layers=LAYERS
                ) from None
            resolve_capture(spec.capture, self._facts())

    def _facts(self):
        return SimpleNamespace(
            **{
                **vars(facts()),
                "dtype": self.script.dtype,
                "capture_defaults": CaptureDefaults(encoding=self.script.default_encoding),
            }
        )

    def _missing(self, digests):
        return [digest for digest in dict.fromkeys(digests) if digest not in self.vectors]

    def _events(self, name, spec, prompt, count, sequences, sampling, context):
        script, captures = self.script, spec.HasField("capture")
        handle = None
        if captures:
            handle = inference_pb2.CaptureHandle(
                capture_id=name, store_endpoint=self.store_endpoint, store=script.handle_store
            )
        done: list[list[int]] = [[] for _ in range(sequences)]
        self.done[name] = done
        started = inference_pb2.GenerationStarted(
            request_id=name, prompt_token_ids=prompt, capture=handle, skipped=script.skipped
        )
        self.running[name] = threading.Event()  # before the client knows the ID and may abort the request
        if not script.bad_order:
            yield inference_pb2.GenerateResponse(started=started)
        self.generating.set()
        try:
            if sampling.HasField("prompt_logprobs"):
                yield from _prompt_logprobs(prompt, sampling.prompt_logprobs)
            if spec.probes.score_prompt:
                yield from self._prompt_scores(spec.probes, len(prompt))
            yield from self._deltas(name, prompt, count, done, sampling, spec.probes, context)
        except Failure:
            self._end_capture(spec, name, prompt, done, capture_pb2.CAPTURE_STATE_ABORTED, script)
            raise
        self._end_capture(spec, name, prompt, done, script.outcome, script)
        if not script.truncate:
            finished = _finished(prompt, done, handle)
            for rule in spec.probes.rules:
                for sequence, end in enumerate(finished.sequences):
                    if rule.action == ABORT and self.ended_by.get((name, sequence)) == rule.name:
                        end.finish_reason, end.stop_reason = "rule", rule.name
            yield inference_pb2.GenerateResponse(finished=finished)

    def _prompt_scores(self, probes, count):
        """The deltas with the scores of a prompt, two positions in each, as if they were long."""
        for at in range(0, count, 2):
            delta = inference_pb2.TokenDelta(prompt_scores=self._scores(probes, 0, range(at, min(at + 2, count))))
            yield inference_pb2.GenerateResponse(delta=delta)

    def _scores(self, spec, sequence, positions):
        """The scores of rows at positions, computed from the probes' vectors."""
        found = []
        for probe in spec.probes:
            weights = np.stack([np.frombuffer(self.vectors[output.digest], "<f4") for output in probe.outputs])
            biases = np.array([output.bias for output in probe.outputs], np.float32)
            read = rows(sequence, probe.site or POST, probe.layer, positions).astype(np.float32)
            found.append(probe_pb2.ProbeScores(values=evaluate(probe, read @ weights.T + biases).ravel()))
        return found[: self.script.scored_probes]

    def _deltas(self, name, prompt, count, done, sampling, probes, context):
        """Generate tokens into `done` until there are enough or the request is stopped."""
        stop = self.running[name]
        ended = threading.Event()
        hold = self.script.hold

        def on_end() -> None:
            stop.set()
            if not ended.is_set():
                self.cancelled.set()
                if hold:
                    hold.set()

        context.add_callback(on_end)
        watches = [[RuleWatch(rule) for rule in probes.rules] for _ in done]
        for step in range(count):
            for sequence, tokens in _running(done, watches):
                tokens.append(prompt[-1] + step + 1 + 100 * sequence)
                delta = inference_pb2.TokenDelta(sequence=sequence, text=f" {tokens[-1]}", token_ids=[tokens[-1]])
                if sampling.HasField("logprobs"):
                    delta.logprobs.CopyFrom(logprobs([tokens[-1]], sampling.logprobs))
                if not self.script.skipped:
                    delta.scores.extend(self._scores(probes, sequence, [len(prompt) + step - 1]))
                    delta.rule_events.extend(_events(watches[sequence], probes, sequence, step, delta.scores))
                    self.ended_by.update({(name, event.sequence): event.rule for event in delta.rule_events})
                yield inference_pb2.GenerateResponse(delta=delta)
            if hold:
                hold.wait(30)
            if stop.is_set():
                ended.set()
                raise Failure(Reason.ERROR_REASON_ABORTED, "The request was aborted.", request_id=name)
        ended.set()
        del self.running[name]

    # -------------------------------------------------------------------------------- the capture's way to the store

    @property
    def store(self):
        return store_pb2_grpc.StoreServiceStub(self.channel)

    def _open(self, name, spec, prompt, sequences, text):
        description = capture_pb2.CaptureDescription(
            capture_id=name, model="peer", adapter=self.script.adapter, hidden_size=HIDDEN, num_layers=LAYERS,
            dtype=self.script.dtype, spec=resolve_capture(spec.capture, self._facts()),
            prompt_token_ids=prompt, num_sequences=sequences,
            prompt_text=text if spec.capture.keep_prompt else "",
            layout=capture_pb2.ParallelLayout(tensor_parallel_size=1, pipeline_parallel_size=1),
            steering=spec.steering if spec.HasField("steering") else None, vllm_version="0.0.peer",
            request_time=timestamp_pb2.Timestamp(seconds=1_700_000_000),
        )  # fmt: skip
        request = store_pb2.OpenCaptureRequest(description=description, if_exists=spec.if_exists)
        try:
            return self.store.OpenCapture(request, timeout=10)
        except grpc.RpcError as error:
            raise failure_from_rpc_error(error) or error from None

    def _replay(self, manifest):
        """Answer with a capture that exists already (IF_EXISTS_SKIP)."""
        self.replayed += 1
        what = manifest.description
        handle = inference_pb2.CaptureHandle(capture_id=what.capture_id, store_endpoint=self.store_endpoint)
        prompt, done = list(what.prompt_token_ids), [list(item.generated_token_ids) for item in manifest.sequences]
        started = inference_pb2.GenerationStarted(
            request_id=what.capture_id, prompt_token_ids=prompt, capture=handle, skipped=True
        )
        yield inference_pb2.GenerateResponse(started=started)
        for sequence, tokens in enumerate(done):
            if tokens:
                delta = inference_pb2.TokenDelta(
                    sequence=sequence, text="".join(f" {token}" for token in tokens), token_ids=tokens
                )
                yield inference_pb2.GenerateResponse(delta=delta)
        yield inference_pb2.GenerateResponse(finished=_finished(prompt, done, handle))

    def _end_capture(self, spec, name, prompt, done, outcome, script):
        if not spec.HasField("capture"):
            return
        messages = list(self._chunks(spec, name, prompt, done, script))
        numbered = [_numbered(message, number) for number, message in enumerate(messages, 1)]
        list(self.store.AppendChunks(iter(numbered), timeout=20))
        aborted = outcome == capture_pb2.CAPTURE_STATE_ABORTED
        seal = store_pb2.SealCaptureRequest(
            capture_id=name, outcome=outcome, steering_changes=self.changes.get(name),
            sequences=[
                capture_pb2.SequenceOutcome(generated_token_ids=tokens, finish_reason="abort" if aborted else "length")
                for tokens in done
            ],
        )  # fmt: skip
        if outcome == capture_pb2.CAPTURE_STATE_INCOMPLETE:
            seal.incomplete_reason = capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
            seal.incomplete_detail = "scripted"

        def end() -> None:
            if script.delay_seal:
                script.delay_seal.wait(30)
            self.store.SealCapture(seal, timeout=10)

        if script.delay_seal:
            thread = threading.Thread(target=end)
            self.sealers.append(thread)
            thread.start()
        else:
            end()

    def _chunks(self, spec, name, prompt, done, script):
        layers = resolve_layers(spec.capture.layers, LAYERS)
        kept = [layer for layer in layers if layer not in script.lost_layers]
        sites = list(spec.capture.sites) or [capture_pb2.SITE_RESID_POST]
        for sequence, tokens in enumerate(done):
            count = expected_rows(len(prompt), len(tokens)) + script.extra_rows
            wanted = np.flatnonzero(wanted_positions(spec.capture.positions, len(prompt), 0, count))
            if is_reduced(spec.capture):
                yield from self._reduced(spec.capture, name, sequence, wanted, len(prompt))
                continue
            for site in sites:
                for at in range(0, len(wanted), BLOCK):
                    part = wanted[at : at + BLOCK]
                    if kept:
                        values = np.stack([rows(sequence, site, layer, part) for layer in kept])
                        made = self._encoded(spec.capture, sequence, site, kept, part, values)
                        yield store_pb2.AppendChunksRequest(capture_id=name, chunk=made)
                lost = sorted(set(layers) & set(script.lost_layers))
                if lost and len(wanted):
                    reason = capture_pb2.INCOMPLETE_REASON_OVERFLOW
                    loss = store_pb2.RowLoss(
                        sequence=sequence, sites=[site], layers=lost, positions=wanted.tolist(), reason=reason
                    )
                    yield store_pb2.AppendChunksRequest(capture_id=name, loss=loss)

    def _reduced(self, capture, name, sequence, wanted, prompt_tokens):
        """Send the reduction at the prompt's last position, and at each generated one, because any may be the last."""
        reduce = REDUCED[capture.reduction]
        layers = resolve_layers(capture.layers, LAYERS)
        for site in list(capture.sites) or [POST]:
            for phase in (wanted[wanted < prompt_tokens], wanted[wanted >= prompt_tokens]):
                for count in range(len(phase), 0, -1) if len(phase) and phase[0] >= prompt_tokens else [len(phase)]:
                    if not count:
                        continue
                    covered = np.stack([rows(sequence, site, layer, phase[:count]) for layer in layers])
                    values = reduce(covered.astype(np.float32)).astype(ml_dtypes.bfloat16)[:, None]
                    made = self._encoded(capture, sequence, site, layers, phase[count - 1 : count], values)
                    yield store_pb2.AppendChunksRequest(capture_id=name, chunk=made)

    def _encoded(self, capture, sequence, site, layers, positions, values) -> capture_pb2.Chunk:
        spec = resolve_capture(capture, self._facts())
        what = capture_pb2.CaptureDescription(hidden_size=HIDDEN, dtype=self.script.dtype, spec=spec)
        form = RowFormat.of_capture(what)
        vectors = [np.frombuffer(self.vectors[digest], np.float32) for digest in spec.encoding_options.vectors]
        features = spec.encoding_options.sae
        basis = basis_of(form, spec.encoding_options, vectors)
        if features.digest:
            basis = replace(self.saes[features.digest], chosen=tuple(features.chosen))
        payload = form.encode(values.astype(numpy_dtype(self.script.dtype)), basis)
        header = capture_pb2.ChunkHeader(
            sequence=sequence, site=site, layers=layers, positions=[int(position) for position in positions],
            dtype=form.dtype, width=form.width, encoding=form.encoding, dimensions=form.dimensions, axis=form.axis,
            features=form.features,
        )  # fmt: skip
        return capture_pb2.Chunk(header=header, crc32c=checksum(payload), payload=payload)


def chunk(sequence, site, layers, positions) -> capture_pb2.Chunk:
    payload = np.stack([rows(sequence, site, layer, positions) for layer in layers]).tobytes()
    header = capture_pb2.ChunkHeader(
        sequence=sequence, site=site, layers=layers, positions=[int(position) for position in positions],
        dtype=tensor_pb2.DATA_TYPE_BFLOAT16, width=HIDDEN, encoding=capture_pb2.ENCODING_RAW,
    )  # fmt: skip
    return capture_pb2.Chunk(header=header, crc32c=checksum(payload), payload=payload)


def _finished(prompt, done, handle) -> inference_pb2.GenerationFinished:
    finishes = [inference_pb2.SequenceFinish(finish_reason="length", generated_tokens=len(tokens)) for tokens in done]
    usage = inference_pb2.Usage(prompt_tokens=len(prompt), generated_tokens=sum(map(len, done)))
    return inference_pb2.GenerationFinished(sequences=finishes, usage=usage, capture=handle)


def _numbered(message, number):
    message.number = number
    return message


def _running(done, watches):
    """The sequences that no rule has ended, with their numbers."""
    for sequence, tokens in enumerate(done):
        if not any(watch.has_fired and watch.rule.action == ABORT for watch in watches[sequence]):
            yield sequence, tokens


def _events(watches, spec, sequence, token, scores):
    """The events of the rules that fire at a token with these scores."""
    names = [probe.name for probe in spec.probes]
    for watch in watches:
        rule = watch.rule
        score = scores[names.index(rule.probe)].values[rule.output]
        if watch.add(np.array([score], np.float32)) is not None:
            first = 100 + token if rule.action == rule_pb2.RULE_ACTION_STEER else None
            yield rule_pb2.RuleEvent(
                rule=rule.name, sequence=sequence, token=token, score=score, action=rule.action, first_position=first
            )


def _digests(what):
    steering = [
        digest
        for operation in what.steering.operations
        for digest in operation.layer_digests or [getattr(operation, operation.WhichOneof("operation")).digest]
    ]
    if not hasattr(what, "capture"):
        return steering
    probed = [output.digest for probe in what.probes.probes for output in probe.outputs]
    probed += [digest for rule in what.probes.rules for digest in _digests(rule)]
    return steering + list(what.capture.encoding_options.vectors) + probed


def _tokens(request) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        tokens = list(request.token_ids.ids)
    elif kind == "chat":
        tokens = [len(message.content) for message in request.chat.messages]
    else:
        tokens = [len(word) for word in request.text.split()]
    if request.sampling.truncate_prompt and kind != "chat":
        tokens = tokens[: request.sampling.truncate_prompt]
    if not tokens:
        raise Failure(Reason.ERROR_REASON_EMPTY_PROMPT, "The prompt has no tokens.")
    if len(tokens) > 4000:
        raise Failure(Reason.ERROR_REASON_PROMPT_TOO_LONG, "Too long.", prompt_tokens=len(tokens), limit=4000)
    return tokens


class RunningPeer:
    """Serve the peer on loopback. Another one may be started on the same port later."""

    def __init__(self, store_endpoint: str | None, port: int = 0) -> None:
        self.servicer = Peer(store_endpoint)
        self.health = health.HealthServicer()
        interceptor = ErrorInterceptor(structlog.get_logger("peer"))
        self.server = grpc.server(ThreadPoolExecutor(48), interceptors=[interceptor], options=SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.servicer, self.server)
        add_health_and_reflection(self.server, SERVICE, self.health)
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port or ports.reserve()}')}"
        self.server.start()

    def stop(self) -> None:
        self.server.stop(0).wait()
        for thread in self.servicer.sealers:
            thread.join()
        if self.servicer.channel:
            self.servicer.channel.close()
