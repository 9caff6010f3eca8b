"""Settings of the store service: flags, environment variables `RESIDUUM_...` or a TOML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field, NonNegativeFloat, PositiveFloat, ValidationInfo

from residuum.wire.endpoints import ARCHIVE_SCHEMES
from store_svc.database.db import bytes_for_appends
from store_svc.memory_bound import memory_bound
from svc_common.security.tls import SecureSettings
from svc_common.settings import Endpoint, OptionalEndpoint

_SMALLEST_MAP = 16 << 20

_MOST_SHARDS = 8
"""Shards of a database on a machine with many cores, unless the operator chooses another number."""


_NotForever = Field(le=1e9)
"""Python's threads cannot wait for longer than about 9e9 seconds, nor for ever with a timeout."""

_Seconds = Annotated[PositiveFloat, _NotForever]


def _map_limit(size: ByteSize) -> ByteSize:
    if size < _SMALLEST_MAP:
        raise ValueError("must be at least 16MiB")
    return size


def _within_map(size: ByteSize | None, info: ValidationInfo) -> ByteSize | None:
    limit = info.data.get("max_bytes")
    if size is not None and limit is not None and not 0 < size <= bytes_for_appends(limit):
        raise ValueError(
            f"must be 1 to {bytes_for_appends(limit)} bytes: max-bytes, less the space reserved for ending captures"
        )
    return size


def _keep_within_map(size: ByteSize | None, info: ValidationInfo) -> ByteSize | None:
    return _within_map(size, info) if size else size


def _archive_url(text: str) -> str:
    if text and not text.startswith(ARCHIVE_SCHEMES):
        raise ValueError(f"must begin with {', '.join(ARCHIVE_SCHEMES)}, as in s3://bucket/prefix")
    return text


def _socket_path(text: str) -> str:
    if text not in {"auto", "off"} and not text.startswith("/"):
        raise ValueError("must be auto, off, or an absolute path such as /run/residuum/store.sock")
    return text


