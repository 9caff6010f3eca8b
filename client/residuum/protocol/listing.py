"""The lists of several stores as one, newest first. No I/O: both clients use it."""

from __future__ import annotations

import base64
import binascii
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from residuum import exceptions as exc
from residuum.v1 import store_pb2
from residuum.wire.placement import StoreAddress

_DONE = None
"""The place of a store whose list is at its end."""

_OLD = "?"
"""The place in a list of a store that does not say where it goes on after each capture; no page token has this form."""


class Place(NamedTuple):
    """Where a list that was left off goes on."""

    stores: Mapping[str, str | None]
    """Of each store by its name: its page token, empty if nothing of it was shown yet, None at its end."""
    newest: int
    """When the last capture that was shown was opened, in ns: what is newer was opened since, and is left out."""


class Listing:
    """Captures of several stores, merged as they are asked for: of each store one page is kept at most.

    Each store's own list is newest first; whichever head was opened last comes next.

    Example:
        while not listing.is_over:
            for store, request in listing.due():
                listing.add(store, ask(store, request))
            for store_name, capture in listing.ready():
                ...
    """

    def __init__(
        self, stores: Sequence[StoreAddress], request: store_pb2.ListCapturesRequest, place: Place | None = None
    ) -> None:
        """Begin, or go on.

        Args:
            stores: The stores.
            request: The filter, and how many captures to ask a store for at once.
            place: Where to go on; None begins.
        """
        self._request = request
        self._stores = stores
        at = place.stores if place else {}
        self._places: dict[str, str | None] = {store.name: at.get(store.name, "") for store in stores}
        self._newest = place.newest if place else 0
        self._skipping = {name for name, token in self._places.items() if place and token == ""}
        self._heads: dict[str, deque[store_pb2.CaptureSummary]] = {store.name: deque() for store in stores}
        self._next: dict[str, str | None] = dict(self._places)  # the page behind the heads

    @property
    def is_over(self) -> bool:
        """Whether there is no more."""
        return not any(self._heads.values()) and all(token is _DONE for token in self._next.values())

    def due(self) -> list[tuple[StoreAddress, store_pb2.ListCapturesRequest]]:
        """Return the pages without which nobody can tell which capture comes next."""
        asked = []
        for store in self._stores:
            token = self._next[store.name]
            if not self._heads[store.name] and token is not _DONE:
                request = store_pb2.ListCapturesRequest()
                request.CopyFrom(self._request)
                request.page_token = token
                asked.append((store, request))
        return asked

    def add(self, store: StoreAddress, page: store_pb2.ListCapturesResponse) -> None:
        """Take a page that was due."""
        name, captures = store.name, deque(page.captures)
        self._next[name] = page.next_page_token or _DONE
        while name in self._skipping and captures:
            if captures[0].open_time.ToNanoseconds() > self._newest:
                captures.popleft()
            else:
                self._skipping.remove(name)
        self._heads[name] = captures
        if not captures:
            self._places[name] = self._next[name]

    def leave_out(self, store: StoreAddress) -> None:
        """Go on without a store."""
        self._next[store.name] = _DONE

    def ready(self) -> Iterator[tuple[str, store_pb2.CaptureSummary]]:
        """Yield the captures that come next, each with its store's name, until a page is due."""
        while not self.due():
            heads = [(name, captures[0]) for name, captures in self._heads.items() if captures]
            if not heads:
                return
            name, newest = max(heads, key=lambda head: head[1].open_time.ToNanoseconds())
            self._heads[name].popleft()
            self._places[name] = self._place_after(name, newest)
            self._newest = newest.open_time.ToNanoseconds()
            yield name, newest

    def token(self) -> str:
        """Return where the list goes on, as one text; empty at the end.

        Raises:
            ServerFault: A store is too old to say where its list goes on.
        """
        if all(place is _DONE for place in self._places.values()):
            return ""
        for name, place in self._places.items():
            if place == _OLD:
                raise exc.ServerFault(
                    f"The store {name} is too old to list captures page by page; upgrade it, or list without pages."
                )
        text = json.dumps([self._newest, self._places], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode()

    def _place_after(self, name: str, capture: store_pb2.CaptureSummary) -> str | None:
        """Return where a store's list goes on after a capture."""
        if not self._heads[name]:
            return self._next[name]
        return capture.page_token or _OLD


def read_token(token: str) -> Place | None:
    """Return the place of a token of `Listing.token`; None for the start.

    Raises:
        InvalidRequest: It is none.
    """
    if not token:
        return None
    try:
        newest, stores = json.loads(base64.b64decode(token.encode(), altchars=b"-_", validate=True))
        if isinstance(newest, int) and all(item is None or isinstance(item, str) for item in stores.values()):
            return Place(stores, newest)
    except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise _bad_token("is not one that a list of captures ended with")


def check_place(place: Place | None, stores: Sequence[StoreAddress]) -> None:
    """Check that a list that goes on can go on.

    Raises:
        InvalidRequest: It began with a store that is not there any more.
    """
    gone = set(place.stores if place else ()) - {store.name for store in stores}
    if gone:
        raise _bad_token(f"is of a list that began with the stores {', '.join(sorted(gone))}, which are not there now")


def _bad_token(why: str) -> exc.InvalidRequest:
    return exc.InvalidRequest(
        f"The page token {why}; start from the first page.", reason="INVALID_FIELD", metadata={"field": "page_token"}
    )
