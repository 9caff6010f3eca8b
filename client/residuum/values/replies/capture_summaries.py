"""The list of captures, and its pages."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field

from residuum.v1 import store_pb2
from residuum.values.captures.manifest_names import ARCHIVE_STATES, STATES, to_datetime
from residuum.wire.labels import LabelValue, to_dict


@dataclass(frozen=True)
class CaptureSummary:
    """A capture's entry in `client.captures()`.

    Attributes:
        capture_id: The ID of the capture and of its request.
        model: The model.
        state: "open", "complete", "incomplete" or "aborted".
        num_rows: Rows in the store, counted once for each layer and site.
        num_bytes: Bytes of chunks in the store.
        open_time: When the capture was opened.
        end_time: When the capture ended; None while it is open.
        store: The name of the store that holds it.
        tenant: The tenant that it belongs to; empty for the default tenant.
        labels: Its labels.
        archive_state: Where its rows are, if the store has an archive; see `Manifest.archive_state`.
    """

    capture_id: str
    model: str
    state: str
    num_rows: int
    num_bytes: int
    open_time: datetime.datetime | None
    end_time: datetime.datetime | None
    store: str = ""
    tenant: str = ""
    labels: Mapping[str, LabelValue] = field(default_factory=dict, hash=False)
    archive_state: str = ""

    @classmethod
    def from_proto(cls, proto: store_pb2.CaptureSummary, store: str = "") -> CaptureSummary:
        """Return the value of a message from the store with this name."""
        return cls(
            capture_id=proto.capture_id,
            model=proto.model,
            state=STATES.get(proto.state, "unknown"),
            num_rows=proto.num_rows,
            num_bytes=proto.num_bytes,
            open_time=to_datetime(proto.open_time),
            end_time=to_datetime(proto.end_time),
            store=store,
            tenant=proto.tenant,
            archive_state=ARCHIVE_STATES.get(proto.archive_state, ""),
            labels=to_dict(proto.labels),
        )


@dataclass(frozen=True)
class CapturePage:
    """One page of the list of captures.

    Attributes:
        captures: The captures, newest first.
        next_page_token: The token of the next page; empty on the last page.
    """

    captures: tuple[CaptureSummary, ...]
    next_page_token: str
