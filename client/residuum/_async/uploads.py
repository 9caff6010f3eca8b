"""The asyncio client's uploads: steering vectors, probes, and encoders of sparse autoencoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from residuum import exceptions as exc
from residuum._async.searches import AsyncSearchClient
from residuum.protocol.generation import sae_upload, vector_upload
from residuum.v1 import inference_pb2
from residuum.values.probes.probe import Probe, probe_list
from residuum.values.replies.uploads import PutResult, PutSAEResult
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector


class AsyncUploadClient(AsyncSearchClient):
    """The methods that send vectors, probes and encoders; the base class of `AsyncGenerationClient`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._ledger = vector_upload.VectorLedger()
        self._saes = sae_upload.SAELedger()

    async def put_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> PutResult:
        """Send vectors, or those of Directions, that the server lacks. Calls that steer also do this.

        Raises:
            BadVector: The server refused a vector; it accepted the others.

        Example:
            >>> (await client.put_vectors([joy])).sent, (await client.put_vectors([joy])).sent
            (1, 0)
        """
        given = vector_upload.vector_list(vectors)
        return vector_upload.put_result(given, await self._provide(given))

    async def put_probes(self, probes: Probe | Iterable[Probe]) -> PutResult:
        """Send the vectors of probes, of different names, that the server lacks. Requests also do this.

        Raises:
            BadVector: The server refused a vector; it accepted the others.

        Example:
            >>> (await client.put_probes([probe])).sent
            1
        """
        return await self.put_vectors(vector for probe in probe_list(probes) for vector in probe.vectors)

    async def put_sae(self, sae: SAE) -> PutSAEResult:
        """Send the encoder of a sparse autoencoder, if the server lacks it. Requests that capture features do this.

        The server keeps it in device memory until it needs the room for another one.

        Raises:
            LimitReached: It does not fit into the server's memory for encoders; the message says what is left.
            BadSAE: Rows of the model have another width.
            InvalidRequest: The server has no memory for sparse autoencoders.

        Example:
            >>> (await client.put_sae(residuum.sae.load("sae/"))).free_bytes
            134217728
        """
        sae = sae_upload.check_sae(sae)
        return sae_upload.put_result(sae, await self._put_encoder(sae))

    async def find_missing_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> list[Vector]:
        """Return the vectors that the server lacks. Asking for the others prolongs the time that it keeps them."""
        given = vector_upload.vector_list(vectors)
        missing: set[bytes] = set()
        for request in vector_upload.find_requests(given):
            answer = await self._call(self.endpoint, self._inference.FindMissingVectors, request)
            missing.update(answer.missing_digests)
        return vector_upload.only(given, missing)

    async def _provide(self, vectors: Iterable[Vector]) -> list[Vector]:
        """Send the vectors that the server lacks, and return them."""
        unknown = self._ledger.unknown(vectors)
        if not unknown:
            return []
        missing = await self.find_missing_vectors(unknown)
        await self._send(missing)
        self._ledger.add(unknown)
        return missing

    async def _provide_sae(self, sae: sae_upload.Encoder | None) -> None:
        """Send an encoder if the server may lack it."""
        if sae is not None and not self._saes.knows(sae):
            await self._put_encoder(sae)

    async def _put_encoder(self, sae: sae_upload.Encoder) -> inference_pb2.PutSAEResponse:
        put = self._inference.PutSAE
        try:
            try:
                answer = await self._call(self.endpoint, put, sae_upload.find_requests(sae))
            except exc.MissingSAE:
                requests, extra = sae_upload.put_requests(sae), sae_upload.extra_seconds(sae)
                answer = await self._call(self.endpoint, put, requests, extra=extra)
        except exc.ResiduumError as failure:
            raise sae_upload.refusal(failure, sae) from None
        self._saes.add(sae)
        return answer

    async def _send(self, vectors: Sequence[Vector]) -> None:
        for part in vector_upload.put_calls(vectors):
            answer = await self._call(self.endpoint, self._inference.PutVectors, vector_upload.put_requests(part))
            vector_upload.check_results(part, answer)
