"""Captures on several real stores are found by rank and listed together. Unreachable stores are named."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import signal
import socket
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import residuum
from residuum.rpc import channels
from residuum.rpc.channels import open_channel
from residuum.v1 import capture_pb2, inference_pb2, placement_pb2, selection_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from residuum.wire.placement import first_rank, ranks
from tests.client.support.flaky_store import FlakyStore, Unknown
from tests.client.support.peer import HIDDEN
from tests.client.support.running_store import RunningStore

NAMES = ("a", "b", "c")

pytestmark = pytest.mark.filterwarnings("ignore::residuum.EmptyCaptureWarning")


class Group:
    """Three stores. `put` writes a capture to any of them."""

    def __init__(self, folder):
        self.stores = {name: RunningStore(folder / name) for name in NAMES}
        self.channels = {name: open_channel(store.endpoint) for name, store in self.stores.items()}

    def address(self, *names):
        return [f"{name}={self.stores[name].endpoint}" for name in names or NAMES]

    def stub(self, name):
        return store_pb2_grpc.StoreServiceStub(self.channels[name])

    def put(self, store, capture_id):
        """Write an ended capture without rows."""
        description = capture_pb2.CaptureDescription(
            capture_id=capture_id, model="m", hidden_size=HIDDEN, num_layers=1, num_sequences=1,
            dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
            spec=capture_pb2.CaptureSpec(
                sites=[capture_pb2.SITE_RESID_POST], encoding=capture_pb2.ENCODING_RAW,
                layers=selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=[0])),
            ),
        )  # fmt: skip
        stub = self.stub(store)
        stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description))
        outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1], finish_reason="abort")
        stub.SealCapture(
            store_pb2.SealCaptureRequest(
                capture_id=capture_id, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_ABORTED
            )
        )
        return capture_id

    def clear(self):
        for name in NAMES:
            for summary in self.stub(name).ListCaptures(store_pb2.ListCapturesRequest(page_size=1000)).captures:
                self.stub(name).DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=summary.capture_id))

    def stop(self):
        for channel in self.channels.values():
            channel.close()
        for store in self.stores.values():
            store.stop(signal.SIGKILL)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """gRPC retries a call to a store that is unreachable three times, after 1.3 s in all. Here it waits a tenth."""
    config = json.dumps(channels._SERVICE_CONFIG).replace('"initialBackoff": "0.1s"', '"initialBackoff": "0.01s"')
    assert "0.01s" in config
    own = tuple((name, config if name == "grpc.service_config" else value) for name, value in channels.CHANNEL_OPTIONS)
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", own)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    running = Group(tmp_path_factory.mktemp("stores"))
    yield running
    running.stop()


@pytest.fixture
def group(shared):
    shared.clear()
    return shared


@pytest.fixture
def away():
    """An endpoint where nothing listens during the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def silent():
    """An endpoint that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def placed(store, names=NAMES, start=0):
    """Return an ID that is placed on a store."""
    return next(name for at in range(start, 1 << 20) if first_rank(names, name := f"x-{at}") == store)


async def test_a_capture_is_found_on_a_store_of_any_rank(make, group):
    client = make("127.0.0.1:1", store=group.address())
    for at, store in enumerate(NAMES):
        kept = group.put(store, f"capture-{at}")
        assert (await client.manifest(kept)).state == "aborted"
        acts = await client.activations(kept, allow_partial=True)
        assert acts.manifest.capture_id == kept


async def test_a_list_of_captures_comes_from_all_stores_in_its_order(make, group):
    """Captures on the store of their placement, on another store, and on a store that the client does not know."""
    names = [group.put(NAMES[at % 3], f"listed-{at}") for at in range(12)]
    for _ in range(2):
        client = make("127.0.0.1:1", store=group.address())
        found = await client.activations(names[::-1], allow_partial=True)
        assert [acts.manifest.capture_id for acts in found] == names[::-1]
    with pytest.raises(residuum.UnknownCapture, match="2 of 3 captures are in no store: gone-1, gone-2"):
        await client.activations(["gone-1", names[0], "gone-2"], allow_partial=True)


async def test_a_list_is_read_although_a_store_without_its_captures_is_unreachable(make, group, away):
    stores = [*group.address("a", "b"), f"c={away}"]
    names = [group.put("a", f"there-{at}") for at in range(6)]
    client = make("127.0.0.1:1", store=stores)
    assert len(await client.activations(names, allow_partial=True)) == 6
    impatient = make("127.0.0.1:1", store=stores, timeout=2)  # a read waits that long for a store that never answered
    with pytest.raises(residuum.Unreachable, match=r"c .*does not answer"):
        await impatient.activations([*names, placed("c")], allow_partial=True)


@pytest.mark.parametrize("filters", [False, True])
async def test_many_captures_are_deleted_wherever_they_are(make, group, filters):
    """Captures on the store of their placement and on another store. One is in the list twice."""
    names = [group.put(NAMES[at % 3], f"many-{at:02}") for at in range(20)]
    kept = group.put("b", "other")
    client = make("127.0.0.1:1", store=group.address())
    if filters:
        await client.delete(prefix="many-")
    else:
        with pytest.raises(residuum.UnknownCapture, match="2 of 22 captures are in no store: gone-1, gone-2"):
            await client.delete(["gone-1", *names, "gone-2", names[3]])
    assert [summary.capture_id for summary in await client.captures()] == [kept]


async def test_many_captures_are_deleted_in_a_store_that_was_added(make, endpoint, peer, group):
    peer.script.stores = group.address("a")
    client = make(endpoint)
    assert (await client.manifest(group.put("a", "first"))).capture_id == "first"
    names = [group.put("b", f"many-{at}") for at in range(3)]
    peer.script.stores = group.address("a", "b")
    await client.delete(["first", *names])
    assert await client.captures() == []


async def test_many_captures_are_deleted_although_a_store_is_unreachable(make, group, away):
    """Captures of the others are deleted: one that was found there before, one placed there, and one placed on c."""
    client = make("127.0.0.1:1", store=[*group.address("a", "b"), f"c={away}"], timeout=2)
    names = [group.put("a", placed("a")), group.put("b", placed("b")), group.put("b", placed("c", start=50))]
    assert (await client.manifest(names[0])).capture_id == names[0]
    lost = placed("c", start=500)
    with pytest.raises(residuum.Unreachable, match=rf"The store c \({away}\) does not answer. The capture {lost} may"):
        await client.delete([lost, *names])
    assert [group.stub(name).ListCaptures(store_pb2.ListCapturesRequest()).captures[:] for name in "ab"] == [[], []]


async def test_a_deletion_that_one_of_several_stores_does_not_answer(make, group):
    """The store deletes the captures, and its answer is lost. That they are in no store then is not the error."""
    proxy = FlakyStore(group.stores["a"].endpoint)
    name, other = group.put("a", placed("a")), group.put("b", placed("b"))

    def fail(call):
        if call == "DeleteCaptures":
            raise Unknown(grpc.StatusCode.UNAVAILABLE)

    proxy.after = fail
    client = make("127.0.0.1:1", store=[f"a={proxy.endpoint}", *group.address("b", "c")])
    try:
        with pytest.raises(residuum.Unreachable, match=proxy.words):
            await client.delete([name, other])
        assert await client.captures() == []
    finally:
        proxy.stop()


async def test_stores_of_several_versions_delete_many_captures(make, group):
    old = FlakyStore(group.stores["a"].endpoint)
    old.missing = {"DeleteCaptures"}
    names = [group.put(NAMES[at % 3], f"many-{at:02}") for at in range(20)]
    client = make("127.0.0.1:1", store=[f"a={old.endpoint}", *group.address("b", "c")])
    try:
        await client.delete(names)
        assert await client.captures() == []
        assert "DeleteCapture" in old.calls
    finally:
        old.stop()


async def test_adding_a_store_does_not_affect_existing_captures(make, group):
    """Captures whose first rank is the new store, written before it was added, are still found."""
    old, name = ("a", "b"), placed("c")
    group.put(first_rank(old, name), name)
    client = make("127.0.0.1:1", store=group.address())
    assert (await client.manifest(name)).capture_id == name
    assert await client.delete(name) >= 0
    with pytest.raises(residuum.UnknownCapture, match=r"No store holds the capture 'x-.*The stores are a \(127"):
        await client.manifest(name)


async def test_a_client_learns_of_an_added_store(make, endpoint, peer, group):
    peer.script.stores = group.address("a")
    client = make(endpoint)
    first = group.put("a", "first")
    assert (await client.manifest(first)).capture_id == first
    later = group.put("b", "later")
    peer.script.stores = group.address("a", "b")
    assert (await client.manifest(later)).capture_id == later
    assert {summary.capture_id for summary in await client.captures()} == {first, later}
    peer.script.stores = group.address()
    assert (await client.activations(group.put("c", "last"), allow_partial=True)).manifest.capture_id == "last"


async def test_a_store_with_a_new_address_keeps_its_captures(make, endpoint, peer, group):
    """The client knows that the capture is in the store, whose address has changed since."""
    before = FlakyStore(group.stores["a"].endpoint)
    peer.script.stores = [f"a={before.endpoint}", *group.address("b")]
    client = make(endpoint, timeout=10)
    name = group.put("a", "settled")
    assert (await client.manifest(name)).capture_id == name
    before.stop()
    peer.script.stores = group.address("a", "b")
    assert len(await client.store_endpoints()) == 2
    assert (await client.activations(name, allow_partial=True, timeout=10)).manifest.capture_id == name
    assert (await client.activations([name], allow_partial=True, timeout=10))[0].manifest.capture_id == name


async def test_a_capture_that_was_made_again_on_another_store_is_found(make, group):
    client = make("127.0.0.1:1", store=group.address())
    group.put("a", "wanderer")
    assert (await client.manifest("wanderer")).capture_id == "wanderer"
    await client.delete("wanderer")
    group.put("b", "wanderer")
    assert (await client.manifest("wanderer")).capture_id == "wanderer"
    assert (await client.activations("wanderer", allow_partial=True)).manifest.capture_id == "wanderer"


async def test_only_captures_of_an_unreachable_store_fail(make, group, away):
    stores = [*group.address("a", "b"), f"c={away}"]
    client = make("127.0.0.1:1", store=stores, timeout=2)
    here, there = placed("a"), placed("c")
    group.put("a", here)
    assert (await client.manifest(here)).capture_id == here
    for ask in (client.manifest, client.activations, client.delete):
        with pytest.raises(residuum.Unreachable, match=rf"The store c \({away}\) does not answer") as caught:
            await ask(there)
        assert (caught.value.endpoint, caught.value.metadata["store"]) == (away, "c")


async def test_a_capture_on_a_lower_rank_is_found_if_the_first_store_is_unreachable(make, group, away):
    client = make("127.0.0.1:1", store=[*group.address("a", "b"), f"c={away}"], timeout=10)
    name = placed("c")
    group.put(ranks(NAMES, name)[2], name)
    assert (await client.manifest(name)).capture_id == name


@pytest.mark.parametrize("peer_that_is_silent", ["inference", "store"])
@pytest.mark.parametrize(
    "read",
    [
        lambda client: client.activations("x-1", timeout=0.5),
        lambda client: client.activations(["x-1"], timeout=0.5),
        lambda client: client.follow("x-1", timeout=0.5),
        lambda client: client.rows(prefix="x-", layer=0, timeout=0.5),
        lambda client: client.search([1.0] * HIDDEN, layer=0, timeout=0.5),
    ],
    ids=["one", "list", "follow", "rows", "search"],
)
async def test_the_timeout_of_a_read_counts_while_its_stores_are_looked_for(
    make, group, silent, read, peer_that_is_silent
):
    """The calls that find out where to read had the client's own timeout."""
    stores = None if peer_that_is_silent == "inference" else [*group.address("a", "b"), f"c={silent}"]
    began = time.monotonic()
    with pytest.raises((residuum.DeadlineExceeded, residuum.Unreachable)):
        await read(make(silent, store=stores, timeout=20))
    assert time.monotonic() - began < 8, "gRPC gives up a connection without an answer after 10 s"


