"""The labels of captures in the database, and an index by their values.

Labels are separate from manifests, because manifests of ended captures never change. They are not in the catalog,
because they would take too much memory there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from residuum.v1 import capture_pb2
from residuum.wire.labels import Condition, canonical, value_of
from store_svc.database.db import Database, Table, Txn
from store_svc.database.keys import LABEL_DIGEST_BYTES, label_prefix, pack_number, unpack_number

_NUMBERS_AT_ONCE = 512
"""Index entries that one read transaction looks at."""


def read_labels(txn: Txn, number: int) -> bytes:
    """Return the labels of a capture as a serialised CaptureManifest with no other field; empty if it has none.

    Appended to a serialised manifest, they become its labels.
    """
    value = txn.get(Table.LABELS, pack_number(number))
    return bytes(value) if value is not None else b""


def parse_labels(data: bytes) -> list[capture_pb2.Label]:
    """Return the labels that `read_labels` returned."""
    return list(capture_pb2.CaptureManifest.FromString(data).labels)


def write_labels(txn: Txn, tenant: str, number: int, labels: Collection[capture_pb2.Label]) -> None:
    """Replace the labels of a capture, and its entries in the index."""
    before = _index_keys(tenant, number, parse_labels(read_labels(txn, number)))
    after = _index_keys(tenant, number, labels)
    for key in before - after:
        txn.delete(Table.LABEL_INDEX, key)
    for key in after - before:
        txn.put(Table.LABEL_INDEX, key, b"")
    if labels:
        txn.put(Table.LABELS, pack_number(number), capture_pb2.CaptureManifest(labels=labels).SerializeToString())
    elif before:
        txn.delete(Table.LABELS, pack_number(number))


def _index_keys(tenant: str, number: int, labels: Iterable[capture_pb2.Label]) -> set[bytes]:
    suffix = pack_number(number)
    return {label_prefix(tenant, label.name, canonical(value_of(label))) + suffix for label in labels}


class LabelReader:
    """Reads labels of committed captures. Any thread may use it."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def of(self, number: int) -> list[capture_pb2.Label]:
        """Return the labels of a capture, by name; none if it does not exist."""
        with self._db.read() as txn:
            data = read_labels(txn, number)
        return parse_labels(data) if data else []

    def candidates(
        self, conditions: Iterable[Condition], tenant: str | None, before: int | None
    ) -> Iterator[int] | None:
        """Return the captures that may meet some conditions, from the index.

        Args:
            conditions: The conditions.
            tenant: The captures' tenant; None for all tenants.
            before: Only captures with a lower number; None for all.

        Returns:
            Their numbers, newest first. None if the index cannot answer, because no condition is an equality or
            `tenant` is None.
        """
        equal = next((condition for condition in conditions if condition.operator == "="), None)
        if equal is None or tenant is None:
            return None
        return self._indexed(label_prefix(tenant, equal.name, canonical(equal.value)), before)

    def _indexed(self, prefix: bytes, before: int | None) -> Iterator[int]:
        at = prefix + (b"\xff" * 9 if before is None else pack_number(before))
        while True:
            with self._db.read() as txn:
                keys = txn.keys_before(Table.LABEL_INDEX, prefix, at, _NUMBERS_AT_ONCE)
            if not keys:
                return
            yield from (unpack_number(key[LABEL_DIGEST_BYTES:]) for key in keys)
            at = keys[-1]