class StoreSettings(SecureSettings):
    """Settings of the store service."""

    listen: Endpoint = "127.0.0.1:50052"
    """The address to listen on, as host:port. Port 0 picks a free port; see port-file."""

    metrics: OptionalEndpoint = ""
    """The address of the Prometheus endpoint, as host:port; metrics are at http://host:port/metrics. Default: none."""

    path: Path
    """The folder of the database, created if missing. Only one store at a time may use it."""

    ack: Literal["committed", "synced"] = "committed"
    """What the store acknowledges: `committed` rows survive the death of the process, `synced` rows a power failure."""

    max_bytes: Annotated[ByteSize, AfterValidator(_map_limit)] = Field(default="64GiB", validate_default=True)
    """The greatest size that the database may reach, such as 64GiB. At least 16MiB."""

    shards: Annotated[int, Field(ge=1, le=64)] | None = None
    """In how many files the database keeps its rows. Threads write them at the same time, so several files use several
    cores. The number is fixed when the database is made. Default: half the cores, at most 8."""

    retain_hours: PositiveFloat | None = None
    """The store deletes a capture this many hours after it ended. Default: it keeps captures."""

    retain_bytes: Annotated[ByteSize | None, AfterValidator(_within_map)] = None
    """When the chunks of all captures together take more bytes than this, such as 48GiB, the store deletes captures in
    the order in which they ended. It never deletes captures that are open or being read. Choose less than max-bytes,
    because a chunk takes whole pages of 4 KiB. Default: the store deletes nothing, and refuses chunks when full."""

    archive: Annotated[str, AfterValidator(_archive_url)] = ""
    """Where the store copies ended captures: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or
    file:///folder. Each store needs a prefix of its own. Credentials come from the environment, such as
    AWS_ACCESS_KEY_ID. Needs the extra `archive` of residuum-server. Default: no archive."""

    archive_keep_bytes: Annotated[ByteSize | None, AfterValidator(_keep_within_map)] = None
    """When the chunks in the database take more bytes than this, the store drops the rows of captures that are in the
    archive, and reads them from there. Those that were not read for longest go first. 0: at once. Default: three
    quarters of max-bytes, less the space reserved for ending captures."""

    sync_interval_seconds: _Seconds = 1.0
    """The store syncs commits to disk after this long without writes."""

    open_timeout_seconds: _Seconds = 3600.0
    """An unsealed capture ends INCOMPLETE when nothing is written to it for this long. Choose longer than a request may
    queue, or generate without a captured row. A restart of the store restarts the timeout. If the inference service was
    killed, lease-seconds ends the capture sooner."""

    lease_seconds: _Seconds = 15.0
    """An inference service with open captures says several times in this time that it lives. If it does not, the store
    waits ending-timeout-seconds for rows in flight, and then ends its unsealed captures INCOMPLETE (SERVICE_GONE).
    Choose longer than an outage of the network between the two should last."""

    seal_timeout_seconds: _Seconds = 120.0
    """A capture that was sealed COMPLETE ends INCOMPLETE when no expected row arrives for this long. A restart of the
    store restarts the timeout."""

    ending_timeout_seconds: _Seconds = 5.0
    """A capture whose request was aborted or failed, or whose inference service was killed, ends when no row in flight
    arrives for this long. A restart of the store restarts the timeout."""

    full_timeout_seconds: _Seconds = 120.0
    """While the store is full, a capture that is open, or that was sealed COMPLETE, ends INCOMPLETE (STORE_FULL) when
    none of its rows is stored for this long. Until then its rows wait in the ring, and the model may wait too."""

    shared_memory: Annotated[str, AfterValidator(_socket_path)] = "auto"
    """Shared memory with clients and shippers on the same machine, which is faster than gRPC. `auto`: through a Unix
    socket that only processes of this user can use, in XDG_RUNTIME_DIR or the folder of temporary files. `off`: none. A
    path, such as /run/residuum/store.sock: the socket is there, and processes of this user or group can use it."""

    max_streams: Annotated[int, Field(ge=1, le=4096)] = 256
    """How many reads, and waits for a capture to end, may run at once."""

    max_writers: Annotated[int, Field(ge=1, le=4096)] = 128
    """How many writer streams may run at once. An inference service opens one for each of its shippers."""

    max_open_mib: Annotated[int, Field(ge=1)] = 1024
    """Memory for the state of open captures, in MiB: their descriptions, and which rows are stored. When it is full,
    the store opens no capture and writes no rows until others have ended."""

    max_captures: Annotated[int, Field(ge=1)] = 1_000_000
    """How many captures the store keeps; it refuses to open more. Each takes about 1.5 KiB of memory."""

    first_message_seconds: _Seconds = 20.0
    """The store cancels a call that has sent no message for this long."""

    stall_seconds: _Seconds = 600.0
    """The store cancels a stream whose caller does not read sent messages for this long. Callers that wait for rows, or
    have none to write, may wait as long as they like."""

    grace_seconds: Annotated[NonNegativeFloat, _NotForever] = 10.0
    """How long running calls may take to end after SIGTERM or SIGINT."""

    port_file: str = ""
    """Write the port to this file once the store listens, for programs that chose port 0."""

    nice: int = Field(default=0, ge=0, le=19)
    """The store's niceness, as of `nice`: higher values yield the processor to other processes. With an inference
    service on the same machine, 5 keeps the model from waiting."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""

    @property
    def archive_keeps(self) -> int:
        """The bytes of chunks beyond which rows are dropped that the archive has."""
        if self.archive_keep_bytes is not None:
            return self.archive_keep_bytes
        return bytes_for_appends(self.max_bytes) * 3 // 4

    @property
    def num_shards(self) -> int:
        """The number of shards of a new database."""
        return self.shards or max(min(len(os.sched_getaffinity(0)) // 2, _MOST_SHARDS), 1)

    @property
    def memory_bound_bytes(self) -> int:
        """The most memory that a store with these settings takes, in bytes; see `memory_bound`."""
        return memory_bound(
            max_streams=self.max_streams,
            max_writers=self.max_writers,
            max_open_mib=self.max_open_mib,
            max_captures=self.max_captures,
            has_archive=bool(self.archive),
        )
