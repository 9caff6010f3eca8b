"""InferenceService over gRPC. Each method checks its message and calls the part of the service that does the work."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import TYPE_CHECKING

from inference_svc.admission.gates import GATE_MEASURES
from inference_svc.admission.steering import OPERATIONS
from inference_svc.captures.stores import require_stores
from inference_svc.load import service_load
from inference_svc.resources.vector_cache import cache_capacity, digest_in, vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, inference_pb2_grpc, selection_pb2
from residuum.wire.limits import (
    DIGEST_BYTES,
    MAX_DIGESTS_PER_CALL,
    MAX_MESSAGE_BYTES,
    MAX_OPERATIONS,
    MAX_PROBE_HEADS,
    MAX_PROBE_OUTPUTS,
    MAX_PROBE_PLACES,
    MAX_RULES,
    MAX_SEQUENCES,
    MAX_VECTORS_PER_CALL,
)
from svc_common.logs import bind_request
from svc_common.security.access import current_caller

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable
    from typing import Any

    import grpc.aio

    from inference_svc.parts import Parts

    Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers calls. Before the engine runs and while the service drains, it answers NOT_SERVING."""

    def __init__(self) -> None:
        """Make a servicer that does not serve yet; see `load` and `set_serving`."""
        self._parts: Parts | None = None
        self._serving = False

    def load(self, parts: Parts) -> None:
        """Give the servicer its parts. From now on GetModelInfo answers."""
        self._parts = parts

    @property
    def is_serving(self) -> bool:
        """Whether new calls are accepted."""
        return self._serving

    def set_serving(self, *, serving: bool) -> None:
        """Accept calls, or refuse new ones."""
        self._serving = serving

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        """See inference.proto."""
        del context
        if self._parts is None:
            raise _not_serving()
        info = _model_info(self._parts)
        caller = current_caller()
        rules, tenant = self._parts.admission.operator_rules, caller.own_tenant
        if caller.is_admin and self._parts.metrics is not None:
            info.load.CopyFrom(service_load(self._parts.metrics.registry))
        info.operator_rules.extend(rules.names_for(tenant))
        if info.limits.max_probe_outputs:
            info.limits.max_probe_outputs -= rules.outputs_for(tenant)
        if request.check_store and self._parts.stores is not None:
            checks = await self._parts.stores.check()
            info.store_checks.extend(checks)
            info.store_check.CopyFrom(next((check for check in checks if check.HasField("error")), checks[0]))
        info.server_time.GetCurrentTime()
        return info

    async def RegisterRequest(
        self, request: inference_pb2.RegisterRequestRequest, context: Context
    ) -> inference_pb2.RegisterRequestResponse:
        """See inference.proto."""
        del context
        parts, tenant = self._require(), current_caller().own_tenant
        if request.spec.request_id:
            bind_request(request.spec.request_id)
        spec = parts.admission.resolve(request.spec, tenant)
        request_id = spec.request_id or parts.registry.make_id()
        bind_request(request_id)
        if spec.capture is not None:
            await require_stores(parts.stores).of(request_id).check_reachable()
        parts.registry.register(spec, tenant, request_id)
        missing = parts.vectors.missing(spec.shared.vector_names(tenant))
        response = inference_pb2.RegisterRequestResponse(request_id=request_id, missing_digests=map(digest_in, missing))
        response.expire_time.GetCurrentTime()
        seconds = parts.registry.time_to_live
        response.expire_time.FromNanoseconds(response.expire_time.ToNanoseconds() + math.floor(seconds * 1e9))
        response.time_to_live.FromNanoseconds(math.floor(seconds * 1e9))
        return response

    async def FindMissingVectors(
        self, request: inference_pb2.FindMissingVectorsRequest, context: Context
    ) -> inference_pb2.FindMissingVectorsResponse:
        """See inference.proto."""
        del context
        parts = self._require()
        digests = request.digests
        if len(digests) > MAX_DIGESTS_PER_CALL or any(len(digest) != DIGEST_BYTES for digest in digests):
            raise Failure(
                Reason.ERROR_REASON_INVALID_FIELD,
                f"Send at most {MAX_DIGESTS_PER_CALL} digests of {DIGEST_BYTES} bytes each.",
                field="digests",
            )
        return inference_pb2.FindMissingVectorsResponse(
            missing_digests=_missing(parts, current_caller().own_tenant, digests)
        )

    async def PutVectors(
        self, request_iterator: AsyncIterator[inference_pb2.PutVectorsRequest], context: Context
    ) -> inference_pb2.PutVectorsResponse:
        """See inference.proto."""
        del context
        parts, tenant = self._require(), current_caller().own_tenant
        max_bytes = parts.limits_of(tenant).max_vector_bytes
        response = inference_pb2.PutVectorsResponse()
        async for request in request_iterator:
            if len(response.results) == MAX_VECTORS_PER_CALL:
                raise _too_many_vectors()
            result = response.results.add(digest=request.vector.digest[:DIGEST_BYTES])
            try:
                parts.vectors.put(request.vector, tenant, max_bytes)
            except Failure as failure:
                result.error.CopyFrom(failure.to_item_error())
        return response

    async def PutSAE(
        self, request_iterator: AsyncIterator[inference_pb2.PutSAERequest], context: Context
    ) -> inference_pb2.PutSAEResponse:
        """See inference.proto."""
        del context
        parts, tenant = self._require(), current_caller().own_tenant
        return await parts.saes.put(request_iterator, tenant, parts.limits_of(tenant).max_sae_bytes)

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See inference.proto. Returns the generator itself: a generator around it would cost time for each event."""
        del context
        return self._require().runner.run(request, current_caller().own_tenant)

    async def UpdateSteering(
        self, request: inference_pb2.UpdateSteeringRequest, context: Context
    ) -> inference_pb2.UpdateSteeringResponse:
        """See inference.proto."""
        del context
        if self._parts is None:  # also answered while the service drains
            raise _not_serving()
        bind_request(request.request_id)
        firsts = await self._parts.runner.update_steering(
            request.request_id, request.steering, current_caller().own_tenant
        )
        return inference_pb2.UpdateSteeringResponse(first_positions=firsts)

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        """See inference.proto."""
        del context
        if self._parts is None:  # also answered while the service drains
            raise _not_serving()
        bind_request(request.request_id)
        tenant = current_caller().own_tenant
        self._parts.registry.abort(request.request_id, tenant)
        return inference_pb2.AbortResponse()

    async def Unembed(self, request: inference_pb2.UnembedRequest, context: Context) -> inference_pb2.UnembedResponse:
        """See inference.proto."""
        del context
        parts = self._require()
        tenant = current_caller().own_tenant
        with parts.places.taken(tenant):
            return await parts.unembedding.answer(request, tenant)

    def _require(self) -> Parts:
        if self._parts is None or not self._serving:
            raise _not_serving()
        return self._parts


def _too_many_vectors() -> Failure:
    return Failure(
        Reason.ERROR_REASON_INVALID_FIELD,
        f"The call sends more than {MAX_VECTORS_PER_CALL} vectors. The first {MAX_VECTORS_PER_CALL} are accepted; send "
        "the rest in another call.",
        field="vector",
    )


def _not_serving() -> Failure:
    return Failure(
        Reason.ERROR_REASON_NOT_SERVING,
        "The service is loading the model or stopping. Wait until its health check says SERVING, then try again.",
    )


def _missing(parts: Parts, tenant: str, digests: Iterable[bytes]) -> list[bytes]:
    """Return which vectors a tenant has not sent. The answer does not depend on what other tenants have sent."""
    return [digest_in(name) for name in parts.vectors.missing(vector_name(tenant, digest) for digest in digests)]


def _model_info(parts: Parts) -> inference_pb2.GetModelInfoResponse:
    facts, settings = parts.engine.facts, parts.settings
    stores = parts.stores.addresses() if parts.stores else []
    return inference_pb2.GetModelInfoResponse(
        model=facts.name,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        dtype=facts.dtype,
        sites=facts.sites,
        site_widths=facts.site_widths,
        site_layers=[selection_pb2.LayerList(layers=layers) for layers in facts.site_layers],
        steering_sites=facts.steering_sites,
        probe_sites=facts.probe_sites,
        attention=[inference_pb2.AttentionLayer(**layer) for layer in facts.attention],
        steering_operations=OPERATIONS,
        gate_measures=GATE_MEASURES,
        encodings=facts.encodings,
        reductions=facts.reductions,
        adapters=facts.adapters,
        default_encoding=facts.capture_defaults.encoding,
        limits=inference_pb2.Limits(
            max_model_len=facts.max_model_len,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_operations=MAX_OPERATIONS,
            max_vectors=cache_capacity(settings.max_vectors, settings.max_vector_mib, facts.hidden_size),
            max_active_vectors=settings.max_active_vectors,
            max_running_requests=facts.max_num_seqs * facts.data_parallel_size,
            max_registrations=settings.max_registrations,
            max_sequences=MAX_SEQUENCES,
            capture_pool_bytes=facts.pool_bytes,
            ring_bytes=facts.ring_bytes,
            table_bytes=facts.table_bytes,
            max_logprobs=facts.max_logprobs,
            max_probe_outputs=MAX_PROBE_OUTPUTS if facts.probe_sites else 0,
            max_rules=MAX_RULES if facts.probe_sites else 0,
            sae_bytes=facts.sae_bytes,
            max_probe_heads=MAX_PROBE_HEADS if facts.probe_sites else 0,
            max_probe_places=MAX_PROBE_PLACES if facts.probe_sites else 0,
        ),
        vllm_version=facts.vllm_version,
        server_version=version("residuum"),
        store_endpoints=[store.endpoint for store in stores],
        stores=stores,
        layout=capture_pb2.ParallelLayout(
            tensor_parallel_size=facts.tensor_parallel_size, pipeline_parallel_size=facts.pipeline_parallel_size
        ),
        eager=facts.eager,
    )
