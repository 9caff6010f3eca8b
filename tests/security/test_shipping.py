"""A row's whole path through real processes: worker, shipper, store, reader, with mutual TLS, tokens and tenants."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import residuum
from inference_svc.captures.keeper import CaptureKeeper
from inference_svc.shipping.credentials import to_arguments
from inference_svc.shipping.worker.producer import RingProducer
from residuum.rpc.credentials import TLS, Credentials
from residuum.v1 import capture_pb2, store_pb2, tensor_pb2
from residuum.wire.placement import StoreAddress
from residuum.wire.tokens import tenant_path
from tests.shipping.support import ENVIRONMENT, make_header
from tests.waiting import wait_for

LAYERS, WIDTH, POSITIONS = 4, 64, 8


@pytest.fixture
def secure_store(tmp_path, tokens, authority, server_pair):
    """Run a store in its own process. Yields its endpoint."""
    port = tmp_path / "port"
    flags = ["--tls-cert", server_pair.cert, "--tls-key", server_pair.key, "--tls-client-ca", authority.path]
    flags += ["--tokens", tokens.path, "--listen", "127.0.0.1:0", "--path", tmp_path / "db", "--port-file", port]
    process = subprocess.Popen([sys.executable, "-m", "store_svc", *map(str, flags)], env=ENVIRONMENT)
    wait_for(lambda: port.exists() and port.read_text().strip(), "the store's port")
    yield f"127.0.0.1:{port.read_text().strip()}"
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture
def own(tmp_path, tokens, authority, client_pair):
    """The credentials of the inference service."""
    file = tmp_path / "store.token"
    file.write_text(tokens.add("*", "write"))
    tls = TLS(ca=authority.path, cert=client_pair.cert, key=client_pair.key)
    return Credentials(tls=tls, token_file=file)


@pytest.fixture
def start_shipper(tmp_path, secure_store, own):
    processes = []

    def start():
        command = [sys.executable, "-m", "inference_svc.shipping", "--control", str(tmp_path / "ring")]
        command += ["--store", secure_store, *to_arguments(own)]
        log = (tmp_path / "shipper.log").open("ab")
        processes.append(subprocess.Popen(command, env=ENVIRONMENT, stderr=log))
        log.close()
        return processes[-1]

    yield start
    for process in processes:
        process.terminate()
        process.wait(30)


@pytest.fixture
def producer(tmp_path):
    opened = RingProducer(tmp_path / "ring", ring_bytes=4 << 20)
    opened.start()
    yield opened
    opened.close()


def describe(tenant):
    description = capture_pb2.CaptureDescription(
        capture_id="same",
        tenant=tenant,
        model="tiny",
        hidden_size=WIDTH,
        num_layers=LAYERS,
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        spec=capture_pb2.CaptureSpec(sites=[capture_pb2.SITE_RESID_POST], encoding=capture_pb2.ENCODING_RAW),
        prompt_token_ids=range(POSITIONS),
        num_sequences=1,
    )
    description.spec.layers.list.layers.extend(range(LAYERS))
    return description


def publish(producer, tenant, value):
    header = make_header(range(POSITIONS), LAYERS, WIDTH)
    rows = np.full((LAYERS, POSITIONS, WIDTH), value, np.float32)
    extent = producer.acquire(rows.nbytes, block=True)
    producer.memory[extent.offset : extent.offset + rows.nbytes] = rows.view(np.uint8).ravel()
    producer.publish(extent, tenant_path(tenant, "same"), [header])


async def seal(keeper, tenant):
    outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1], finish_reason="length")
    complete = capture_pb2.CAPTURE_STATE_COMPLETE
    keeper.seal(store_pb2.SealCaptureRequest(capture_id="same", tenant=tenant, sequences=[outcome], outcome=complete))


async def write(store, own, producer):
    """Capture with the same ID for two tenants."""
    keeper = CaptureKeeper(StoreAddress(store, store), own)
    for value, tenant in enumerate(("alice", "bob"), start=1):
        await keeper.open(describe(tenant))
        publish(producer, tenant, value)
        await seal(keeper, tenant)
    await keeper.close(20)


def test_rows_reach_their_tenants(secure_store, own, start_shipper, producer, tokens, tmp_path):
    start_shipper()
    asyncio.run(write(secure_store, own, producer))
    for value, tenant in enumerate(("alice", "bob"), start=1):
        token = tokens.add(tenant, "read")
        with residuum.Client("localhost:1", store=secure_store, token=token, tls=own.tls, timeout=20) as client:
            acts = client.activations("same", timeout=30)
            assert acts.manifest.state == "complete"
            assert all((acts[layer] == value).all() for layer in range(LAYERS))
            assert [item.capture_id for item in client.captures()] == ["same"]
    admin = tokens.add("*", "admin")
    with residuum.Client("localhost:1", store=secure_store, token=admin, tls=own.tls, tenant="bob") as client:
        assert (client.activations("same")[0] == 2).all()
    with residuum.Client("localhost:1", store=secure_store, token=admin, tls=own.tls) as client:
        assert {item.tenant for item in client.captures()} == {"alice", "bob"}
        with pytest.raises(residuum.UnknownCapture):
            client.manifest("same")  # the default tenant's
    for secret in (own.token_file.read_text(), admin):
        assert secret not in (tmp_path / "shipper.log").read_text()


def test_beyond_its_limit_a_tenants_capture_ends_incomplete(secure_store, own, start_shipper, producer, tokens):
    """The capture is never silently partial: its manifest has the reason. The shipper continues with other captures."""
    start_shipper()
    given = {tenant: tokens.add(tenant, "read") for tenant in ("alice", "bob")}
    tokens.limit("alice", max_bytes=1000, max_open_captures=5)
    asyncio.run(write(secure_store, own, producer))
    with residuum.Client("localhost:1", store=secure_store, token=given["alice"], tls=own.tls, timeout=20) as client:
        manifest = client.manifest("same", wait=30)
        assert (manifest.state, manifest.reason) == ("incomplete", "WRITE_FAILED")
        assert "in this store and may have 1000." in manifest.detail
        (stats,) = client.stats()
        assert (stats.tenant, stats.tenant_max_bytes, stats.tenant_max_open_captures) == ("alice", 1000, 5)
        assert (stats.num_bytes, stats.max_bytes) == (0, 0)
    with residuum.Client("localhost:1", store=secure_store, token=given["bob"], tls=own.tls, timeout=20) as client:
        assert client.manifest("same", wait=30).state == "complete"


def test_a_shipper_waits_for_a_token_that_works(secure_store, own, start_shipper, producer, tokens, tmp_path):
    """No row is lost in the meantime, because rows stay in the ring."""
    good = own.token_file.read_text()
    own.token_file.write_text("rsd_not-yet-there")
    shipper = start_shipper()
    keeper_credentials = Credentials(tls=own.tls, token=good)
    log = tmp_path / "shipper.log"

    async def open_and_seal():
        keeper = CaptureKeeper(StoreAddress(secure_store, secure_store), keeper_credentials)
        await keeper.open(describe("alice"))
        publish(producer, "alice", 7)
        await seal(keeper, "alice")
        await keeper.close(20)

    asyncio.run(open_and_seal())
    wait_for(lambda: "UNAUTHENTICATED" in log.read_text(), "the shipper's refusal")
    own.token_file.write_text(good)
    token = tokens.add("alice", "read")
    with residuum.Client("localhost:1", store=secure_store, token=token, tls=own.tls, timeout=20) as client:
        assert (client.activations("same", timeout=30)[3] == 7).all()
    assert shipper.poll() is None
    command_line = Path(f"/proc/{shipper.pid}/cmdline").read_bytes()
    assert good.encode() not in command_line
    assert os.fsencode(own.token_file) in command_line
