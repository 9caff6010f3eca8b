"""The stores that captures go to, as the inference service sees them: each capture has one, by the hash of its id."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inference_svc.captures.keeper import CaptureKeeper
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2, placement_pb2
from residuum.wire.ids import make_id
from residuum.wire.placement import StoreAddress, first_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residuum.rpc.credentials import Credentials
    from residuum.v1 import capture_pb2, store_pb2


_DRAWS = 64
"""How often an id is drawn because its store does not answer: the only one of 16 that does is found 98 times in 100."""


class Stores:
    """Opens and seals captures, each in its own store.

    An id never gets two captures. Within a store the store sees to it. Across stores it could only come about where the
    list has changed: an older capture stays where it was, and its id belongs to another store now. Ids that the service
    makes are new everywhere; for those that callers choose, the other stores are asked before a capture is made, and if
    one does not answer, none is made.

    So requests without an id of their own do not depend on any one store: an id is drawn whose store answers.
    """

    def __init__(
        self,
        stores: Sequence[StoreAddress],
        advertised: Sequence[StoreAddress] = (),
        credentials: Credentials | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        """Connect lazily to one or more stores.

        Args:
            stores: The stores as they are reached from here.
            advertised: The same in the same order, as clients reach them. Empty: as from here.
            credentials: What they are shown.
            fixed: The list has never changed: an id can only be in its own store, so no other is asked.
        """
        self.advertised = tuple(advertised or stores)
        """The stores as clients reach them."""
        self.keepers = {store.name: CaptureKeeper(store, credentials, is_alone=len(stores) == 1) for store in stores}
        """What speaks to each store, by its name."""
        self._endpoints = {store.name: store.endpoint for store in self.advertised}
        self._fixed = fixed

    def of(self, capture_id: str) -> CaptureKeeper:
        """Return what speaks to the store of a capture."""
        return self.keepers[first_rank(self.keepers, capture_id)]

    def make_id(self) -> str:
        """Make an id for a request, of which every store gets its share; one that has just not answered gets none."""
        for _ in range(_DRAWS):
            drawn = make_id()
            if not self.of(drawn).is_avoided:
                break
        return drawn

    def handle(self, capture_id: str) -> inference_pb2.CaptureHandle:
        """Return where clients find a capture."""
        name = self.of(capture_id).store.name
        return inference_pb2.CaptureHandle(capture_id=capture_id, store_endpoint=self._endpoints[name], store=name)

    def addresses(self) -> list[placement_pb2.StoreAddress]:
        """Return where clients find the stores."""
        return [placement_pb2.StoreAddress(name=store.name, endpoint=store.endpoint) for store in self.advertised]

    async def check(self) -> list[inference_pb2.StoreCheck]:
        """Ask every store whether it answers, all at once."""
        return list(await asyncio.gather(*map(_check, self.keepers.values())))

    async def open(self, description: capture_pb2.CaptureDescription, *, is_new_id: bool) -> None:
        """Create a capture in its store.

        Args:
            description: What it is of.
            is_new_id: The service has just made its id, so that no store can have it.

        Raises:
            Failure: The store does not answer, or refuses; or another one has a capture of this id, or may have one and
                does not answer. NoAnswerError says that the capture may have been created.
        """
        keeper = self.of(description.capture_id)
        others = [other for other in self.keepers.values() if other is not keeper]
        if others and not is_new_id and not self._fixed:
            await asyncio.gather(*(_check_free(other, description) for other in others))
        await keeper.open(description)

    def seal(self, request: store_pb2.SealCaptureRequest) -> None:
        """Say how a request ended; see `CaptureKeeper.seal`."""
        self.of(request.capture_id).seal(request)

    async def close(self, grace_seconds: float) -> None:
        """Wait for seals that are under way, and disconnect."""
        await asyncio.gather(*(keeper.close(grace_seconds) for keeper in self.keepers.values()))


async def _check(keeper: CaptureKeeper) -> inference_pb2.StoreCheck:
    check = inference_pb2.StoreCheck(store=keeper.store.name, endpoint=keeper.store.endpoint)
    try:
        check.server_version = (await keeper.check_reachable()).server_version
    except Failure as failure:
        check.error.CopyFrom(failure.to_item_error())
    return check


async def _check_free(keeper: CaptureKeeper, description: capture_pb2.CaptureDescription) -> None:
    name = description.capture_id
    try:
        await keeper.check_free(description)
    except Failure as failure:
        if failure.reason == Reason.ERROR_REASON_CAPTURE_EXISTS:
            raise Failure(
                failure.reason,
                f"The store {keeper.store} holds a capture {name!r} from before the list of stores was what it is now; "
                "choose another id, or delete that capture first.",
                capture_id=name,
                store=keeper.store.name,
            ) from None
        if failure.reason != Reason.ERROR_REASON_STORE_UNREACHABLE:
            raise
        # Never a NoAnswerError: nothing was asked for that might have been done.
        raise Failure(
            failure.reason,
            f"The store {keeper.store} may hold a capture {name!r} from before the list of stores was what it is now, "
            "and cannot be asked. Leave the id to the service, or try again when that store answers; if the list never "
            f"changed, start the service with --fixed-stores. ({failure.message})",
            **{**failure.metadata, "capture_id": name},
        ) from None


def require_stores(stores: Stores | None) -> Stores:
    """Return the stores.

    Raises:
        Failure: The service was started without a store.
    """
    if stores is None:
        raise Failure(
            Reason.ERROR_REASON_STORE_UNREACHABLE,
            "This server was started without a store and captures nothing; start it with --store HOST:PORT.",
            endpoint="",
        )
    return stores
