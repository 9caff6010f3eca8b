"""Rows of 1 MiB, which fill a store quickly."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.v1 import capture_pb2
from residuum.wire.rows.frames import checksum, chunk_prefix
from tests.store.support import POST, Client, describe

MIB = 1 << 20
WIDE = MIB // 4


def wide_chunk(position: int) -> bytes:
    """Return one row of 1 MiB."""
    payload = np.full(WIDE, position, dtype="<f4").tobytes()
    header = capture_pb2.ChunkHeader(site=POST, layers=[0], positions=[position], dtype=1, width=WIDE)
    return chunk_prefix(header, checksum(payload), len(payload)) + payload


def open_wide(client: Client, name: str) -> None:
    description = describe(name, layers=[0], prompt=1000)
    description.hidden_size = WIDE
    client.open(description)


def append_until_full(client: Client, name: str) -> int:
    """Append rows one by one; return how many were acknowledged before the store was full."""
    for position in range(1000):
        failure = try_to_append(client, name, position)
        if failure is not None:
            assert failure.reason == Reason.ERROR_REASON_STORE_FULL
            return position
    return pytest.fail("the store was never full")


def try_to_append(client: Client, name: str, position: int) -> Failure | None:
    try:
        answers = client.append([wide_chunk(position)], name)
    except grpc.RpcError as error:
        return failure_from_rpc_error(error)
    assert answers[-1].committed_through == 1
    return None
