"""The stores of the inference service. The hash of its ID assigns each capture to one of them (its placement)."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from inference_svc.captures.keeper import CaptureKeeper
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, placement_pb2
from residuum.wire.ids import make_id
from residuum.wire.placement import StoreAddress, first_rank

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from typing_extensions import Self

    from inference_svc.tap_settings import TapSettings
    from residuum.rpc.credentials import Credentials
    from residuum.v1 import store_pb2


_DRAWS = 64
"""How many IDs are tried to find one whose store answers. If only 1 of 16 stores does, 64 find it in 98 % of cases."""


class Stores:
    """Opens and seals captures, each in the store that its placement names.

    No ID ever gets two captures. Within one store, the store ensures that. Across stores, a change of the list of
    stores could break it: an older capture stays in its store, while its ID now belongs to another one. IDs that the
    service makes are new everywhere. For an ID that a caller chose, the service first asks all other stores whether
    they hold it. If one does not answer, the capture is not opened.

    Requests without an ID of their own do not depend on any single store: the service chooses an ID whose store
    answers.
    """

    def __init__(
        self,
        stores: Sequence[StoreAddress],
        advertised: Sequence[StoreAddress] = (),
        credentials: Credentials | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        """Prepare to call one or more stores; the first call to each connects.

        Args:
            stores: The stores at the addresses where this service reaches them.
            advertised: The stores at the addresses where clients reach them, in the same order. Empty: the same.
            credentials: The credentials for all stores.
            fixed: The list of stores has never changed, so other stores need not be asked about an ID.
        """
        self.advertised = tuple(advertised or stores)
        """The stores at the addresses where clients reach them."""
        self.keepers = {store.name: CaptureKeeper(store, credentials, is_alone=len(stores) == 1) for store in stores}
        """The keeper of each store, by the store's name."""
        self._only = next(iter(self.keepers.values())) if len(self.keepers) == 1 else None
        self._instance = f"service-{secrets.token_hex(12)}"
        self._endpoints = {store.name: store.endpoint for store in self.advertised}
        self._fixed = fixed

    @classmethod
    def from_settings(cls, settings: TapSettings, advertised: Sequence[StoreAddress] = ()) -> Self:
        """Return the stores of the settings; see the class."""
        return cls(settings.stores, advertised, settings.store_credentials, fixed=settings.fixed_stores)

    def of(self, capture_id: str) -> CaptureKeeper:
        """Return the keeper of the store that a capture belongs to."""
        if self._only is not None:
            return self._only  # every request asks several times
        return self.keepers[first_rank(self.keepers, capture_id)]

    def make_id(self) -> str:
        """Return a new ID for a request. IDs spread evenly over the stores, except those that just failed to answer."""
        for _ in range(_DRAWS):
            drawn = make_id()
            if not self.of(drawn).is_avoided:
                break
        return drawn

    def handle(self, capture_id: str) -> inference_pb2.CaptureHandle:
        """Return the handle with which clients find a capture."""
        name = self.of(capture_id).store.name
        return inference_pb2.CaptureHandle(capture_id=capture_id, store_endpoint=self._endpoints[name], store=name)

    def addresses(self) -> list[placement_pb2.StoreAddress]:
        """Return the addresses at which clients find the stores."""
        return [placement_pb2.StoreAddress(name=store.name, endpoint=store.endpoint) for store in self.advertised]

    async def check(self) -> list[inference_pb2.StoreCheck]:
        """Check concurrently whether each store answers."""
        return list(await asyncio.gather(*map(_check, self.keepers.values())))

    def takes_early_rows(self, capture_id: str, *, is_new_id: bool, if_exists: capture_pb2.IfExists.ValueType) -> bool:
        """Return whether rows of a capture may be sent before it is opened.

        Its store must have said so in answer to an earlier open. A capture that may replace or skip another one is
        opened first, and so is one whose ID other stores may hold.
        """
        has_free_id = is_new_id or self._fixed or self._only is not None
        return has_free_id and self.of(capture_id).takes_early_rows(if_exists)

    async def open(
        self,
        description: capture_pb2.CaptureDescription,
        *,
        is_new_id: bool,
        if_exists: capture_pb2.IfExists.ValueType = capture_pb2.IF_EXISTS_FAIL,
        on_queued: Callable[[], object] = lambda: None,
    ) -> capture_pb2.CaptureManifest | None:
        """Create a capture in its store.

        Args:
            description: The capture's ID, tenant and contents.
            is_new_id: The service has just made the ID, so no store can hold it.
            if_exists: What to do if its store holds a capture with this ID. A capture in another store, from before the
                list of stores changed, is neither replaced nor skipped.
            on_queued: Called when rows may be sent; see `CaptureKeeper.open`.

        Returns:
            The manifest of the existing capture that is the result (IF_EXISTS_SKIP); None: a capture was created.

        Raises:
            Failure: The store does not answer, or refuses. Or another store holds a capture with this ID, or does not
                answer whether it does. After a NoAnswerError the capture may have been created.
        """
        keeper = self.of(description.capture_id)
        others = [other for other in self.keepers.values() if other is not keeper]
        if others and not is_new_id and not self._fixed:
            await asyncio.gather(*(_check_free(other, description) for other in others))
        description.service_instance = self._instance
        return await keeper.open(description, if_exists, on_queued)

    def seal(
        self,
        request: store_pb2.SealCaptureRequest,
        complete: Callable[[store_pb2.SealCaptureRequest], Awaitable[None]] | None = None,
    ) -> None:
        """Seal a capture in the background; see `CaptureKeeper.seal`."""
        self.of(request.capture_id).seal(request, complete)

    async def close(self, grace_seconds: float) -> None:
        """Wait up to the grace for seals in progress, then disconnect."""
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
                f"The store {keeper.store} holds a capture {name!r} from before the list of stores changed. Choose "
                "another ID, or delete that capture first.",
                capture_id=name,
                store=keeper.store.name,
            ) from None
        if failure.reason != Reason.ERROR_REASON_STORE_UNREACHABLE:
            raise
        # Never a NoAnswerError, because after one a capture may exist, and this check creates none.
        raise Failure(
            failure.reason,
            f"The store {keeper.store} may hold a capture {name!r} from before the list of stores changed, and it does "
            "not answer. Let the service choose the ID, or try again when that store answers. If the list of stores "
            f"never changed, start the service with --fixed-stores. ({failure.message})",
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
