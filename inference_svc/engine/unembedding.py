"""The logit lens: the tokens that rows of the residual stream predict."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inference_svc.admission.fields import invalid
from inference_svc.resources.sae_memory import sae_name
from inference_svc.resources.vector_cache import vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from residuum.wire.limits import MAX_UNEMBEDDED
from residuum.wire.sae import AS_IS, NO_ACTIVATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from inference_svc.engine.engine import Engine
    from inference_svc.model_facts import ModelFacts
    from inference_svc.requests.registry import RequestRegistry
    from inference_svc.resources.sae_memory import SAEMemory

_LOGITS_AT_A_TIME = 1 << 24
"""Logits that the engine computes at a time, 64 MiB of float32. Between two times, its steps go on."""

_MAX_CALLS = 32
"""Calls that may run or wait. Each holds a message of up to 4 MiB."""


class Predicted(NamedTuple):
    """The most likely tokens of rows, and the log-probability and the rank of one given token for each row."""

    top_ids: npt.NDArray[np.int64]
    """int64 [rows, k], the most likely first."""
    top: npt.NDArray[np.float32]
    """Their log-probabilities, float32 [rows, k]."""
    tokens: npt.NDArray[np.float32]
    """The log-probabilities of the given tokens, float32 [tokens]."""
    ranks: npt.NDArray[np.int64]
    """Their ranks among all tokens, int64 [tokens]; 1 is the most likely."""

    @classmethod
    def from_bytes(cls, parts: Sequence[bytes], num_top: int) -> Predicted:
        """Return the value of a worker's answer; see `TappedWorker.residuum_unembed`."""
        top_ids, top, tokens, ranks = (
            np.frombuffer(part, dtype) for part, dtype in zip(parts, ("<i8", "<f4", "<f4", "<i8"), strict=True)
        )
        rows = len(top_ids) // num_top if num_top else 0
        return cls(top_ids.reshape(rows, num_top), top.reshape(rows, num_top), tokens, ranks)

    @classmethod
    def joined(cls, parts: Sequence[Predicted]) -> Predicted:
        """Return the value of consecutive rows."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Unembedding:
    """Answers Unembed. One call at a time uses the engine, so that its steps wait for few rows only."""

    def __init__(self, engine: Engine, saes: SAEMemory, registry: RequestRegistry) -> None:
        """Use an engine, and the encoders that clients have sent: maps of lenses are among them."""
        self._engine = engine
        self._saes = saes
        self._registry = registry
        self._free = asyncio.Lock()
        self.calls = 0
        """Calls that run or wait now."""

    async def answer(self, request: inference_pb2.UnembedRequest, tenant: str = "") -> inference_pb2.UnembedResponse:
        """Return the tokens that the rows of a request predict.

        Args:
            request: The request.
            tenant: The tenant of the caller, whose map the request may name.

        Raises:
            Failure: The request is invalid, the workers lack its map, too many calls wait, or the engine is dead.
        """
        if self.calls >= _MAX_CALLS:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"{_MAX_CALLS} calls of Unembed already run or wait, this server's limit. Retry later.",
                limit="unembed",
            )
        self.calls += 1
        try:
            if not request.HasField("map"):
                return await self._answer(request, "")
            self._check_map(request.map, tenant)
            with self._registry.holding(vector_name(tenant, request.map.digest)):
                return await self._answer(request, sae_name(tenant, request.map.digest))
        finally:
            self.calls -= 1

    def _check_map(self, asked: inference_pb2.LensMap, tenant: str) -> None:
        """Check that the workers have a map, and that it turns rows of the residual stream into such rows."""
        digest = asked.digest.hex()
        shape = self._saes.shape_of(tenant, asked.digest)
        if (shape.activation, shape.normalization) != (NO_ACTIVATION, AS_IS):
            raise invalid(
                "map", f"The encoder {digest} has an activation or a normalization. The map of a lens has neither."
            )
        width = self._engine.facts.hidden_size
        if (shape.features, shape.width) != (width, width):
            raise invalid(
                "map",
                f"The map {digest} turns rows of {shape.width} elements into rows of {shape.features}, but the "
                f"residual stream has {width}. Use a lens of this model.",
            )

    async def _answer(self, request: inference_pb2.UnembedRequest, map_name: str) -> inference_pb2.UnembedResponse:
        facts = self._engine.facts
        rows = rows_of(request, facts)
        tokens = list(request.token_ids)
        step = max(1, _LOGITS_AT_A_TIME // facts.vocab_size)
        parts = []
        async with self._free:
            for first in range(0, len(rows), step):
                part = slice(first, first + step)
                some = rows[part]
                if map_name:
                    some = _mapped(some, await self._engine.map_rows(some, map_name), request.map)
                parts.append(await self._engine.unembed(some, request.num_top, tokens[part]))
        found = Predicted.joined(parts)
        logprobs = inference_pb2.Logprobs(
            tokens=found.tokens, num_top=request.num_top, top_token_ids=found.top_ids.ravel(), top=found.top.ravel()
        )
        texts = await self._engine.replies.vocabulary_texts(np.unique(found.top_ids).tolist())
        return inference_pb2.UnembedResponse(
            logprobs=logprobs,
            ranks=found.ranks,
            texts=[inference_pb2.TokenText(token_id=token, text=text) for token, text in texts.items()],
        )


def rows_of(request: inference_pb2.UnembedRequest, facts: ModelFacts) -> npt.NDArray[np.float32]:
    """Return the rows of a request, float32 [rows, hidden_size], after all checks.

    Raises:
        Failure: The request is invalid; the metadata names the field.
    """
    row_bytes = 4 * facts.hidden_size
    count, rest = divmod(len(request.rows), row_bytes)
    if rest or not count:
        raise invalid(
            "rows",
            f"There are {len(request.rows)} bytes. Send one or more rows of {facts.hidden_size} float32 elements, "
            f"{row_bytes} bytes each.",
        )
    if request.num_top > facts.vocab_size:
        raise invalid("num_top", f"The model has only {facts.vocab_size} tokens; ask for at most as many.")
    if count * (request.num_top + 1) > MAX_UNEMBEDDED:
        raise invalid(
            "rows",
            f"{count} rows of {request.num_top} tokens each make too long an answer. Send at most "
            f"{MAX_UNEMBEDDED // (request.num_top + 1)} rows in a call, or ask for fewer tokens.",
        )
    if len(request.token_ids) not in (0, count):
        raise invalid(
            "token_ids", f"There are {len(request.token_ids)} tokens for {count} rows; send one for each row, or none."
        )
    outside = [token for token in request.token_ids if token >= facts.vocab_size]
    if outside:
        raise invalid("token_ids", f"The token {outside[0]} is not in the vocabulary of {facts.vocab_size} tokens.")
    rows = np.frombuffer(request.rows, "<f4").reshape(count, -1)
    if not np.isfinite(rows).all():
        raise invalid("rows", "A row holds infinity or NaN.")
    return rows


def _mapped(
    rows: npt.NDArray[np.float32], outputs: npt.NDArray[np.float32], asked: inference_pb2.LensMap
) -> npt.NDArray[np.float32]:
    """Return what a map makes of rows, from its outputs.

    Raises:
        Failure: An element is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mapped = rows + outputs if asked.is_added else outputs
    if not np.isfinite(mapped).all():
        raise invalid(
            "map",
            f"The map {asked.digest.hex()} turns a row into infinity or NaN. Its weights are too large for these rows.",
        )
    return mapped