async def test_no_capture_is_reported_unknown_while_a_store_is_unreachable(make, group, away):
    """The store of the last rank is unreachable. The others do not have the capture, but that store may."""
    name = next(f"x-{at}" for at in range(1 << 20) if ranks(NAMES, f"x-{at}")[2] == "c")
    client = make("127.0.0.1:1", store=[*group.address("a", "b"), f"c={away}"], timeout=2)
    with pytest.raises(residuum.Unreachable, match=f"The capture {name} may be there: no other store holds it"):
        await client.manifest(name)


async def test_lists_of_all_stores_are_merged_newest_first(make, group):
    names = [group.put(NAMES[at % 3], f"n-{at:02}") for at in range(8)]
    client = make("127.0.0.1:1", store=group.address())
    listed = await client.captures(prefix="n-")
    assert [summary.capture_id for summary in listed] == names[::-1]
    assert [summary.store for summary in listed] == [NAMES[at % 3] for at in range(8)][::-1]
    assert not await client.captures(prefix="n-", states="complete")


async def test_pages_join_despite_concurrent_changes(make, group):
    names = [group.put(NAMES[at % 2], f"n-{at:02}") for at in range(9)]
    client = make("127.0.0.1:1", store=group.address())
    page = await client.captures_page(page_size=4, prefix="n-")
    assert [summary.capture_id for summary in page.captures] == names[:4:-1]
    await client.delete(names[5])  # it was listed already, so the next page stays the same
    await client.delete(names[3])
    group.put("c", "n-99")
    page = await client.captures_page(page_size=2, page_token=page.next_page_token, prefix="n-")
    assert [summary.capture_id for summary in page.captures] == [names[4], names[2]]
    page = await client.captures_page(page_token=page.next_page_token, prefix="n-")
    assert [summary.capture_id for summary in page.captures] == [names[1], names[0]]
    assert page.next_page_token == ""


