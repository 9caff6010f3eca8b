"""Replaces vLLM's worker: `python -m bench.store.feeder CONTROL RING_MIB`, started by bench.store.

It runs the worker's end of shipping, `RingProducer`, with rows that are already in the ring. This is realistic, because
a GPU writes them there without the CPU. Each line on standard input is a request and each line on standard output an
answer, both JSON. The process ends when standard input ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.processes import answer_lines
from bench.store.captures import Shape, random_bytes
from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.worker.producer import RingProducer
from svc_common.logs import configure_logs

_DRAIN_SECONDS = 600.0
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.01


class Feeder:
    """Passes rows to shippers."""

    def __init__(self, control: str, ring_mib: int) -> None:
        self._producer = RingProducer(control, ring_bytes=ring_mib << 20)
        self._producer.memory[:] = random_bytes(self._producer.ring_bytes)
        self._producer.start()

    def wait(self, shippers: int) -> dict[str, Any]:
        """Wait until this number of shippers is connected."""
        end = time.monotonic() + _WAIT_SECONDS
        while self._producer.stats().connected_shippers < shippers:
            if time.monotonic() > end:
                return {"error": f"{shippers} shippers did not connect in {_WAIT_SECONDS:.0f} s"}
            time.sleep(_POLL_SECONDS)
        return {}

    def feed(self, captures: Sequence[str], shape: Shape) -> dict[str, Any]:
        """Pass all rows of some captures to the shippers, block by block, as if they were generated concurrently.

        Returns:
            The times of the first block and of the last acknowledgement, on the monotonic clock that all processes
            share, and the offsets in the ring of the first capture's blocks.
        """
        producer = self._producer
        offsets = []
        started = time.monotonic()
        for header in shape.headers():
            size = payload_bytes(header)
            for capture_id in captures:
                extent = producer.acquire(size, block=True)
                assert extent is not None  # noqa: S101 - the call waits until there is room
                if capture_id == captures[0]:
                    offsets.append(extent.offset)
                producer.publish(extent, capture_id, [header])
        if not producer.drain(_DRAIN_SECONDS):
            return {"error": f"rows were not acknowledged in {_DRAIN_SECONDS:.0f} s"}
        return {"started": started, "ended": time.monotonic(), "offsets": offsets}


def main() -> None:
    """Answer until standard input ends."""
    control, ring_mib = sys.argv[1:]
    configure_logs("info")  # logs must not go to standard output, which has the answers
    feeder = Feeder(control, int(ring_mib))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "shippers" in request:
            return feeder.wait(request["shippers"])
        return feeder.feed(request["captures"], Shape(**request["shape"]))

    answer_lines({}, answer)  # print the first line now, so that shippers connect


if __name__ == "__main__":
    main()
