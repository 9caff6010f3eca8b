"""docs/howto/search.md, the client and the contract name the encodings that the store does not search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from residuum.values.replies.search import SearchResult
from residuum.wire.rows.encodings import ENCODING_NAMES, NOT_ROWS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def names():
    return sorted(ENCODING_NAMES[encoding] for encoding in NOT_ROWS)


def test_the_page_names_them(names):
    text = (ROOT / "docs/howto/search.md").read_text()
    (cell,) = re.findall(r"^\| `encoding` \| (.*?) do not decode", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", cell)) == names


@pytest.mark.parametrize("page", ["search", "logit-lens"])
def test_pages_say_what_a_reduced_row_stands_for(page):
    assert "../encodings.md#reductions" in (ROOT / f"docs/howto/{page}.md").read_text()


def test_the_contract_names_them(names):
    text = " ".join((ROOT / "protos/residuum/v1/store.proto").read_text().replace("//", " ").split())
    (call,) = re.findall(r"decode to the row itself: all but ([^.]*)\.", text)
    (reason,) = re.findall(r"does not decode to the row itself: ([^.]*)\.", text)
    assert sorted(re.findall(r"\w+", call.replace(" and ", " "))) == names
    assert sorted(re.findall(r"\w+", reason.replace(" or ", " "))) == names


def test_the_client_names_them(names):
    text = SearchResult((), 1, 0, 0, left_out={"encoding": 1}).summary
    (listed,) = re.findall(r"not searched \(([^)]*)\)", text)
    assert sorted(re.findall(r"\w+", listed.replace(" or ", " "))) == names
