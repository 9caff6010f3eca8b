"""Which bytes of a ring are free, and which are extents."""

from __future__ import annotations

from inference_svc.runs import FreeRuns
from inference_svc.shipping.ring import EXTENT_ALIGNMENT, Extent


class Allotment:
    """Allots extents of any size out of a ring. Not safe for threads.

    The first free run that is long enough is taken, and neighbours that come back are one run again. Extents come back
    in about the order in which they were taken, so free runs stay few and long.
    """

    def __init__(self, ring_bytes: int) -> None:
        """Begin with all bytes free; what exceeds a multiple of EXTENT_ALIGNMENT is never used."""
        self._ring_bytes = ring_bytes
        self._free = FreeRuns(ring_bytes // EXTENT_ALIGNMENT)
        self.bytes_used = 0
        """Bytes that are taken, each extent counted up to the next multiple of EXTENT_ALIGNMENT."""

    def take(self, nbytes: int) -> Extent | None:
        """Return an extent of that many bytes, or None if no free run is long enough.

        Raises:
            ValueError: The size is not positive, or more than the ring.
        """
        if not 0 < nbytes <= self._ring_bytes:
            raise ValueError(f"an extent of {nbytes} bytes cannot be had from a ring of {self._ring_bytes}")
        units = _units(nbytes)
        start = self._free.take(units)
        if start is None:
            return None
        self.bytes_used += units * EXTENT_ALIGNMENT
        return Extent(start * EXTENT_ALIGNMENT, nbytes)

    def give_back(self, extent: Extent) -> None:
        """Free an extent that was taken."""
        units = _units(extent.nbytes)
        self._free.give_back(extent.offset // EXTENT_ALIGNMENT, units)
        self.bytes_used -= units * EXTENT_ALIGNMENT


def _units(nbytes: int) -> int:
    return -(-nbytes // EXTENT_ALIGNMENT)
