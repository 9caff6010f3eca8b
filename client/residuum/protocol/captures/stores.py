"""The stores, and the search for the store of a capture. No I/O: both clients use it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from residuum import exceptions as exc
from residuum.protocol.arguments import check_texts
from residuum.protocol.caller import warn_caller
from residuum.protocol.endpoints import check_endpoint
from residuum.v1 import inference_pb2
from residuum.wire.limits import MAX_CAPTURES_PER_READ
from residuum.wire.placement import StoreAddress, first_rank, parse_stores, ranks

READ_STORE_ALONE = "To read captures from the store alone, name it: Client(..., store='host:port')."
"""Advice if an inference service does not answer."""


def check_stores(store: str | Iterable[str] | None) -> str | tuple[str, ...] | None:
    """Return an argument `store=` after checking its type. A list becomes a tuple, because it may be an iterator.

    Raises:
        TypeError: It is neither a text nor a list of texts.
    """
    return store if store is None or isinstance(store, str) else tuple(check_texts("store", store))


def named_stores(stores: str | Iterable[str] | None) -> tuple[StoreAddress, ...]:
    """Return the stores that a user names: "host:port" or "name=host:port", several as a list or separated by commas.

    Raises:
        InvalidRequest: A store is malformed, or two share a name or an endpoint.
    """
    given = [stores] if isinstance(stores, str) else list(stores or ())
    try:
        named = parse_stores(text for item in given for text in item.split(","))
    except ValueError as error:
        raise exc.InvalidRequest(f"{error}.".capitalize(), reason="INVALID_FIELD") from None
    for store in named:
        check_endpoint(store.endpoint)
    return named


class StoreDirectory:
    """The stores, and the known places of captures."""

    _REMEMBERED = 100_000
    """The most captures whose store is remembered. The oldest are forgotten, and searched for when needed."""

    def __init__(self, stores: str | Iterable[str] | None) -> None:
        """Start with the stores that the user named, if any; see `is_named`."""
        self._stores = named_stores(stores)
        self.is_named = bool(self._stores)
        """Whether the user named the stores. If so, the addresses from the inference service are ignored."""
        self._last: dict[StoreAddress, None] = {}
        self._is_whole = False
        self._of: OrderedDict[str, StoreAddress] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def stores(self) -> tuple[StoreAddress, ...]:
        """The stores. If empty, ask the inference service and call `learn`."""
        return self._stores

    def learn(self, stores: Iterable[StoreAddress], inference: str) -> tuple[StoreAddress, ...]:
        """Set the stores that the inference service named, and return the stores.

        Raises:
            NoStore: The inference service named none.
        """
        advertised = tuple(stores)
        if not advertised:
            raise exc.NoStore(
                f"The inference service at {inference} has no store, so it captures nothing. Start it with --store. To "
                "read captures of another store, name it: Client(..., store='host:port')."
            )
        if not self.is_named:
            self._stores = advertised
            self._last, self._is_whole = dict.fromkeys(advertised), True
        return self._stores

    def last_known(self, *, warns: bool) -> tuple[StoreAddress, ...]:
        """Return the stores without the inference service: those that it named last, and those of its captures.

        Warns:
            SilentStoreWarning: `warns` is true, and the inference service never named its stores, or has others by now.
        """
        self._stores = tuple(self._last)
        if warns and self._stores and not self._is_whole:
            warn_caller(
                "The inference service does not answer, so its list of stores is unknown. The client uses the stores "
                f"of its own captures: {', '.join(map(str, self._stores))}. What other stores hold is left out. "
                f"{READ_STORE_ALONE}",
                exc.SilentStoreWarning,
            )
        return self._stores

    def note(self, handle: inference_pb2.CaptureHandle) -> None:
        """Remember the store of a capture, as the inference service named it."""
        if not handle.store_endpoint:
            return
        advertised = StoreAddress(handle.store or handle.store_endpoint, handle.store_endpoint)
        if not self.is_named:
            self._is_whole = self._is_whole and advertised in self._last
            self._last[advertised] = None
            if self._stores and advertised not in self._stores:
                self._stores = ()  # the list has changed; ask for it again when it is needed
            self.found(handle.capture_id, advertised)
            return
        for store in self._stores:  # compare names, because the user may have given another address
            if store.name == advertised.name:
                self.found(handle.capture_id, store)

    def found(self, capture_id: str, store: StoreAddress) -> None:
        """Remember the store of a capture."""
        with self._lock:
            self._of[capture_id] = store
            while len(self._of) > self._REMEMBERED:
                self._of.popitem(last=False)

    def forget(self, capture_id: str) -> None:
        """Forget the store of a capture, which does not hold it any more."""
        with self._lock:
            self._of.pop(capture_id, None)

    def known(self, capture_id: str) -> StoreAddress | None:
        """Return the store of a capture; None if it is unknown and must be searched for."""
        known = self._of.get(capture_id)
        if known is None:
            return self._stores[0] if len(self._stores) == 1 else None
        # A store may have got another address since.
        return next((store for store in self._stores if store.name == known.name), known)

    def by_likely_store(
        self,
        capture_ids: Iterable[str],
        known_stores: Iterable[StoreAddress],
        at_most: int = MAX_CAPTURES_PER_READ,
    ) -> list[tuple[str, Sequence[str]]]:
        """Group captures by the endpoint of their store, in groups of at most as many as one call may name.

        If the store of a capture is unknown, it is assumed to be the one of `known_stores` that placement chooses for
        its ID.
        """
        stores = {store.name: store for store in known_stores}
        groups: dict[str, list[str]] = {}
        for capture_id in capture_ids:
            store = self.known(capture_id) or stores[first_rank(stores, capture_id)]
            groups.setdefault(store.endpoint, []).append(capture_id)
        return [
            (endpoint, names[first : first + at_most])
            for endpoint, names in groups.items()
            for first in range(0, len(names), at_most)
        ]


class Search:
    """The search for a capture: asks one store after the other, in the order of their ranks.

    The capture is unknown only if every store says so. If a store does not answer, the capture may be there.
    """

    def __init__(self, capture_id: str) -> None:
        """Start a search."""
        self._capture_id = capture_id
        self._asked: set[StoreAddress] = set()
        self._unknown: exc.UnknownCapture | None = None
        self._silent: dict[StoreAddress, exc.ResiduumError] = {}

    def order(self, stores: Sequence[StoreAddress]) -> list[StoreAddress]:
        """Return the stores that were not asked yet, in the order in which to ask them."""
        by_name = {store.name: store for store in stores if store not in self._asked}
        return [by_name[name] for name in ranks(by_name, self._capture_id)]

    def missed(self, store: StoreAddress, failure: exc.ResiduumError) -> None:
        """Note that a store does not have the capture, or did not answer.

        Raises:
            ResiduumError: The failure is of another kind, which ends the search.
        """
        self._asked.add(store)
        if isinstance(failure, exc.UnknownCapture):
            self._unknown = failure
        elif isinstance(failure, (exc.Unavailable, exc.DeadlineExceeded)):
            self._silent[store] = failure
        else:
            raise failure

    def failure(self) -> exc.ResiduumError:
        """Return the exception for a search in which no store had the capture."""
        if self._silent:
            return silent_store(self._silent, f"The capture {self._capture_id} may be there: no other store holds it.")
        if len(self._asked) == 1 and self._unknown:
            return self._unknown
        names = ", ".join(map(str, sorted(self._asked)))
        return exc.UnknownCapture(
            f"No store holds the capture {self._capture_id!r}: it was never opened, was deleted, or has expired. The "
            f"stores are {names}.",
            reason="UNKNOWN_CAPTURE",
            metadata={"capture_id": self._capture_id},
        )


def silent_store(silent: dict[StoreAddress, exc.ResiduumError], consequence: str) -> exc.Unreachable:
    """Return the exception for stores that did not answer; `consequence` says what is unknown because of that."""
    names = " and ".join(map(str, silent))
    store, failure = next(iter(silent.items()))
    error = exc.Unreachable(
        f"{'The store' if len(silent) == 1 else 'The stores'} {names} "
        f"{'does' if len(silent) == 1 else 'do'} not answer. {consequence} ({failure})",
        endpoint=store.endpoint,
        is_refusal=isinstance(failure, exc.Unreachable) and failure.is_refusal,
    )
    error.reason = failure.reason
    error.metadata["store"] = store.name
    return error
