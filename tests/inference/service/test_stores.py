"""A service with several real stores: placement, a store that does not answer, and IDs that exist already."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from inference_svc.captures import keeper as capture_keeper
from inference_svc.captures import store_link
from inference_svc.captures.stores import Stores
from inference_svc.requests.registry import RequestRegistry
from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import Credentials, CredentialsError, TokenSource
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, inference_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from residuum.wire.placement import StoreAddress, first_rank, parse_stores
from store_svc.database.db import StoreFullError
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests import ports
from tests.inference.service_support import LAYERS, ask, failure_of, running_service, spec, until
from tests.inference.taps_support import select

NAMES = ("a", "b", "c")
NO_ROWS = capture_pb2.CaptureSpec(layers=LAYERS, positions=select((1000, None)))
"""A capture that is complete as soon as it is sealed: in these tests no worker sends rows."""


class Group:
    def __init__(self, folder):
        self.folder = folder
        self.stores = {}
        self.ports = {name: ports.reserve() for name in NAMES}

    async def start(self, name):
        settings = StoreSettings(listen=f"127.0.0.1:{self.ports[name]}", path=self.folder / name)
        self.stores[name] = await asyncio.to_thread(Store, settings)

    async def stop(self, name):
        await asyncio.to_thread(self.stores.pop(name).stop)

    def addresses(self, *names):
        return [f"{name}=127.0.0.1:{self.ports[name]}" for name in names or NAMES]

    @asynccontextmanager
    async def stub(self, name):
        async with open_aio_channel(f"127.0.0.1:{self.ports[name]}") as channel:
            yield store_pb2_grpc.StoreServiceStub(channel)

    async def ids(self, name):
        async with self.stub(name) as stub:
            return {item.capture_id for item in (await stub.ListCaptures(store_pb2.ListCapturesRequest())).captures}

    async def delete(self, name, capture_id):
        async with self.stub(name) as stub:
            await stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=capture_id))


@pytest.fixture
async def group(tmp_path):
    running = Group(tmp_path)
    for name in NAMES:
        await running.start(name)
    yield running
    for name in list(running.stores):
        await running.stop(name)


def placed(store, names=NAMES, start=0):
    """An ID that belongs to a store."""
    return next(name for at in range(start, 1 << 20) if first_rank(names, name := f"x-{at}") == store)


async def test_each_capture_goes_to_its_store_and_the_handle_names_it(group):
    async with running_service(group.addresses()) as service:
        ids = {name: placed(name) for name in NAMES}
        for name, capture_id in ids.items():
            started, *_ = await service.events(ask(spec(capture_id, NO_ROWS)))
            handle = inference_pb2.CaptureHandle(
                capture_id=capture_id, store=name, store_endpoint=f"127.0.0.1:{group.ports[name]}"
            )
            assert started.started.capture == handle
        assert [await group.ids(name) for name in NAMES] == [{ids[name]} for name in NAMES]


async def test_an_id_that_an_earlier_store_holds_is_refused(group):
    """A store was added: the ID now belongs to the new one, but an earlier store holds a capture with it."""
    name = placed("c")
    before = first_rank(("a", "b"), name)
    async with running_service(group.addresses("a", "b")) as service:
        await service.events(ask(spec(name, NO_ROWS)))
    async with running_service(group.addresses()) as service:
        failure = await failure_of(service.events(ask(spec(name, NO_ROWS))))
        assert (failure.reason_name, failure.metadata["store"]) == ("CAPTURE_EXISTS", before)
        assert f"The store {before} (127.0.0.1:{group.ports[before]}) holds a capture '{name}'" in failure.message
        assert not await group.ids("c")
        registered = (await service.register(spec(name, NO_ROWS))).request_id
        assert (await failure_of(service.events(ask(registered)))).reason_name == "CAPTURE_EXISTS"
        await group.delete(before, name)
        await service.events(ask(registered))  # the registration was not used up
        assert await group.ids("c") == {name}


async def test_an_unreachable_store_affects_only_its_own_captures(group):
    """If the list of stores never changed, no other store matters, for IDs of callers and for the service's IDs."""
    await group.stop("c")
    async with running_service(group.addresses(), fixed_stores=True) as service:
        for call in (service.register, lambda wanted: service.events(ask(wanted))):
            failure = await failure_of(call(spec(placed("c"), NO_ROWS)))
            assert (failure.reason_name, failure.metadata["store"]) == ("STORE_UNREACHABLE", "c")
            assert (
                "captures whose ID belongs to it cannot be made. Try again later, or use another ID" in failure.message
            )
        for name in "ab":
            assert (await service.events(ask(spec(placed(name), NO_ROWS))))[-1].HasField("finished")
        await service.events(ask(spec()))
        await group.start("c")
        await service.events(ask(spec(placed("c"), NO_ROWS)))
        assert await group.ids("c") == {placed("c")}


