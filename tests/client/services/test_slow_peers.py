"""The client waits for a slow service. Only a missing service is reported as unreachable."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import grpc
import pytest

from residuum.rpc.channels import open_channel
from residuum.v1 import store_pb2, store_pb2_grpc
from tests.client.support.running_store import RunningStore

if TYPE_CHECKING:
    from pathlib import Path


def test_a_slow_connection_is_waited_for(tmp_path: Path) -> None:
    """The machine accepts the connection, and the store answers two seconds later. gRPC does not retry streams."""
    store = RunningStore(tmp_path)
    store.process.send_signal(signal.SIGSTOP)
    wakes = threading.Timer(2.0, store.process.send_signal, [signal.SIGCONT])
    wakes.start()
    try:
        with open_channel(store.endpoint) as channel, pytest.raises(grpc.RpcError) as raised:
            list(store_pb2_grpc.StoreServiceStub(channel).ReadChunks(store_pb2.ReadChunksRequest(capture_id="none")))
    finally:
        wakes.join()
        store.stop()
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND, "the store answered"