async def test_invalid_page_tokens_are_refused(make, group):
    for at in range(3):
        group.put("a", f"n-{at}")
    client = make("127.0.0.1:1", store=group.address())
    token = (await client.captures_page(page_size=1)).next_page_token
    with pytest.raises(residuum.InvalidRequest, match="first page"):
        await client.captures_page(page_token=token, prefix="other")
    for bad in ("nonsense", "e30x", "WzFd"):
        with pytest.raises(residuum.InvalidRequest, match="Start from the first page"):
            await client.captures_page(page_token=bad)
    for size in (0, -1, 1001):
        with pytest.raises(residuum.InvalidRequest, match="1 to 1000"):
            await client.captures_page(page_size=size)
    fewer = make("127.0.0.1:1", store=group.address("b", "c"))
    with pytest.raises(residuum.InvalidRequest, match="a list of the stores a, which are gone"):
        await fewer.captures_page(page_token=token)
    more = make("127.0.0.1:1", store=group.address("a"))
    group.put("b", "newer")
    alone = (await more.captures_page(page_size=1)).next_page_token
    rest = await client.captures_page(page_token=alone)
    assert [summary.capture_id for summary in rest.captures] == ["n-1", "n-0"], (
        "captures that were added since are newer"
    )


async def test_lists_and_stats_report_an_unreachable_store(make, group, away):
    group.put("a", "n-1")
    client = make("127.0.0.1:1", store=[*group.address("a", "b"), f"c={away}"], timeout=10)
    for ask in (client.captures, client.captures_page, client.stats):
        with pytest.raises(residuum.Unreachable, match=rf"The store c \({away}\) does not answer. What it holds"):
            await ask()
    with pytest.warns(residuum.SilentStoreWarning, match=rf"c \({away}\)"):
        assert [summary.capture_id for summary in await client.captures(allow_partial=True)] == ["n-1"]
    with pytest.warns(residuum.SilentStoreWarning, match=rf"c \({away}\)"):
        stats = await client.stats(allow_partial=True)
    assert [item.store for item in stats] == ["a", "b"]
    health = await client.health()
    assert (health.stores[away], health.ok) == ("UNREACHABLE", False)


