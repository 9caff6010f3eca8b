"""The allocation of extents in a ring, with reserved room for each store."""

from __future__ import annotations

from collections.abc import Sequence

from inference_svc.shipping.free_runs import FreeRuns
from inference_svc.shipping.ring import EXTENT_ALIGNMENT, Extent


class Allotment:
    """Allocates extents of any size from one part of a ring. Not thread-safe.

    It takes the first free run that is long enough, and merges free neighbours. Extents come back in about the order in
    which they were taken, so free runs stay few and long.
    """

    def __init__(self, num_bytes: int, offset: int = 0) -> None:
        """Start with all bytes free. Bytes beyond the last multiple of EXTENT_ALIGNMENT are never used.

        Args:
            num_bytes: Bytes of the part.
            offset: The start of the part in the ring, a multiple of EXTENT_ALIGNMENT.
        """
        self.num_bytes = num_bytes
        """Bytes of the part."""
        self._offset = offset
        self._free = FreeRuns(num_bytes // EXTENT_ALIGNMENT)
        self.bytes_used = 0
        """Bytes of taken extents, each rounded up to a multiple of EXTENT_ALIGNMENT."""

    @property
    def fullness(self) -> float:
        """The taken share of the bytes, from 0 to 1; 1 without any bytes."""
        return self.bytes_used / self.num_bytes if self.num_bytes else 1.0

    def take(self, nbytes: int) -> Extent | None:
        """Take an extent of `nbytes` bytes; return None if no free run is long enough."""
        units = _units(nbytes)
        start = self._free.take(units) if nbytes <= self.num_bytes else None
        if start is None:
            return None
        self.bytes_used += units * EXTENT_ALIGNMENT
        return Extent(self._offset + start * EXTENT_ALIGNMENT, nbytes)

    def holds(self, extent: Extent) -> bool:
        """Return whether an extent lies in this part."""
        return self._offset <= extent.offset < self._offset + self.num_bytes

    def give_back(self, extent: Extent) -> None:
        """Free an extent that was taken."""
        units = _units(extent.nbytes)
        self._free.give_back((extent.offset - self._offset) // EXTENT_ALIGNMENT, units)
        self.bytes_used -= units * EXTENT_ALIGNMENT


class SharedAllotment:
    """Allocates extents of a ring for several stores, so that a store that takes no rows leaves room for the others.

    One half of the ring is divided into equal *reserves*, one for each store. All stores share the other half. A
    store's extents come from its reserve, and from the shared half when the reserve is full. So a store that does not
    answer can fill its own reserve and the shared half, but not another store's reserve. A single store has the whole
    ring.

    A reserve is a contiguous part of the ring, not a quota of bytes. So an extent that fits the reserve always finds
    room there once the store's earlier extents have left, however the ring is fragmented elsewhere. Not thread-safe.
    """

    def __init__(self, ring_bytes: int, stores: Sequence[str]) -> None:
        """Start with all bytes free.

        Args:
            ring_bytes: Bytes of the ring.
            stores: The names of the stores, at least one.
        """
        reserve = reserve_bytes(ring_bytes, len(stores))
        self._reserves = {store: Allotment(reserve, index * reserve) for index, store in enumerate(stores)}
        divided = reserve * len(stores)
        self._common = Allotment(ring_bytes - divided if len(stores) > 1 else 0, divided)
        self.largest = max(self._common.num_bytes, reserve)
        """Bytes of the largest extent that can ever be allocated."""
        self._used = dict.fromkeys(stores, 0)
        self._owners: dict[Extent, str] = {}

    @property
    def bytes_used(self) -> int:
        """Bytes of taken extents, each rounded up to a multiple of EXTENT_ALIGNMENT."""
        return sum(self._used.values())

    @property
    def used(self) -> dict[str, int]:
        """`bytes_used` of each store."""
        return dict(self._used)

    @property
    def fullness(self) -> float:
        """The taken share of the room that a store can take, from 0 to 1, for the store with the least room."""
        return min(max(reserve.fullness for reserve in self._reserves.values()), self._common.fullness)

    def take(self, nbytes: int, store: str) -> Extent | None:
        """Take an extent for a store; return None if neither its reserve nor the shared half has room.

        Raises:
            ValueError: The size is not positive, or larger than `largest`.
        """
        if not 0 < nbytes <= self.largest:
            raise ValueError(
                f"an extent of {nbytes} bytes cannot be allocated: this ring allows 1 to {self.largest} bytes. Make "
                "the ring larger (--ring-mib)."
            )
        extent = self._reserves[store].take(nbytes) or self._common.take(nbytes)
        if extent is not None:
            self._used[store] += _units(nbytes) * EXTENT_ALIGNMENT
            self._owners[extent] = store
        return extent

    def give_back(self, extent: Extent) -> None:
        """Free an extent that was taken."""
        store = self._owners.pop(extent)
        self._used[store] -= _units(extent.nbytes) * EXTENT_ALIGNMENT
        reserve = self._reserves[store]
        (reserve if reserve.holds(extent) else self._common).give_back(extent)


def least_ring_bytes(extent_bytes: int, num_stores: int) -> int:
    """Return the smallest size of a ring in which each store's reserve holds an extent of `extent_bytes` bytes."""
    units = _units(extent_bytes)
    return units * EXTENT_ALIGNMENT * (2 * num_stores if num_stores > 1 else 1)


def reserve_bytes(ring_bytes: int, num_stores: int) -> int:
    """Return the size of each store's reserve: the whole ring if there is only one store."""
    if num_stores == 1:
        return ring_bytes
    return ring_bytes // (2 * num_stores) // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT


def _units(nbytes: int) -> int:
    return -(-nbytes // EXTENT_ALIGNMENT)
