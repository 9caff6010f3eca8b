"""The trace of each open capture: from when it was opened to when it ended, in the trace of the request it is of.

Shippers send the chunks of many requests through one stream, so the stream belongs to no request's trace; what it
brought does, and the end of the capture tells of it. A store that is started again has forgotten the traces of what is
open.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from residuum.rpc import tracing
from residuum.v1 import capture_pb2
from store_svc.captures.capture_names import CaptureName, name_of

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from store_svc.captures.lifecycle import Capture

_MOST = 10_000
"""Captures whose traces are remembered; beyond, the one that was opened first is forgotten."""


class CaptureTraces:
    """Remembers in which trace each capture was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OrderedDict[CaptureName, Context] = OrderedDict()

    def opened(self, name: CaptureName) -> None:
        """Note that the call that is being served has opened a capture; one that is repeated changes nothing."""
        context = tracing.current_context()
        if context is None:
            return
        with self._lock:
            self._opened.setdefault(name, context)
            while len(self._opened) > _MOST:
                self._opened.popitem(last=False)

    def ended(self, capture: Capture) -> None:
        """Trace a capture that has ended."""
        with self._lock:
            context = self._opened.pop(name_of(capture.description), None)
        if context is None:
            return
        manifest = capture.record()
        facts: dict[str, str | int] = {
            "residuum.request_id": capture.description.capture_id,
            "residuum.state": capture_pb2.CaptureState.Name(capture.state).removeprefix("CAPTURE_STATE_"),
            "residuum.rows": capture.ledger.num_rows,
            "residuum.missing_rows": capture.ledger.missing,
            "residuum.chunks": capture.num_frames,
            "residuum.bytes": capture.num_bytes,
        }
        tracing.record_span(
            "capture",
            context,
            manifest.open_time.ToNanoseconds(),
            manifest.end_time.ToNanoseconds(),
            **facts,
        )
