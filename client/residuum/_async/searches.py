"""The asyncio client's search for tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import grpc
import grpc.aio

from residuum import exceptions as exc
from residuum._async import io
from residuum._async.captures import AsyncCaptureClient
from residuum.protocol.captures.searching import SearchAnswer, merged, search_request
from residuum.protocol.captures.tenants import for_tenant
from residuum.protocol.deadlines import Deadline
from residuum.protocol.requests import RequestLike
from residuum.transport.connections import ReadRetries
from residuum.transport.failures import is_unknown_call
from residuum.transport.progress import progress_bar
from residuum.values.replies.search import SearchResult
from residuum.values.selections.layers_and_positions import PositionsLike
from residuum.values.tensors.vector import Vector

if TYPE_CHECKING:
    import numpy.typing as npt


class AsyncSearchClient(AsyncCaptureClient):
    """The methods for captures, with the search for tokens; the base class of `AsyncUploadClient`."""

    async def search(
        self,
        vector: Vector | Mapping[int, Vector] | npt.ArrayLike,
        *,
        layer: int,
        k: int = 50,
        site: str | None = None,
        measure: Literal["projection", "cosine"] = "projection",
        order: Literal["most", "least", "absolute"] = "most",
        per_capture: int | None = None,
        context: int = 8,
        captures: Iterable[RequestLike] | None = None,
        prefix: str = "",
        states: str | Iterable[str] = (),
        where: str = "",
        positions: PositionsLike = None,
        timeout: float | None = None,
        progress: bool = False,
    ) -> SearchResult:
        """Find the tokens whose rows project most onto a direction, over the captures of all stores.

        The stores scan the rows; only the found tokens leave them, with their text. So a search of many gigabytes needs
        no memory here. Captures that are still open are left out. `SearchResult.left_out` says what else was.

        Args:
            vector: The direction, float32 [width]; or `Directions`, which have one for each layer. It need not be
                normalized.
            layer: The layer.
            k: The most tokens to return, up to 10,000.
            site: The site. By default that of `Directions`, otherwise "resid_post". `Directions` of z, mlp_act or
                another site beside the residual stream can be searched for only at their own site.
            measure: "projection": the dot product of row and vector. "cosine": the cosine of their angle.
            order: "most": the largest scores. "least": the smallest, negative ones first. "absolute": the largest
                absolute values.
            per_capture: The most tokens of one capture; None means no limit.
            context: Tokens of text before and after each token, up to 64.
            captures: Only these captures, as requests, replies or IDs, up to 4,096; None means those that the filter
                selects.
            prefix: Only captures whose ID starts with this.
            states: Only captures in these states, such as "complete"; without, all that have ended.
            where: Only captures whose labels match this, such as "split = train and y >= 2".
            positions: Only these positions; None means all. See `Positions.of`.
            timeout: The most seconds to search; None means no limit.
            progress: Show a progress bar, on a terminal or in Jupyter.

        Returns:
            The tokens, the best first. Equal scores are sorted by capture, sequence and position.

        Raises:
            InvalidRequest: An argument is invalid, no capture matches, or none could be searched.
            BadVector: The vector is invalid or zero.
            UnknownCapture: One of `captures` does not exist.
            DeadlineExceeded: The timeout expired.
            LimitReached: The store already serves as many searches as it may.
            Unreachable: A store was away until the timeout.

        Example:
            >>> print(await client.search(joy, layer=12, k=2, where="split = train"))
            score  capture  sequence:position  text
            41.32  train-7  0:5                She was so« happy» to see
            40.08  train-2  0:9                what a« joy»ful day
            2 of 24,310 rows of 500 captures
        """
        request = search_request(
            vector, layer=layer, k=k, site=site, measure=measure, order=order, per_capture=per_capture,
            context=context, captures=captures, prefix=prefix, states=states, where=where, positions=positions,
        )  # fmt: skip
        for_tenant(request, self._tenant)
        deadline = Deadline(timeout)
        endpoints = [store.endpoint for store in await self._refreshed_stores(deadline)]
        answers = [SearchAnswer() for _ in endpoints]
        with progress_bar("searching", None, enabled=progress, of_bytes=True) as advance:

            async def search(lane: int, stop: io.Stop) -> None:
                retries = ReadRetries(deadline)
                while True:
                    answers[lane] = SearchAnswer()
                    call = self._store(endpoints[lane]).Search(request, timeout=deadline.remaining())
                    stop.watch(call)
                    try:
                        async for response in call:
                            retries.progress()
                            self._channels.note_answer(endpoints[lane])
                            advance(answers[lane].take(response))
                            if stop.is_requested:
                                return
                    except grpc.RpcError as error:
                        if stop.is_requested:
                            return
                        delay = self._search_again_after(error, endpoints[lane], retries)
                    else:
                        return
                    finally:
                        call.cancel()
                    await io.sleep(delay)

            await io.run_all([search] * len(endpoints))
        return merged(request, answers)

    def _search_again_after(self, error: grpc.RpcError, endpoint: str, retries: ReadRetries) -> float:
        """Return the seconds after which a search that failed begins again.

        Raises:
            ResiduumError: It does not.
        """
        failure = self._as_own(error, endpoint)
        if is_unknown_call(failure):
            raise exc.ServerFault(f"The store at {endpoint} is too old to search. Upgrade it.") from None
        delay = retries.seconds_after(failure, self._patience(failure))
        if delay is None:
            raise (retries.verdict(failure) or failure) from None
        return delay
