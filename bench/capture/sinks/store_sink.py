"""The destination for rows that go to stores."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from bench.capture.sinks.sink import Arrived, RowsMissingError
from inference_svc.shipping.supervisor import ShipperSupervisor
from inference_svc.taps.plan import RowEncoding
from residuum.rpc.channels import open_aio_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from residuum.wire.placement import first_rank, parse_stores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.model_facts import ModelFacts

_STOP_SECONDS = 10.0
_END_SECONDS = 60
_SEALS_AT_ONCE = 32


class StoreSink:
    """Shippers and one or more stores, each in a separate process."""

    knows_complete = True

    def __init__(
        self, facts: ModelFacts, stores: Sequence[str], shippers: int, layers: Sequence[int], new_tokens: int
    ) -> None:
        self._facts = facts
        self._new_tokens = new_tokens
        self._layers = layers
        self._supervisor = ShipperSupervisor(facts.control_paths, stores, shippers)
        self._channels = {store.name: open_aio_channel(store.endpoint) for store in parse_stores(stores)}

    async def start(self) -> None:
        """See `CaptureSink`."""
        await self._supervisor.start()

    async def begin(self, prompts: Mapping[str, Sequence[int]], encoding: RowEncoding | None = None) -> None:
        """See `CaptureSink`."""
        for capture_id, prompt in prompts.items():
            description = self._describe(capture_id, prompt, encoding or RowEncoding())
            await self._store(capture_id).OpenCapture(store_pb2.OpenCaptureRequest(description=description))

    async def complete(self, replies: Mapping[str, Sequence[int]]) -> None:
        """See `CaptureSink`. Seals as the service does when requests end together: many captures in a call."""
        await self._end(replies)

    async def finish(self, replies: Mapping[str, Sequence[int]]) -> Arrived:
        """See `CaptureSink`. Seals again to check that each capture is COMPLETE, then deletes them to free room."""
        manifests = await self._end(replies)
        for capture_id in replies:
            await self._store(capture_id).DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=capture_id))
        return Arrived(
            sum(manifest.num_rows for manifest in manifests), sum(manifest.num_bytes for manifest in manifests)
        )

    async def stop(self) -> None:
        """See `CaptureSink`."""
        await self._supervisor.stop(_STOP_SECONDS)
        for channel in self._channels.values():
            await channel.close()

    def _store(self, capture_id: str) -> store_pb2_grpc.StoreServiceAsyncStub:
        return store_pb2_grpc.StoreServiceStub(self._channels[first_rank(self._channels, capture_id)])

    async def _end(self, replies: Mapping[str, Sequence[int]]) -> list[capture_pb2.CaptureManifest]:
        """Seal captures, wait until each is COMPLETE, and return their manifests."""
        seals: dict[str, list[store_pb2.SealCaptureRequest]] = {}
        for capture_id, reply in replies.items():
            outcome = capture_pb2.SequenceOutcome(generated_token_ids=reply, finish_reason="length")
            seals.setdefault(first_rank(self._channels, capture_id), []).append(
                store_pb2.SealCaptureRequest(
                    capture_id=capture_id, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_COMPLETE
                )
            )
        await asyncio.gather(
            *(
                self._seal(name, of_store[at : at + _SEALS_AT_ONCE])
                for name, of_store in seals.items()
                for at in range(0, len(of_store), _SEALS_AT_ONCE)
            )
        )
        return await asyncio.gather(*map(self._completed, replies))

    async def _seal(self, store: str, seals: Sequence[store_pb2.SealCaptureRequest]) -> None:
        stub = store_pb2_grpc.StoreServiceStub(self._channels[store])
        answer = await stub.SealCaptures(store_pb2.SealCapturesRequest(seals=seals))
        for seal, result in zip(seals, answer.results, strict=True):
            if result.HasField("error"):
                raise RowsMissingError(f"{seal.capture_id} was not sealed: {result.error.message}")

    async def _completed(self, capture_id: str) -> capture_pb2.CaptureManifest:
        answer = await self._store(capture_id).GetCapture(
            store_pb2.GetCaptureRequest(capture_id=capture_id, wait=Duration(seconds=_END_SECONDS))
        )
        if answer.manifest.state != capture_pb2.CAPTURE_STATE_COMPLETE:
            state = capture_pb2.CaptureState.Name(answer.manifest.state)
            raise RowsMissingError(f"{capture_id} ended as {state}: {answer.manifest.incomplete_detail}")
        return answer.manifest

    def _describe(
        self, capture_id: str, prompt: Sequence[int], encoding: RowEncoding
    ) -> capture_pb2.CaptureDescription:
        facts = self._facts
        spec = capture_pb2.CaptureSpec(
            sites=facts.sites,
            encoding=encoding.encoding,
            encoding_options=capture_pb2.EncodingOptions(
                dimensions=encoding.dimensions, seed=encoding.seed, axis=encoding.axis
            ),
            overflow=capture_pb2.OVERFLOW_POLICY_WAIT,
        )
        spec.layers.list.layers.extend(self._layers)
        description = capture_pb2.CaptureDescription(
            capture_id=capture_id,
            model=facts.name,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            dtype=facts.dtype,
            spec=spec,
            prompt_token_ids=prompt,
            num_sequences=1,
            layout=capture_pb2.ParallelLayout(
                tensor_parallel_size=facts.tensor_parallel_size, pipeline_parallel_size=facts.pipeline_parallel_size
            ),
            vllm_version=facts.vllm_version,
            max_generated_tokens=self._new_tokens,
        )
        description.request_time.GetCurrentTime()
        return description