def test_the_warning_about_an_unreachable_store_is_where_the_user_asks(group, away):
    with residuum.Client(store=[*group.address("a"), f"c={away}"]) as client:

        def ask(name):
            return list(getattr(client, name)(allow_partial=True))

        for name in ("captures", "stats"):
            with pytest.warns(residuum.SilentStoreWarning) as warned:
                ask(name)
            assert [item.lineno for item in warned] == [ask.__code__.co_firstlineno + 1]


def test_a_warning_without_the_users_line_is_shown_once(group, away):
    """In a thread that runs only the client. A task has the line that runs its event loop."""
    stores = [*group.address("a"), f"c={away}"]

    async def ask():
        async with residuum.AsyncClient(store=stores) as client:
            await asyncio.gather(client.stats(allow_partial=True), client.stats(allow_partial=True))

    with warnings.catch_warnings(record=True) as of_tasks:
        warnings.simplefilter("default")
        asyncio.run(ask())
    assert [(item.filename, item.lineno) for item in of_tasks] == [(__file__, sys._getframe().f_lineno - 1)]
    with (
        residuum.Client(store=stores) as client,
        ThreadPoolExecutor() as pool,
        warnings.catch_warnings(record=True) as of_threads,
    ):
        warnings.simplefilter("default")
        for _ in range(2):
            pool.submit(client.stats, allow_partial=True).result()
    assert [item.filename for item in of_threads] == [inspect.getfile(residuum.Client.stats)]


