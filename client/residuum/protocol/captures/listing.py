"""Merges the capture lists of several stores into one, newest first. No I/O: both clients use it."""

from __future__ import annotations

import base64
import binascii
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from residuum import exceptions as exc
from residuum.v1 import store_pb2
from residuum.wire.labels import matches, parse_where
from residuum.wire.placement import StoreAddress

_DONE = None
"""Marks a store whose list has ended."""

_NO_TOKEN = "?"  # noqa: S105 - not a secret
"""Marks a store that is too old to send a page token with each capture. No page token has this form."""


class Place(NamedTuple):
    """The place where a list continues after a page."""

    stores: Mapping[str, str | None]
    """Each store's page token by the store's name: empty before its first capture, None at its end."""
    newest: int
    """When the last listed capture was opened, in ns. Captures that were opened later are new, and are left out."""


class Listing:
    """Merges the lists of several stores. It holds at most one page of each store.

    Each store's list is newest first. The next capture is the newest among the first ones of all pages.

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
        """Start or continue a list.

        Args:
            stores: The stores.
            request: The filter, and the size of the stores' pages.
            place: Where the list continues; None starts a new one.
        """
        self._request = request
        self._conditions = parse_where(request.where)
        self._stores = stores
        at = place.stores if place else {}
        self._places: dict[str, str | None] = {store.name: at.get(store.name, "") for store in stores}
        self._newest = place.newest if place else 0
        self._skipping = {name for name, token in self._places.items() if place and token == ""}
        self._heads: dict[str, deque[store_pb2.CaptureSummary]] = {store.name: deque() for store in stores}
        self._next: dict[str, str | None] = dict(self._places)  # the page after the one in _heads

    @property
    def is_over(self) -> bool:
        """Whether all captures were listed."""
        return not any(self._heads.values()) and all(token is _DONE for token in self._next.values())

    def due(self) -> list[tuple[StoreAddress, store_pb2.ListCapturesRequest]]:
        """Return the requests for the pages that are needed to find the next capture."""
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
        """Add a page that was due.

        Raises:
            ServerFault: The store is too old for the filter: it lists captures that do not match.
        """
        name, captures = store.name, deque(page.captures)
        if self._conditions and not all(matches(self._conditions, item.labels) for item in captures):
            # An older store ignores `where`, in silence, and what it lists may be about to be deleted.
            raise exc.ServerFault(
                f"The store {name} is too old to filter captures by their labels (where). Upgrade it, or name the "
                "captures."
            )
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
        """Continue without a store."""
        self._next[store.name] = _DONE

    def ready(self) -> Iterator[tuple[str, store_pb2.CaptureSummary]]:
        """Yield the next captures, each with its store's name, until another page is due."""
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
        """Return the page token with which the list continues; empty at the end.

        Raises:
            ServerFault: A store is too old to send page tokens.
        """
        if all(place is _DONE for place in self._places.values()):
            return ""
        for name, place in self._places.items():
            if place == _NO_TOKEN:
                raise exc.ServerFault(
                    f"The store {name} is too old to list captures page by page. Upgrade it, or list without pages."
                )
        text = json.dumps([self._newest, self._places], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode()

    def _place_after(self, name: str, capture: store_pb2.CaptureSummary) -> str | None:
        """Return the page token with which a store's list continues after a capture."""
        if not self._heads[name]:
            return self._next[name]
        return capture.page_token or _NO_TOKEN


def read_token(token: str) -> Place | None:
    """Return the place that a token of `Listing.token` holds; None for an empty token.

    Raises:
        InvalidRequest: `Listing.token` did not make this token.
    """
    if not token:
        return None
    try:
        newest, stores = json.loads(base64.b64decode(token.encode(), altchars=b"-_", validate=True))
        if isinstance(newest, int) and all(item is None or isinstance(item, str) for item in stores.values()):
            return Place(stores, newest)
    except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise _bad_token("does not come from a list of captures")


def check_place(place: Place | None, stores: Sequence[StoreAddress]) -> None:
    """Check that the stores of a list still exist.

    Raises:
        InvalidRequest: A store that the list started with is gone.
    """
    gone = set(place.stores if place else ()) - {store.name for store in stores}
    if gone:
        raise _bad_token(f"belongs to a list of the stores {', '.join(sorted(gone))}, which are gone")


def _bad_token(why: str) -> exc.InvalidRequest:
    return exc.InvalidRequest(
        f"The page token {why}. Start from the first page.", reason="INVALID_FIELD", metadata={"field": "page_token"}
    )
