"""The merged list of several stores, compared with a plain list."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import residuum
from residuum.protocol.captures.listing import Listing, read_token
from residuum.v1 import store_pb2
from residuum.wire.placement import StoreAddress


class FakeStore:
    """A fake store: its pages continue after the number of the last shown capture, like the real store's."""

    def __init__(self, name):
        self.address = StoreAddress(name, f"{name}:1")
        self.captures = {}  # number: id

    def page(self, request):
        before = int(request.page_token) if request.page_token else 1 << 60
        numbers = [number for number in sorted(self.captures, reverse=True) if number < before]
        answer = store_pb2.ListCapturesResponse()
        for number in numbers[: request.page_size]:
            summary = answer.captures.add(capture_id=self.captures[number], page_token=str(number))
            summary.open_time.FromNanoseconds(number)
        if len(numbers) > request.page_size:
            answer.next_page_token = answer.captures[-1].page_token
        return answer


def fill(placement):
    """Open captures one after the other, each on the store with the given index."""
    stores = [FakeStore(name) for name in "abcd"]
    for number, at in enumerate(placement, 1):
        stores[at].captures[number] = f"n-{number}"
    return stores


def take(stores, page_size, token="", limit=None):
    """Return the IDs, the next page token, and the largest number of captures held at the same time."""
    addresses = {store.address: store for store in stores}
    listing = Listing(list(addresses), store_pb2.ListCapturesRequest(page_size=page_size), read_token(token))
    taken, held = [], 0
    while not listing.is_over:
        for address, request in listing.due():
            listing.add(address, addresses[address].page(request))
        held = max(held, sum(map(len, listing._heads.values())))
        for _, summary in listing.ready():
            taken.append(summary.capture_id)
            if len(taken) == limit:
                return taken, listing.token(), held
    return taken, listing.token(), held


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_merged_pages_are_in_order_and_take_bounded_memory(placement, page_size):
    taken, token, held = take(fill(placement), page_size)
    assert taken == [f"n-{number}" for number in range(len(placement), 0, -1)]
    assert token == ""
    assert held <= 4 * page_size


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9), st.data())
def test_pages_join_to_the_list_despite_concurrent_changes(placement, page_size, data):
    """Captures that exist throughout are listed once, in order. Captures that are added later are not listed."""
    stores = fill(placement)
    there = {number: store for store in stores for number in store.captures}
    shown, token, number = [], "", len(placement)
    while True:
        page, token, _ = take(stores, page_size, token, limit=page_size)
        shown += [int(name.removeprefix("n-")) for name in page]
        if not token:
            break
        if there and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(there)))
            there.pop(gone).captures.pop(gone)
        if data.draw(st.booleans()):
            number += 1
            data.draw(st.sampled_from(stores)).captures[number] = f"n-{number}"
    assert shown == sorted(shown, reverse=True)
    assert len(set(shown)) == len(shown)
    assert set(there) <= set(shown) <= set(range(1, len(placement) + 1))


def test_a_store_without_continuation_tokens_cannot_be_paged():
    stores = fill([0, 0, 1])
    page = stores[0].page
    stores[0].page = lambda request: _without_tokens(page(request))
    assert take(stores, 10)[0] == ["n-3", "n-2", "n-1"]
    with pytest.raises(residuum.ServerFault, match="The store a is too old"):
        take(stores, 10, limit=2)


def _without_tokens(answer):
    for summary in answer.captures:
        summary.page_token = ""
    return answer


NO_TOKENS = st.none() | st.integers() | st.lists(st.integers() | st.dictionaries(st.text(), st.integers(), min_size=1))


def test_a_store_that_is_too_old_for_where_is_named():
    listing = Listing([StoreAddress("a", "a:1")], store_pb2.ListCapturesRequest(where="split = test"))
    ((address, _),) = listing.due()
    with pytest.raises(residuum.ServerFault, match=r"The store a is too old to filter .* \(where\)"):
        listing.add(address, store_pb2.ListCapturesResponse(captures=[store_pb2.CaptureSummary(capture_id="n-1")]))


@given(st.text(min_size=1) | NO_TOKENS.map(lambda value: base64.urlsafe_b64encode(json.dumps(value).encode()).decode()))
def test_foreign_page_tokens_are_refused_with_a_reason(token):
    with pytest.raises(residuum.InvalidRequest, match="Start from the first page"):
        read_token(token)
