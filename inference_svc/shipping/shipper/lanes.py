"""Lanes: each store has its own outbox and its own stream. No lane waits for another."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from inference_svc.shipping.shipper.outbox import Outbox
from inference_svc.shipping.shipper.parcels import Parcel
from inference_svc.shipping.shipper.shared_rings import Rings
from inference_svc.shipping.shipper.uploader import Uploader
from residuum.rpc.credentials import Credentials
from residuum.wire.placement import StoreAddress, first_rank
from residuum.wire.tokens import split_path

_TICK_SECONDS = 0.5


class Lane:
    """The outbox and the uploader of one store."""

    def __init__(
        self, store: StoreAddress, max_unacked_bytes: int, credentials: Credentials, rings: Rings | None
    ) -> None:
        """Prepare the lane of one store; see `Lanes`."""
        self.store = store
        self.outbox = Outbox(max_unacked_bytes)
        self.uploader = Uploader(store.endpoint, self.outbox, credentials, name=store.name, rings=rings)

    def figures(self) -> dict[str, float]:
        """Return the figures of this lane, by name."""
        return {
            "settled": self.uploader.num_settled,
            "rejected": self.uploader.num_rejected,
            "acked_bytes": self.uploader.acked_bytes,
            "streams": self.uploader.num_streams,
            "unacked_bytes": self.outbox.unacked_bytes,
            "ack_lag_seconds": round(self.outbox.seconds_without_ack(), 3),
        }

    def check_progress(self, limit_seconds: float) -> None:
        """Try a new connection if the store has owed an acknowledgement for longer than `limit_seconds`."""
        if self.outbox.seconds_without_ack() > limit_seconds:
            self.uploader.restart_stream(f"no acknowledgement for {limit_seconds:g} s")


class Lanes:
    """The lanes of all stores. Each has its own stream, acknowledgements, flow control and backoff.

    A store that is slow or does not answer delays only its own rows. The lanes share one thread, which reads a worker's
    socket. It never waits, because rows stay in the ring until they are sent.
    """

    def __init__(
        self,
        stores: Sequence[StoreAddress],
        max_unacked_bytes: int,
        credentials: Credentials,
        rings: Rings | None = None,
    ) -> None:
        """Prepare a lane for each store; nothing is connected before `start`.

        Args:
            stores: The stores, of different names.
            max_unacked_bytes: Most payload bytes that each store may leave unacknowledged.
            credentials: The credentials for all stores.
            rings: The rings that stores on this machine may read from.
        """
        self._lanes = {store.name: Lane(store, max_unacked_bytes, credentials, rings) for store in stores}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def put(self, path: str, parcels: Iterable[Parcel]) -> None:
        """Add parcels of a capture to the outbox of its store, from any thread; see `Outbox.put`.

        Args:
            path: The capture, and its tenant; see `tenant_path`.
            parcels: The parcels.
        """
        _, capture_id, _ = split_path(path)
        self._lanes[first_rank(self._lanes, capture_id)].outbox.put(parcels)

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes.values():
            lane.uploader.start()

    def are_alive(self) -> bool:
        """Return whether all threads run."""
        return all(lane.uploader.is_alive() for lane in self._lanes.values())

    def check_progress(self, limit_seconds: float) -> None:
        """See `Lane.check_progress`."""
        for lane in self._lanes.values():
            lane.check_progress(limit_seconds)

    def close(self) -> None:
        """Let the streams end once no parcel waits."""
        for lane in self._lanes.values():
            lane.outbox.close()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until everything is delivered, and return whether it is."""
        end = time.monotonic() + timeout_seconds
        return all(lane.uploader.wait(max(0.0, end - time.monotonic())) for lane in self._lanes.values())

    def abandon(self) -> dict[str, int]:
        """Give up at once. Return the number of undelivered parcels of each store that has any."""
        left = {str(lane.store): lane.outbox.abandon() for lane in self._lanes.values() if lane.uploader.is_alive()}
        for lane in self._lanes.values():
            lane.uploader.abandon()
        return {store: count for store, count in left.items() if count}

    def figures(self) -> dict[str, float]:
        """Return the figures of all lanes, with keys of the form "figure:store"."""
        return {
            f"{name}:{lane.store.name}": value
            for lane in self._lanes.values()
            for name, value in lane.figures().items()
        }