async def test_stats_of_all_stores_add_up(make, group):
    for at in range(3):
        group.put(NAMES[at], f"n-{at}")
    stats = await make("127.0.0.1:1", store=group.address()).stats()
    assert [item.store for item in stats] == list(NAMES)
    total = residuum.StoreStats.total(stats)
    assert total.captures == {"aborted": 3}
    assert total.max_bytes == 3 * stats[0].max_bytes
    assert (total.store, total.retain_bytes) == ("total", None)


async def test_the_client_remembers_the_store_of_a_capture(make, endpoint, peer, store, group):
    """If the user's list has another address for a store's name than the service, the user's list takes precedence."""
    peer.script.stores = [f"here={store.endpoint}", *group.address("a")]
    peer.script.handle_store = "here"
    told = make(endpoint)
    reply = await told.generate("a", max_tokens=2, capture=residuum.Capture(layers=[0]))
    assert (await told.activations(reply.request_id)).manifest.is_complete
    named = make(endpoint, store=[f"here={store.endpoint}", *group.address("a")])
    reply = await named.generate("a", max_tokens=2, capture=residuum.Capture(layers=[0]))
    assert (await named.activations(reply.request_id)).manifest.is_complete


@pytest.mark.parametrize(
    ("stores", "told"),
    [
        (["a=h:1", "a=h:2"], "Two stores share the name"),
        ("h:1,h:1", "Two stores share the name"),
        ("a b=h:1", "is not a valid store name"),
        ("a=h", "is not an endpoint"),
        ("h:1,", "is not an endpoint"),
    ],
)
def test_invalid_store_lists_are_refused(kind, stores, told):
    with pytest.raises(residuum.InvalidRequest, match=told):
        kind("localhost:1", store=stores)


