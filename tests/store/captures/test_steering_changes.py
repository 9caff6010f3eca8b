"""Steering changes arrive with the seal and are stored in the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import selection_pb2, steering_pb2
from residuum.wire.limits import MAX_STEERING_CHANGES_BYTES
from tests.store.support import COMPLETE, OPEN, Client, Process, describe, failing_with, make_chunk, serving

INVALID = Reason.ERROR_REASON_INVALID_FIELD


def change(*firsts: int, operations: int = 1, digests: int = 1) -> steering_pb2.SteeringChange:
    message = steering_pb2.SteeringChange(first_positions=firsts)
    for number in range(operations):
        operation = message.steering.operations.add(layer_digests=[bytes([number % 256]) * 32] * digests)
        operation.layers.CopyFrom(selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=range(digests))))
        operation.add.scale = number + 0.5
    return message


def of_size(size: int) -> steering_pb2.SteeringChange:
    """Return a change of one sequence with this many bytes."""
    message = change(5)
    message.steering.operations[0].add.digest = b"x" * (size - 100)  # only its length matters here
    message.steering.operations[0].add.digest += b"x" * (size - message.ByteSize())
    assert message.ByteSize() == size
    return message


def test_changes_of_steering_are_in_the_manifest_in_their_order(client: Client) -> None:
    client.open(describe(prompt=3, sequences=2))
    changes = [change(4, 7), change(5, 8, operations=0), change(0, 0, operations=2)]
    client.seal(generated=[2, 2], steering_changes=changes)
    assert list(client.get().steering_changes) == changes


@pytest.mark.parametrize("rows", ["all there", "some missing"])
def test_changes_of_steering_survive_a_restart(tmp_path: Path, rows: str) -> None:
    """The store keeps changes with the seal while rows are outstanding, and with the manifest afterwards."""
    changes = [change(4), change(5, operations=0)]
    with serving(tmp_path / "store") as (_, client):
        client.open(describe(layers=[0], prompt=3))
        if rows == "all there":
            client.append([make_chunk([0], range(4))])
        client.seal(generated=[2], steering_changes=changes)
        state = client.get().state
        assert state == (COMPLETE if rows == "all there" else OPEN)
    with serving(tmp_path / "store") as (_, client):
        manifest = client.get()
        assert (manifest.state, list(manifest.steering_changes)) == (state, changes)
        assert client.seal(generated=[2], steering_changes=changes).state == state  # a repeated seal succeeds
        if rows == "some missing":
            client.append([make_chunk([0], range(4))])
            assert list(client.get().steering_changes) == changes


def test_changes_of_steering_survive_a_kill_of_the_store(tmp_path: Path) -> None:
    process = Process(tmp_path / "store")
    process.client.open(describe(layers=[0], prompt=0))
    process.client.seal(generated=[1], steering_changes=[change(1)])
    process.end(9)
    process = Process(tmp_path / "store")
    assert list(process.client.get().steering_changes) == [change(1)]
    process.end()


def test_another_seal_with_other_changes_of_steering_is_refused(client: Client) -> None:
    client.open()
    client.seal(steering_changes=[change(4)])
    with failing_with(Reason.ERROR_REASON_CAPTURE_ENDED):
        client.seal(steering_changes=[change(5)])


@pytest.mark.parametrize(
    "changes",
    [[change()], [change(1)], [change(1, 2, 3)], [change(1, 2), change(1)]],
    ids=["none", "too few", "too many", "the second"],
)
def test_a_change_of_steering_has_a_first_position_for_every_sequence(
    client: Client, changes: list[steering_pb2.SteeringChange]
) -> None:
    client.open(describe(sequences=2))
    with failing_with(INVALID) as caught:
        client.seal(generated=[1, 1], steering_changes=changes)
    assert caught[0].metadata == {"field": "steering_changes"}
    assert client.get().state == OPEN
    assert not client.get().steering_changes


def test_the_total_size_of_steering_changes_is_limited(client: Client) -> None:
    client.open()
    half = of_size(MAX_STEERING_CHANGES_BYTES // 2)
    with failing_with(INVALID) as caught:
        client.seal(steering_changes=[half, half, change(5, operations=0)])
    assert caught[0].metadata == {"field": "steering_changes"}
    assert len(client.seal(steering_changes=[half, half]).steering_changes) == 2
