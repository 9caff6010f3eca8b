"""One lane for each store: what waits for it, and the stream that takes it there. No lane waits for another."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from inference_svc.shipping.shipper.outbox import Outbox
from inference_svc.shipping.shipper.parcels import Parcel
from inference_svc.shipping.shipper.uploader import Uploader
from residuum.rpc.credentials import Credentials
from residuum.wire.placement import StoreAddress, first_rank
from residuum.wire.tokens import split_path

_TICK_SECONDS = 0.5


class Lane:
    """The way to one store."""

    def __init__(self, store: StoreAddress, max_unacked_bytes: int, credentials: Credentials) -> None:
        """Prepare; see `Lanes`."""
        self.store = store
        self.outbox = Outbox(max_unacked_bytes)
        self.uploader = Uploader(store.endpoint, self.outbox, credentials, name=store.name)

    def figures(self) -> dict[str, float]:
        """Return what was done on the way to the store, and is under way."""
        return {
            "settled": self.uploader.num_settled,
            "rejected": self.uploader.num_rejected,
            "acked_bytes": self.uploader.acked_bytes,
            "streams": self.uploader.num_streams,
            "unacked_bytes": self.outbox.unacked_bytes,
            "ack_lag_seconds": round(self.outbox.seconds_without_ack(), 3),
        }

    def check_progress(self, limit_seconds: float) -> None:
        """Try a new connection if the store has owed an acknowledgement for longer than that."""
        if self.outbox.seconds_without_ack() > limit_seconds:
            self.uploader.restart_stream(f"no acknowledgement for {limit_seconds:g} s")


class Lanes:
    """The ways to all stores. Each has its own stream, acknowledgements, flow control and back-off.

    So a store that is away, or slow, holds up what is for it and nothing else; all that is shared is the thread that
    reads a worker's socket, and it never waits: what is handed over stays in the ring until it is sent.
    """

    def __init__(self, stores: Sequence[StoreAddress], max_unacked_bytes: int, credentials: Credentials) -> None:
        """Prepare a lane for each store; nothing is connected before `start`.

        Args:
            stores: The stores, of different names.
            max_unacked_bytes: Payload that may be under way to each of them without an acknowledgement.
            credentials: What they are shown.
        """
        self._lanes = {store.name: Lane(store, max_unacked_bytes, credentials) for store in stores}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def put(self, path: str, parcels: Iterable[Parcel]) -> None:
        """Add parcels of a capture, from any thread, to what waits for the store that keeps it; see `Outbox.put`.

        Args:
            path: The capture, and its tenant; see `tenant_path`.
            parcels: The parcels.
        """
        _, capture_id = split_path(path)
        self._lanes[first_rank(self._lanes, capture_id)].outbox.put(parcels)

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes.values():
            lane.uploader.start()

    def are_alive(self) -> bool:
        """Tell whether all threads run."""
        return all(lane.uploader.is_alive() for lane in self._lanes.values())

    def check_progress(self, limit_seconds: float) -> None:
        """See `Lane.check_progress`."""
        for lane in self._lanes.values():
            lane.check_progress(limit_seconds)

    def close(self) -> None:
        """Let streams end when all is sent."""
        for lane in self._lanes.values():
            lane.outbox.close()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all is delivered; say whether it is."""
        end = time.monotonic() + timeout_seconds
        return all(lane.uploader.wait(max(0.0, end - time.monotonic())) for lane in self._lanes.values())

    def abandon(self) -> dict[str, int]:
        """Give up what is left, at once; return how many parcels that are, by store, of those that left any."""
        left = {str(lane.store): lane.outbox.abandon() for lane in self._lanes.values() if lane.uploader.is_alive()}
        for lane in self._lanes.values():
            lane.uploader.abandon()
        return {store: count for store, count in left.items() if count}

    def figures(self) -> dict[str, float]:
        """Return the figures of each lane, as "figure:store"."""
        return {
            f"{name}:{lane.store.name}": value
            for lane in self._lanes.values()
            for name, value in lane.figures().items()
        }
