"""Which stores there are, and which of them has a capture. No I/O: both clients use it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from residuum import exceptions as exc
from residuum.protocol.endpoints import check_endpoint
from residuum.v1 import inference_pb2
from residuum.wire.limits import MAX_CAPTURES_PER_READ
from residuum.wire.placement import StoreAddress, first_rank, parse_stores, ranks


def named_stores(stores: str | Iterable[str] | None) -> tuple[StoreAddress, ...]:
    """Return the stores that a user names: "host:port" or "name=host:port", several in a list or between commas.

    Raises:
        InvalidRequest: One is malformed, or two are the same.
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
    """The stores, and which of them holds which capture, as far as it is known."""

    _REMEMBERED = 100_000
    """Captures whose store is remembered; the oldest are forgotten and looked for again."""

    def __init__(self, stores: str | Iterable[str] | None) -> None:
        """Begin with the stores that the user named, if any; then nothing else is asked or believed."""
        self._stores = named_stores(stores)
        self.is_named = bool(self._stores)
        """Whether the user named the stores: then what the inference service says of them is of no interest."""
        self._of: OrderedDict[str, StoreAddress] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def stores(self) -> tuple[StoreAddress, ...]:
        """The stores; empty: ask the inference service, then `learn`."""
        return self._stores

    def learn(self, stores: Iterable[StoreAddress], inference: str) -> tuple[StoreAddress, ...]:
        """Take the stores that the inference service named.

        Raises:
            NoStore: It named none.
        """
        told = tuple(stores)
        if not told:
            raise exc.NoStore(
                f"The inference service at {inference} names no store, so it captures nothing. Start it with --store, "
                "or name one here: Client(..., store='host:port')."
            )
        if not self.is_named:
            self._stores = told
        return self._stores

    def note(self, handle: inference_pb2.CaptureHandle) -> None:
        """Remember where the inference service says that a capture is."""
        if not handle.store_endpoint:
            return
        told = StoreAddress(handle.store or handle.store_endpoint, handle.store_endpoint)
        if not self.is_named:
            if self._stores and told not in self._stores:
                self._stores = ()  # the list has changed; it is asked for when it is needed
            self.found(handle.capture_id, told)
            return
        for store in self._stores:  # its name is the same everywhere, its address is not
            if store.name == told.name:
                self.found(handle.capture_id, store)

    def found(self, capture_id: str, store: StoreAddress) -> None:
        """Remember where a capture is."""
        with self._lock:
            self._of[capture_id] = store
            while len(self._of) > self._REMEMBERED:
                self._of.popitem(last=False)

    def forget(self, capture_id: str) -> None:
        """Forget where a capture was: it is not there."""
        with self._lock:
            self._of.pop(capture_id, None)

    def known(self, capture_id: str) -> StoreAddress | None:
        """Return the store of a capture, or None if it must be looked for."""
        known = self._of.get(capture_id)
        if known is not None:
            return known
        return self._stores[0] if len(self._stores) == 1 else None

    def by_likely_store(self, capture_ids: Iterable[str]) -> list[tuple[str, Sequence[str]]]:
        """Return captures by the endpoint of their store, as many together as one call may name.

        A capture whose store is not known goes to the one that new captures with its ID go to.
        """
        stores = {store.name: store for store in self._stores}
        groups: dict[str, list[str]] = {}
        for capture_id in capture_ids:
            store = self.known(capture_id) or stores[first_rank(stores, capture_id)]
            groups.setdefault(store.endpoint, []).append(capture_id)
        return [
            (endpoint, names[first : first + MAX_CAPTURES_PER_READ])
            for endpoint, names in groups.items()
            for first in range(0, len(names), MAX_CAPTURES_PER_READ)
        ]


class Search:
    """The search for a capture among stores: by rank, until one has it.

    That there is no such capture is the answer only if every store gave it. If one could not be asked, the capture may
    be there, and nobody can tell.
    """

    def __init__(self, capture_id: str) -> None:
        """Begin."""
        self._capture_id = capture_id
        self._asked: set[StoreAddress] = set()
        self._unknown: exc.UnknownCapture | None = None
        self._silent: dict[StoreAddress, exc.ResiduumError] = {}

    def order(self, stores: Sequence[StoreAddress]) -> list[StoreAddress]:
        """Return those that were not asked yet, in the order in which they are to be asked."""
        by_name = {store.name: store for store in stores if store not in self._asked}
        return [by_name[name] for name in ranks(by_name, self._capture_id)]

    def missed(self, store: StoreAddress, failure: exc.ResiduumError) -> None:
        """Note that a store does not have it, or cannot be asked.

        Raises:
            ResiduumError: The failure is of another kind, and ends the search.
        """
        self._asked.add(store)
        if isinstance(failure, exc.UnknownCapture):
            self._unknown = failure
        elif isinstance(failure, (exc.Unavailable, exc.DeadlineExceeded)):
            self._silent[store] = failure
        else:
            raise failure

    def failure(self) -> exc.ResiduumError:
        """Return what to raise when no store has it."""
        if self._silent:
            return silent_store(self._silent, f"The capture {self._capture_id} may be there: no other store holds it.")
        if len(self._asked) == 1 and self._unknown:
            return self._unknown
        names = ", ".join(map(str, sorted(self._asked)))
        return exc.UnknownCapture(
            f"None of the stores holds a capture {self._capture_id!r}: it was never opened, or it was deleted, or has "
            f"expired. They are {names}.",
            reason="UNKNOWN_CAPTURE",
            metadata={"capture_id": self._capture_id},
        )


def silent_store(silent: dict[StoreAddress, exc.ResiduumError], consequence: str) -> exc.Unreachable:
    """Return what to raise when stores could not be asked; `consequence` says what is not known therefore."""
    names = " and ".join(map(str, silent))
    store, failure = next(iter(silent.items()))
    error = exc.Unreachable(
        f"{'The store' if len(silent) == 1 else 'Stores'} {names} cannot be asked. {consequence} ({failure})",
        endpoint=store.endpoint,
        is_refusal=isinstance(failure, exc.Unreachable) and failure.is_refusal,
    )
    error.reason = failure.reason
    error.metadata["store"] = store.name
    return error
