"""Labels: set when a capture is opened or later, listed, used in filters, and deleted with their capture."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.v1 import capture_pb2, errors_pb2, store_pb2
from residuum.wire.labels import matches, parse_where, to_dict, to_label
from store_svc.database.db import Table
from tests.store.support import COMPLETE, Process, describe, failing_with, make_chunk, serving

INVALID = errors_pb2.ERROR_REASON_INVALID_FIELD


def labelled(**values):
    return [to_label(name, value) for name, value in values.items()]


def put(client, name, *, seal=True, tenant="", **labels):
    description = describe(name, layers=[0], prompt=2)
    description.tenant = tenant
    description.spec.labels.extend(labelled(**labels))
    client.open(description)
    if seal:
        client.append([make_chunk([0], range(3))], name)
        assert client.seal(name, generated=[2]).state == COMPLETE


def label(client, name="a", removed=(), **labels):
    request = store_pb2.LabelCaptureRequest(capture_id=name, labels=labelled(**labels), removed_names=removed)
    return to_dict(client.stub.LabelCapture(request).labels)


def listed(client, where="", size=100, **fields):
    """Return the IDs of a filtered list, page by page."""
    request = store_pb2.ListCapturesRequest(where=where, page_size=size, **fields)
    names = []
    while True:
        page = client.stub.ListCaptures(request)
        names += [item.capture_id for item in page.captures]
        request.page_token = page.next_page_token
        if not request.page_token:
            return names


def index_size(store):
    with store._db.read() as txn:
        return txn.count(Table.LABEL_INDEX), txn.count(Table.LABELS)


def test_labels_of_the_spec_are_those_of_the_capture(client):
    put(client, "open", seal=False, split="train", y=1)
    put(client, "ended", y=0.5, kept=True)
    assert to_dict(client.get("open").labels) == {"split": "train", "y": 1}
    assert to_dict(client.get("ended").labels) == {"kept": True, "y": 0.5}
    assert to_dict(client.get("ended").description.spec.labels) == {"y": 0.5, "kept": True}
    page = client.stub.ListCaptures(store_pb2.ListCapturesRequest())
    assert [to_dict(item.labels) for item in page.captures] == [{"kept": True, "y": 0.5}, {"split": "train", "y": 1}]


@pytest.mark.parametrize("seal", [False, True])
def test_labels_change_at_any_time(client, seal):
    put(client, "a", seal=seal, split="train", y=1)
    assert label(client, removed=["y", "none"], split="test", z=2.5) == {"split": "test", "z": 2.5}
    assert to_dict(client.get().labels) == {"split": "test", "z": 2.5}
    assert [to_dict(part.manifest.labels) for part in list(read_both(client))] == [{"split": "test", "z": 2.5}] * 3
    assert label(client, removed=["split", "z"]) == {}
    assert not client.get().labels


def read_both(client):
    """The messages with a manifest of both ways to read."""
    one = client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a"))
    yield from [item for item in one if item.HasField("manifest")]
    many = list(client.stub.ReadCaptures(store_pb2.ReadCapturesRequest(capture_ids=["a"])))
    yield many[0].captures[0]


def test_a_repeated_open_keeps_later_labels(client):
    put(client, "a", seal=False, split="train")
    label(client, split="test")
    put(client, "a", seal=False, split="train")
    assert to_dict(client.get().labels) == {"split": "test"}


def test_lists_are_filtered(client):
    for number in range(12):
        put(client, f"c{number}", split="train" if number % 3 else "test", y=number, even=number % 2 == 0)
    put(client, "bare")
    assert listed(client, "split = test", size=2) == ["c9", "c6", "c3", "c0"]
    assert listed(client, "split = test and y >= 6") == ["c9", "c6"]
    assert listed(client, "y > 8.5 and even = true") == ["c10"]
    assert listed(client, "split != train", size=3) == ["bare", "c9", "c6", "c3", "c0"]
    assert listed(client, "y = 3.0") == ["c3"]
    assert listed(client, "y = '3'") == []
    assert listed(client, "split = test", prefix="c9", states=[COMPLETE]) == ["c9"]
    assert listed(client, "none = 1") == []


def test_the_index_follows_every_change(tmp_path):
    with serving(tmp_path / "store") as (store, client):
        put(client, "a", split="train", y=1)
        put(client, "b", split="train")
        assert index_size(store) == (3, 2)
        label(client, "a", split="test")
        assert index_size(store) == (3, 2)
        assert (listed(client, "split = train"), listed(client, "split = test")) == (["b"], ["a"])
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        assert index_size(store) == (1, 1)
        assert listed(client, "split = test") == []
        label(client, "b", removed=["split"])
        assert index_size(store) == (0, 0)


def test_expired_captures_leave_no_labels(tmp_path):
    with serving(tmp_path / "store", retain_hours=1e-7) as (store, client):
        put(client, "a", split="train")
        for number in range(200):  # each write gives housekeeping a turn
            put(client, f"later-{number}", seal=False)
            if index_size(store) == (0, 0):
                break
        assert index_size(store) == (0, 0)


def test_labels_survive_a_restart(start):
    process: Process = start()
    put(process.client, "ended", split="train")
    put(process.client, "open", seal=False, split="train")
    label(process.client, "ended", y=2)
    process.end()
    client = start().client
    assert to_dict(client.get("ended").labels) == {"split": "train", "y": 2}
    assert listed(client, "split = train") == ["open", "ended"]


def test_a_database_without_labels_is_opened(tmp_path):
    """A store version without labels made no tables for them."""
    import lmdb

    with serving(tmp_path / "store") as (_, client):
        put(client, "old")
    with lmdb.open(str(tmp_path / "store"), max_dbs=16) as env, env.begin(write=True) as txn:
        for table in (Table.LABELS, Table.LABEL_INDEX):
            txn.drop(env.open_db(table.value, txn), delete=True)
    with serving(tmp_path / "store") as (_, client):
        assert listed(client) == ["old"]
        assert label(client, "old", split="train") == {"split": "train"}
        assert listed(client, "split = train") == ["old"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([capture_pb2.Label(name="a b", integer=1)], "'a b' is not the name of a label"),
        ([capture_pb2.Label(name="and", integer=1)], "'and' is not a name"),
        ([capture_pb2.Label(name="x" * 65, integer=1)], "is not the name of a label"),
        ([capture_pb2.Label(name="a")], "'a' has no value"),
        ([capture_pb2.Label(name="a", text="x" * 257)], "'a' has 257 characters, more than 256"),
        ([capture_pb2.Label(name="a", number=float("nan"))], "'a' is nan, which is not finite"),
        ([capture_pb2.Label(name="a", integer=1)] * 2, "'a' is given twice"),
        ([capture_pb2.Label(name=f"a{at}", integer=1) for at in range(33)], "at most 32 labels, not 33"),
        ([capture_pb2.Label(name=f"a{at}", text="x" * 250) for at in range(20)], "at most 4096 bytes"),
    ],
)
def test_bad_labels_change_nothing(client, labels, message):
    put(client, "a", split="train")
    with failing_with(INVALID) as caught:
        client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id="a", labels=labels))
    assert message in caught[0].message
    assert to_dict(client.get().labels) == {"split": "train"}
    description = describe("b")
    description.spec.labels.extend(labels)
    with failing_with(INVALID) as caught:
        client.open(description)
    assert caught[0].metadata["field"] == "description.spec.labels"


def test_labels_add_up_to_the_limit(client):
    put(client, "a", **{f"a{at}": at for at in range(32)})
    with failing_with(INVALID):
        label(client, one_more=1)
    label(client, removed=["a0"], one_more=1)
    with failing_with(INVALID) as caught:
        label(client, removed=["a1"], a1=1)
    assert "'a1' is both set and removed" in caught[0].message


def test_an_unknown_capture_has_no_labels(client):
    with failing_with(errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE):
        label(client, "none", y=1)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("split", "expected one of = != < <= > >= at the end"),
        ("split =", "expected a value at the end"),
        ("split = a b = c", "expected 'and' before 'b'"),
        ("split = a and", "expected a label's name at the end"),
        ("split < a", "< compares numbers, not 'a'"),
        ("1y = 2", "'1y' is not the name of a label"),
        ("split = 'a", 'cannot read "\'a"'),
        ("y = 1e999", "too large for a number"),
        ("x = 1" + " and x = 1" * 16, "at most 16 conditions, not 17"),
        ("x" * 1025, "at most 1024 characters, not 1025"),
    ],
)
def test_a_filter_that_cannot_be_parsed_is_named(client, where, message):
    with failing_with(INVALID) as caught:
        listed(client, where)
    assert caught[0].metadata["field"] == "where"
    assert message in caught[0].message


def test_a_page_token_belongs_to_its_filter(client):
    for number in range(3):
        put(client, f"c{number}", split="train")
    token = client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_size=1, where="split = train")).next_page_token
    with failing_with(INVALID):
        client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_token=token, where="split = test"))


def test_a_page_of_long_labels_is_a_message_that_clients_accept(client):
    long = {f"a{at}": "\N{GRINNING FACE}" * 120 for at in range(8)}
    for number in range(900):
        put(client, f"c{number}", seal=False, **long)
    page = client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_size=1000))
    assert 0 < len(page.captures) < 900
    assert len(listed(client, size=1000)) == 900


_VALUES = st.one_of(
    st.sampled_from(["a", "b", "true", "1", ""]), st.integers(-3, 3), st.sampled_from([0.5, 1.0, -2.0]), st.booleans()
)
_LABELS = st.dictionaries(st.sampled_from("xyz"), _VALUES, max_size=3)
_CONDITIONS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), _VALUES), max_size=3
)


def written(value):
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else repr(value)


def expected(conditions, labels):
    def is_number(value):
        return not isinstance(value, (bool, str))

    def holds(name, sign, value):
        if name not in labels:
            return sign == "!="
        own = labels[name]
        alike = is_number(own) == is_number(value) and (is_number(own) or type(own) is type(value))
        if sign in ("=", "!="):
            return (alike and own == value) == (sign == "=")
        return is_number(own) and {"<": own < value, "<=": own <= value, ">": own > value, ">=": own >= value}[sign]

    return all(holds(*condition) for condition in conditions)


@given(_CONDITIONS, _LABELS)
@settings(deadline=None)
def test_a_filter_matches_the_reference_implementation(conditions, labels):
    conditions = [item for item in conditions if item[1] in ("=", "!=") or not isinstance(item[2], (bool, str))]
    where = " and ".join(f"{name} {sign} {written(value)}" for name, sign, value in conditions)
    assert matches(parse_where(where), labelled(**labels)) == expected(conditions, labels)


def test_the_index_finds_exactly_what_a_scan_finds(client):
    """`x = value` is answered by the index, and `x = value and x = value` of all tenants by a scan."""
    values = ["a", "1", 1, 1.0, True, False, 0, -0.0, 0.0, 2**60, 2**60 + 1, "x" * 256]
    for number, value in enumerate(values):
        put(client, f"c{number}", seal=False, x=value)
    for value in values:
        found = listed(client, f"x = {written(value)}", size=1, tenant="")
        assert found == listed(client, f"x = {written(value)}", size=1)
        alike = [
            f"c{number}"
            for number, other in enumerate(values)
            if other == value and isinstance(other, bool) == isinstance(value, bool)
        ]
        assert found == alike[::-1]
