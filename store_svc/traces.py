"""Records one span for each capture, from its opening to its end, in the trace of the capture's request.

A shipper sends the chunks of many requests through one stream, so that stream belongs to no request's trace. The
capture's span reports what the stream brought for its request. A restarted store forgets the traces of open captures.
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

_MAX_TRACES = 10_000
"""Captures whose traces are remembered. Beyond this, the one opened first is forgotten."""


class CaptureTraces:
    """Remembers the trace in which each capture was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OrderedDict[CaptureName, Context] = OrderedDict()

    def opened(self, name: CaptureName) -> None:
        """Note that the current call has opened a capture."""
        context = tracing.current_context()
        if context is None:
            return
        with self._lock:
            self._opened.pop(name, None)  # of a capture that was deleted or replaced before it ended
            self._opened[name] = context
            while len(self._opened) > _MAX_TRACES:
                self._opened.popitem(last=False)

    def ended(self, capture: Capture) -> None:
        """Record the span of a capture that has ended."""
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
