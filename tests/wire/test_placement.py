"""Placement follows the contract's rule, and adding a store keeps the order of the others."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residuum.wire.placement import StoreAddress, first_rank, parse_stores, ranks, score

FILE = Path(__file__).parents[2] / "protos" / "residuum" / "v1" / "store_ranks.json"
CASES = json.loads(FILE.read_text())["cases"]

IDS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)
NAMES = st.lists(IDS, min_size=1, max_size=8, unique=True)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_vectors_of_the_contract(case):
    scores = {name: f"{score(name, case['capture_id']):016x}" for name in case["scores_hex"]}
    assert scores == case["scores_hex"]
    for names in (list(scores), list(reversed(scores))):
        assert ranks(names, case["capture_id"]) == case["ranks"]


@given(IDS, IDS)
def test_the_rule_in_words(store, capture_id):
    text = b"residuum.store.v1" + len(store).to_bytes(4, "little") + store.encode() + capture_id.encode()
    assert score(store, capture_id).to_bytes(8, "big") == hashlib.sha256(text).digest()[:8]


@given(NAMES, IDS)
def test_the_first_rank_does_not_depend_on_the_order_of_the_stores(names, capture_id):
    assert first_rank(reversed(names), capture_id) == ranks(names, capture_id)[0]
    assert sorted(ranks(names, capture_id)) == sorted(names)


@given(NAMES, IDS, IDS)
def test_an_added_store_only_moves_captures_to_itself(names, added, capture_id):
    if added in names:
        return
    after = ranks([*names, added], capture_id)
    assert [name for name in after if name != added] == ranks(names, capture_id), "the other stores keep their order"
    assert first_rank([*names, added], capture_id) in (first_rank(names, capture_id), added)


@given(NAMES, st.integers(0, 7), IDS)
def test_without_a_store_only_its_own_captures_move(names, gone, capture_id):
    rest = [name for at, name in enumerate(names) if at != gone % len(names)]
    first = first_rank(names, capture_id)
    if rest and first in rest:
        assert first_rank(rest, capture_id) == first


@given(st.lists(IDS, min_size=2, max_size=6, unique=True))
def test_stores_get_equal_shares(names):
    ids = [f"req-{number}" for number in range(1000)]
    shares = Counter(first_rank(names, capture_id) for capture_id in ids)
    expected = len(ids) / len(names)
    # Six standard deviations of a binomial share, which random results exceed about once in 10^9 runs.
    slack = 6 * (expected * (1 - 1 / len(names))) ** 0.5
    assert all(abs(shares[name] - expected) <= slack for name in names), shares


def test_scores_decide_before_names(monkeypatch):
    monkeypatch.setattr("residuum.wire.placement.score", lambda store, _: {"c": 9}.get(store, 5))
    assert ranks(["b", "c", "a"], "x") == ["c", "a", "b"], "stores with equal scores are in the order of their names"
    assert first_rank(["b", "a"], "x") == "a"


def test_how_stores_are_written():
    assert parse_stores(["h:1", " a=h:2 "]) == (StoreAddress("h:1", "h:1"), StoreAddress("a", "h:2"))
    assert [str(store) for store in parse_stores(["h:1", "a=h:2"])] == ["h:1", "a (h:2)"]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["a=h:1", "a=h:2"], "two stores share the name 'a'"),
        (["a=h:1", "b=h:1"], "two stores share the endpoint 'h:1'"),
        (["h:1", "h:1"], "two stores share the name 'h:1'"),
        (["=h:1"], "'' is not a valid store name"),
        (["-a=h:1"], "'-a' is not a valid store name"),
        (["a b=h:1"], "'a b' is not a valid store name"),
        (["a=b=h:1"], "'a=b' is not a valid store name"),
        (["x" * 129 + "=h:1"], "is not a valid store name"),
    ],
)
def test_bad_lists_of_stores(texts, told):
    with pytest.raises(ValueError, match=told):
        parse_stores(texts)