async def test_ids_that_callers_chose_need_every_store_unless_the_list_never_changed(group):
    await group.stop("c")
    async with running_service(group.addresses()) as service:
        failure = await failure_of(service.events(ask(spec(placed("a"), NO_ROWS))))
        assert (failure.reason_name, failure.metadata["store"]) == ("STORE_UNREACHABLE", "c")
        assert "Let the service choose the ID" in failure.message
        assert not await group.ids("a"), "no capture was created"
        await group.start("c")
        await service.events(ask(spec(placed("a"), NO_ROWS)))


async def test_ids_that_the_service_makes_avoid_a_store_that_does_not_answer(group):
    await group.stop("c")
    async with running_service(group.addresses()) as service:
        await failure_of(
            service.register(spec(placed("c"), NO_ROWS))
        )  # now the service knows that the store does not answer
        for _ in range(12):
            request_id = (await service.register(spec("", NO_ROWS))).request_id
            await service.events(ask(request_id))
            await service.events(ask(spec("", NO_ROWS)))
        counts = [len(await group.ids(name)) for name in "ab"]
        assert sum(counts) == 24
        assert all(counts), "the other stores share the captures"


async def test_a_store_that_failed_is_tried_again_after_a_while(monkeypatch):
    keeper = capture_keeper.CaptureKeeper(StoreAddress("a", "127.0.0.1:1"))
    assert (keeper.is_avoided, keeper.answered) == (False, None)
    with pytest.raises(Failure):
        await keeper.check_reachable()
    assert (keeper.is_avoided, keeper.answered) == (True, False)
    monkeypatch.setattr(store_link, "_AVOIDED_SECONDS", 0.0)  # as if the time had passed
    assert not keeper.is_avoided
    await keeper.close(0)


async def test_requests_without_an_id_go_to_another_store_while_theirs_is_full(group):
    async with running_service(group.addresses()) as service:
        group.stores["a"]._writer.room.refused(StoreFullError("the disk is full"))
        failure = await failure_of(service.events(ask(spec(placed("a"), NO_ROWS))))
        assert failure.reason_name == "STORE_FULL"
        assert "the disk is full" in failure.message
        for _ in range(8):
            await service.events(ask(spec("", NO_ROWS)))
        assert not await group.ids("a")


async def test_a_capture_is_sealed_although_the_token_cannot_be_read_for_a_while(group, tmp_path, monkeypatch):
    """As when the connection is new, so that no earlier token is known."""
    token = tmp_path / "token"
    token.write_text("secret")
    (address,) = parse_stores(group.addresses("a"))
    keeper = capture_keeper.CaptureKeeper(address, Credentials(token_file=token))
    description = capture_pb2.CaptureDescription(
        capture_id="x", model="m", hidden_size=8, num_layers=4, dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        prompt_token_ids=[1], num_sequences=1,
    )  # fmt: skip
    description.spec.layers.list.layers.append(0)
    description.spec.encoding = capture_pb2.ENCODING_RAW
    description.spec.sites.append(capture_pb2.SITE_RESID_POST)
    await keeper.open(description)

    def refused(_source):
        raise CredentialsError(f"The token file {token} cannot be read")

    with capture_logs() as lines, monkeypatch.context() as patch:
        patch.setattr(TokenSource, "get", refused)
        seal = store_pb2.SealCaptureRequest(capture_id="x", outcome=capture_pb2.CAPTURE_STATE_ABORTED)
        seal.sequences.add(finish_reason="abort")
        keeper.seal(seal)
        await until(lambda: not keeper.answered)
        patch.undo()
        await until(lambda: not keeper.num_seals)
    (line,) = lines
    assert (line["request_id"], line["log_level"]) == ("x", "warning")
    assert f"The token file {token} cannot be read" in line["cause"]
    async with group.stub("a") as stub:
        manifest = (await stub.GetCapture(store_pb2.GetCaptureRequest(capture_id="x"))).manifest
    assert manifest.HasField("seal_time")
    await keeper.close(0)


async def test_ids_are_made_although_no_store_answers():
    stores = Stores(parse_stores(["a=127.0.0.1:1", "b=127.0.0.1:2"]))
    for keeper in stores.keepers.values():
        with pytest.raises(Failure):
            await keeper.check_reachable()
        assert keeper.is_avoided
    assert RequestRegistry(1, 1, make_id=stores.make_id).make_id().startswith("req-")
    await stores.close(0)


async def test_model_info_lists_the_stores_and_whether_they_answer(group):
    await group.stop("b")
    async with running_service(group.addresses()) as service:
        info = await service.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(check_store=True))
    assert [f"{store.name}={store.endpoint}" for store in info.stores] == group.addresses()
    assert list(info.store_endpoints) == [store.endpoint for store in info.stores]
    assert [(check.store, check.HasField("error")) for check in info.store_checks] == [
        ("a", False), ("b", True), ("c", False),
    ]  # fmt: skip
    assert info.store_check == info.store_checks[1], "older clients see the store that fails"
    assert f"The store b (127.0.0.1:{group.ports['b']}) does not answer" in info.store_check.error.message