def test_the_command_uses_several_stores(cli, group, away):
    stores = ",".join(group.address())
    names = [group.put(NAMES[at % 3], f"n-{at}") for at in range(4)]
    code, out, _ = cli("ls", "--store", stores)
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == names[::-1]
    assert [line.split("\t")[-1] for line in out.splitlines()] == ["a", "c", "b", "a"]
    assert json.loads(cli("ls", "--json", "-n", "1", "--store", stores)[1])["store"] == "a"
    assert [json.loads(line)["store"] for line in cli("stats", "--json", "--store", stores)[1].splitlines()] == [
        "a", "b", "c", "total",
    ]  # fmt: skip
    flags = [word for store in (*group.address("a", "b"), f"c={away}") for word in ("--store", store)]
    code, out, err = cli("ls", *flags)
    assert (code, [line.split("\t")[0] for line in out.splitlines()]) == (1, ["n-3", "n-1", "n-0"])
    assert f"residuum: The store c ({away}) does not answer. What it holds is unknown." in err
    code, out, err = cli("stats", *flags)
    assert (code, out.count("server_version")) == (1, 3)
    assert f"c ({away})" in err
    lost = placed("c", start=100)
    code, out, err = cli("rm", lost, "n-0", *flags)
    assert (code, "n-0: deleted" in out) == (1, True)
    assert f"The capture {lost} may be there" in err


def test_rm_continues_after_a_store_timeout(cli, group, silent):
    name, late = group.put("a", placed("a")), placed("c")
    flags = [word for store in (*group.address("a", "b"), f"c={silent}") for word in ("--store", store)]
    code, out, err = cli("rm", late, name, *flags, "--timeout", "0.5")
    assert (code, f"{name}: deleted" in out) == (1, True)
    assert f"The store c ({silent}) does not answer. The capture {late} may be there" in err


def test_command_errors_name_command_line_flags(cli, group):
    with socket.create_server(("127.0.0.1", 0)) as closing:
        threading.Thread(target=_close_each, args=[closing], daemon=True).start()
        stores = f"{group.address('a')[0]},c=127.0.0.1:{closing.getsockname()[1]}"
        for command in (["ls"], ["rm", placed("c", start=200)]):
            code, _, err = cli(*command, "--store", stores)
            assert code == 1
            assert "It may require TLS (--tls-ca FILE)" in err


def _close_each(listener):
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_the_doctor_checks_each_store(cli, group, away):
    flags = [word for store in (*group.address("a", "b"), f"c={away}") for word in ("--store", store)]
    code, out, _ = cli("doctor", "--json", *flags)
    assert code == 1
    found = {line["check"]: line["ok"] for line in map(json.loads, out.splitlines())}
    a, b = (group.stores[name].endpoint for name in "ab")
    assert (found[f"store {a}: connection"], found[f"store {b}: connection"]) == (True, True)
    assert found[f"store {away}: connection"] is False
    assert (found[f"store {a}: health"], found[f"store {b}: room"], found["store answers"]) == (True, True, True)
    assert f"store {away}: health" not in found


def test_older_services_list_only_endpoints():
    old = inference_pb2.GetModelInfoResponse(store_endpoints=["h:1", "h:2"])
    assert residuum.ModelInfo.from_proto(old).stores == {"h:1": "h:1", "h:2": "h:2"}
    new = inference_pb2.GetModelInfoResponse(
        store_endpoints=["h:1"], stores=[placement_pb2.StoreAddress(name="a", endpoint="h:1")]
    )
    new.store_checks.add(store="a", endpoint="s:1", server_version="7")
    new.store_checks.add(store="b", endpoint="s:2").error.message = "The store b is away."
    info = residuum.ModelInfo.from_proto(new)
    assert info.stores == {"a": "h:1"}
    assert (info.store_reachable, info.store_detail) == (
        False,
        "the store a (s:1), version 7, answers it; The store b is away.",
    )
