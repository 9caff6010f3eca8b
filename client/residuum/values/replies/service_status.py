"""The statistics of stores, and whether services are ready."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from residuum.v1 import store_pb2
from residuum.values.captures.manifest_names import STATES, to_datetime
from residuum.wire.placement import StoreAddress


@dataclass(frozen=True)
class StoreStats:
    """Statistics of a store.

    Attributes:
        endpoint: The store's address.
        captures: Number of captures in each state.
        num_bytes: Bytes of all chunks.
        num_chunks: Number of chunks.
        disk_bytes: Bytes that the database takes on disk.
        max_bytes: The greatest size that the database may reach.
        server_version: The version of the store.
        used_bytes: Bytes of the database that are in use; 0 if the store is older than this field.
        append_limit_bytes: The `used_bytes` at which the store is full; 0 if the store is older than this field.
        free_disk_bytes: Free bytes on the store's disk.
        why_full: Why the store refuses rows and new captures, in words; empty if it has room.
        retain_seconds: Seconds for which a capture is kept after it ended; None for ever.
        retain_bytes: The most bytes of chunks that are kept; None for no limit.
        expired_by_age: Captures deleted because of their age, since the store started.
        expired_by_size: Captures deleted because all together took too many bytes, since the store started.
        bytes_expired: Bytes of the chunks of these captures.
        server_time: The store's clock when it answered; None if the store is older than this field.
        store: The store's name.
        tenant: The tenant that the statistics are about; None if they are about the whole store, which only admins see.
            Other callers get only their tenant's captures and bytes.
        own_tenant: The caller's own tenant; None if the store is older than this field.
        tenant_max_bytes: Bytes of chunks that the tenant may have in this store; None for no limit.
        tenant_max_open_captures: Captures that the tenant may have open in this store; None for no limit.
        archive_url: Where the store's archive is; empty if it has none. The following fields are then 0 or empty.
        archive_pending: Ended captures that are not in the archive yet.
        archive_not_copied: Those of them that cannot be copied, because a chunk is damaged. The store's log names them.
        archive_copied: Captures whose rows are in the store and in the archive.
        archive_moved: Captures whose rows are only in the archive. `num_bytes` does not count them.
        archive_behind: Why nothing can be copied at the moment, in words; empty if the archive works.
    """

    endpoint: str
    captures: dict[str, int]
    num_bytes: int
    num_chunks: int
    disk_bytes: int
    max_bytes: int
    server_version: str
    used_bytes: int = 0
    append_limit_bytes: int = 0
    free_disk_bytes: int = 0
    why_full: str = ""
    retain_seconds: float | None = None
    retain_bytes: int | None = None
    expired_by_age: int = 0
    expired_by_size: int = 0
    bytes_expired: int = 0
    server_time: datetime.datetime | None = None
    store: str = ""
    tenant: str | None = None
    own_tenant: str | None = None
    tenant_max_bytes: int | None = None
    tenant_max_open_captures: int | None = None
    archive_url: str = ""
    archive_pending: int = 0
    archive_not_copied: int = 0
    archive_copied: int = 0
    archive_moved: int = 0
    archive_behind: str = ""

    @classmethod
    def from_proto(cls, store: StoreAddress, proto: store_pb2.GetStatsResponse) -> StoreStats:
        """Return the value of a message from a store."""
        retention, own, is_for_tenant = proto.retention, proto.tenant, proto.HasField("tenant")
        return cls(
            endpoint=store.endpoint,
            store=store.name,
            captures={STATES.get(item.state, "unknown"): item.count for item in proto.captures},
            num_bytes=proto.num_bytes,
            num_chunks=proto.num_chunks,
            disk_bytes=proto.disk_bytes,
            max_bytes=proto.max_bytes,
            server_version=proto.server_version,
            used_bytes=proto.used_bytes,
            append_limit_bytes=proto.append_limit_bytes,
            free_disk_bytes=proto.free_disk_bytes,
            why_full=proto.why_full,
            retain_seconds=retention.max_age.ToNanoseconds() / 1e9 if retention.HasField("max_age") else None,
            retain_bytes=retention.max_bytes or None,
            expired_by_age=retention.captures_expired_by_age,
            expired_by_size=retention.captures_expired_by_size,
            bytes_expired=retention.bytes_expired,
            server_time=to_datetime(proto.server_time),
            tenant=own.tenant if is_for_tenant else None,
            own_tenant=proto.own_tenant if proto.HasField("own_tenant") else None,
            tenant_max_bytes=own.max_bytes if own.HasField("max_bytes") else None,
            tenant_max_open_captures=own.max_open_captures if own.HasField("max_open_captures") else None,
            archive_url=proto.archive.url,
            archive_pending=proto.archive.captures_pending,
            archive_not_copied=proto.archive.captures_not_copied,
            archive_copied=proto.archive.captures_copied,
            archive_moved=proto.archive.captures_moved,
            archive_behind=proto.archive.why_behind,
        )

    @classmethod
    def total(cls, stats: Iterable[StoreStats]) -> StoreStats:
        """Return the sum of several stores' statistics. The retention settings of the sum are left unset."""
        each = list(stats)
        sums = {name: sum(getattr(item, name) for item in each) for name in _SUMMED}
        captures = sum((Counter(item.captures) for item in each), Counter())
        full = "; ".join(f"{item.store}: {item.why_full}" for item in each if item.why_full)
        versions = ", ".join(sorted({item.server_version for item in each}))
        return cls(
            store="total", endpoint="", captures=dict(captures), server_version=versions, why_full=full, **sums,
            tenant=_common(item.tenant for item in each), own_tenant=_common(item.own_tenant for item in each),
        )  # fmt: skip


def _common(names: Iterable[str | None]) -> str | None:
    """Return the name that all have; None if they differ."""
    different = set(names)
    return different.pop() if len(different) == 1 else None


_SUMMED = (
    "num_bytes", "num_chunks", "disk_bytes", "max_bytes", "used_bytes", "append_limit_bytes", "free_disk_bytes",
    "expired_by_age", "expired_by_size", "bytes_expired", "archive_pending", "archive_not_copied",
    "archive_copied", "archive_moved",
)  # fmt: skip
"""The statistics that are added up. Stores that share a disk each count its free bytes."""


@dataclass(frozen=True)
class Health:
    """Whether the services are ready: "SERVING", "NOT_SERVING" (loading or stopping) or "UNREACHABLE".

    Attributes:
        inference: The inference service; "" if the client was created with a store alone.
        stores: The status of each store by its endpoint; empty while the inference service does not name its stores.
    """

    inference: str
    stores: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether all services are serving."""
        inference = [self.inference] if self.inference else []
        return all(status == "SERVING" for status in (*inference, *self.stores.values()))
