"""Which bytes of a ring are free, and which are extents."""

from __future__ import annotations

from collections.abc import Sequence

from inference_svc.resources.free_runs import FreeRuns
from inference_svc.shipping.ring import EXTENT_ALIGNMENT, Extent


class Allotment:
    """Allots extents of any size out of a part of a ring. Not safe for threads.

    The first free run that is long enough is taken, and neighbours that come back are one run again. Extents come back
    in about the order in which they were taken, so free runs stay few and long.
    """

    def __init__(self, num_bytes: int, offset: int = 0) -> None:
        """Begin with all bytes free; what exceeds a multiple of EXTENT_ALIGNMENT is never used.

        Args:
            num_bytes: Bytes of the part.
            offset: Where in the ring it begins, a multiple of EXTENT_ALIGNMENT.
        """
        self.num_bytes = num_bytes
        """Bytes of the part."""
        self._offset = offset
        self._free = FreeRuns(num_bytes // EXTENT_ALIGNMENT)
        self.bytes_used = 0
        """Bytes that are taken, each extent counted up to the next multiple of EXTENT_ALIGNMENT."""

    def take(self, nbytes: int) -> Extent | None:
        """Return an extent of that many bytes, or None if no free run is long enough."""
        units = _units(nbytes)
        start = self._free.take(units) if nbytes <= self.num_bytes else None
        if start is None:
            return None
        self.bytes_used += units * EXTENT_ALIGNMENT
        return Extent(self._offset + start * EXTENT_ALIGNMENT, nbytes)

    def holds(self, extent: Extent) -> bool:
        """Tell whether an extent is of this part."""
        return self._offset <= extent.offset < self._offset + self.num_bytes

    def give_back(self, extent: Extent) -> None:
        """Free an extent that was taken."""
        units = _units(extent.nbytes)
        self._free.give_back((extent.offset - self._offset) // EXTENT_ALIGNMENT, units)
        self.bytes_used -= units * EXTENT_ALIGNMENT


class SharedAllotment:
    """Allots a ring to several stores, so that what one of them does not take leaves room for the others.

    Half of the ring is divided among the stores, in equal *reserves*; the other half is for whoever comes first. A
    store's extents are taken from its reserve, and from the common half when that is full. So one that takes nothing
    for a while can fill its reserve and the common half, and no other's reserve. A single store has the whole ring.

    Reserves are runs of bytes, not sums: an extent that fits a reserve finds room there when what is before it has
    left, wherever in the ring another store's extents lie. Not safe for threads.
    """

    def __init__(self, ring_bytes: int, stores: Sequence[str]) -> None:
        """Begin with all bytes free.

        Args:
            ring_bytes: Bytes of the ring.
            stores: The stores' names, one at least.
        """
        reserve = reserve_bytes(ring_bytes, len(stores))
        self._reserves = {store: Allotment(reserve, at * reserve) for at, store in enumerate(stores)}
        divided = reserve * len(stores)
        self._common = Allotment(ring_bytes - divided if len(stores) > 1 else 0, divided)
        self._used = dict.fromkeys(stores, 0)
        self._owners: dict[Extent, str] = {}

    @property
    def bytes_used(self) -> int:
        """Bytes that are taken, each extent counted up to the next multiple of EXTENT_ALIGNMENT."""
        return sum(self._used.values())

    @property
    def used(self) -> dict[str, int]:
        """The same by store."""
        return dict(self._used)

    @property
    def largest(self) -> int:
        """Bytes of the largest extent that can be had."""
        return max(self._common.num_bytes, *(reserve.num_bytes for reserve in self._reserves.values()))

    def take(self, nbytes: int, store: str) -> Extent | None:
        """Return an extent of that many bytes for a store, or None if no free run that it may have is long enough.

        Raises:
            ValueError: The size is not positive, or more than there can ever be.
        """
        if not 0 < nbytes <= self.largest:
            raise ValueError(f"an extent of {nbytes} bytes cannot be had: the largest has {self.largest}")
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
    """Return how large a ring must be for each store's reserve to hold an extent of that size."""
    units = _units(extent_bytes)
    return units * EXTENT_ALIGNMENT * (2 * num_stores if num_stores > 1 else 1)


def reserve_bytes(ring_bytes: int, num_stores: int) -> int:
    """Return how much of a ring is each store's own: all of it if there is but one."""
    if num_stores == 1:
        return ring_bytes
    return ring_bytes // (2 * num_stores) // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT


def _units(nbytes: int) -> int:
    return -(-nbytes // EXTENT_ALIGNMENT)
