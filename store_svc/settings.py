"""Settings of the store service: flags, environment variables `RESIDUUM_...` or a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field, NonNegativeFloat, PositiveFloat, ValidationInfo

from store_svc.database.db import bytes_for_appends
from store_svc.memory_bound import memory_bound
from svc_common.security import SecureSettings
from svc_common.settings import Endpoint, OptionalEndpoint

_SMALLEST_MAP = 16 << 20


def _map_limit(size: ByteSize) -> ByteSize:
    if size < _SMALLEST_MAP:
        raise ValueError("at least 16MiB")
    return size


def _within_map(size: ByteSize | None, info: ValidationInfo) -> ByteSize | None:
    limit = info.data.get("max_bytes")
    if size is not None and limit is not None and not 0 < size <= bytes_for_appends(limit):
        raise ValueError(f"from 1 to {bytes_for_appends(limit)}: max-bytes, less what is kept for ending captures")
    return size


class StoreSettings(SecureSettings):
    """Settings of the store service."""

    listen: Endpoint = "127.0.0.1:50052"
    """Where to listen, as host:port. Port 0 takes a free one; see `port_file`."""

    metrics: OptionalEndpoint = ""
    """Where to show figures for Prometheus, as host:port: http://host:port/metrics. Default: nowhere."""

    path: Path
    """The folder of the database. It is made if it is not there. One store at a time may use it."""

    ack: Literal["committed", "synced"] = "committed"
    """What an acknowledgement waits for: `committed` survives the end of the process, `synced` the loss of power."""

    max_bytes: Annotated[ByteSize, AfterValidator(_map_limit)] = Field(default="64GiB", validate_default=True)
    """The greatest size that the database may grow to, such as 64GiB."""

    retain_hours: PositiveFloat | None = None
    """A capture is deleted when this many hours have passed since it ended. Default: captures are kept."""

    retain_bytes: Annotated[ByteSize | None, AfterValidator(_within_map)] = None
    """Captures are deleted, the one that ended first before the others, when the chunks of all together take more bytes
    than this, such as 48GiB. Those that have not ended, or are being read, stay. Leave some room below max-bytes: a
    chunk takes whole pages of 4 KiB. Default: nothing is deleted, and a full store refuses more."""

    sync_interval_seconds: PositiveFloat = 1.0
    """After how long without writes what is committed is also synced."""

    open_timeout_seconds: PositiveFloat = 3600.0
    """A capture that nobody seals ends INCOMPLETE when nothing is written to it for this long: its inference service
    was killed. Longer than a request may wait for its turn, and than it may generate without a captured row. Counted
    anew after a restart."""

    seal_timeout_seconds: PositiveFloat = 120.0
    """A capture whose request ended by itself ends INCOMPLETE when no expected row comes for this long. Counted anew
    after a restart."""

    ending_timeout_seconds: PositiveFloat = 5.0
    """A capture whose request was aborted, or failed, ends when no row that was under way comes for this long. Counted
    anew after a restart."""

    max_streams: Annotated[int, Field(ge=1, le=4096)] = 256
    """How many reads, and waits for a capture's end, may run at once."""

    max_writers: Annotated[int, Field(ge=1, le=4096)] = 128
    """How many streams of writers may run at once. One inference service opens one for each shipper."""

    max_open_mib: Annotated[int, Field(ge=1)] = 1024
    """Memory for keeping account of captures that have not ended, in MiB: what they are of, and which rows are there.
    When it is full, no capture can be opened and no row of an open one written until others have ended."""

    max_captures: Annotated[int, Field(ge=1)] = 1_000_000
    """How many captures are kept; one more is refused. Each takes about 1.5 KiB of memory."""

    first_message_seconds: PositiveFloat = 20.0
    """A call that has sent no message for this long is cancelled."""

    stall_seconds: PositiveFloat = 600.0
    """A stream whose caller reads nothing of what was sent to it for this long is cancelled. Those who wait for rows,
    or have none to write, may wait as long as they like."""

    grace_seconds: NonNegativeFloat = 10.0
    """How long running calls may take to end after SIGTERM or SIGINT."""

    port_file: Path | None = None
    """Write the port here when it is open, for programs that chose port 0."""

    nice: int = Field(default=0, ge=0, le=19)
    """By how much the store gives way to others who want the same core: niceness, as of `nice`. Where a model is served
    on the same machine, 5 keeps it from waiting."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""

    @property
    def memory_bound_bytes(self) -> int:
        """What the store may take of memory by these settings; see `memory_bound`."""
        return memory_bound(
            max_streams=self.max_streams,
            max_writers=self.max_writers,
            max_open_mib=self.max_open_mib,
            max_captures=self.max_captures,
        )
