"""Finds large values in LMDB without touching them.

py-lmdb reads a byte of each page of a value before it returns the value, so that no page fault holds the GIL. But a
frame has the rows of all layers, and most reads want one layer. Then the first read of a capture would wait for page
faults, or for the disk, on account of rows that nobody wants. So this module finds the address of a value itself, as
LMDB's `mdb_node_read` does.

The layout is that of LMDB 0.9 (`MDB_page` and `MDB_node` in mdb.c), whose format of files is final:

* A page begins with its number (8 bytes), a pad (2), flags (2), and for large values the number of their pages (4).
* An entry of a leaf page has the size of its value (4 bytes), flags (2), the size of its key (2), and the key. The
  number of the value's first page follows, if the value has pages of its own.

The first large value of each file is compared with what py-lmdb says of it. If they differ, py-lmdb finds all of them.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_PAGE = struct.Struct("<QHHI")
_LEAF, _OVERFLOW = 0x02, 0x04

_ENTRY = struct.Struct("<IHH")
_HAS_PAGES = 0x01
_NUMBER_BYTES = 8

_FORMAT = struct.pack("<II", 0xBEEFC0DE, 1)
"""What every file of LMDB 0.9 has after the header of its first page."""

_copy = ctypes.CDLL(None).memcpy  # lets go of the GIL: a page may have to come from the disk
_copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
_copy.restype = None

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
_view.restype = ctypes.py_object
_READ_ONLY = 0x100
"""PyBUF_READ."""


class _Place(NamedTuple):
    """Where a value is in memory."""

    address: int
    size: int


class LargeValues:
    """The values of one file that have pages of their own."""

    def __init__(self, file: Path, page_bytes: int) -> None:
        """Look at the format of a file whose pages have this size."""
        self._page_bytes = page_bytes
        self._is_checked = False
        self._is_as_expected = _has_known_layout(file)

    @property
    def finds(self) -> bool:
        """Whether it finds values itself. Otherwise, or as long as it has found none, py-lmdb does."""
        return self._is_checked and self._is_as_expected

    def get(self, raw: Any, table: Any, key: bytes) -> memoryview | None:
        """Return the value of a key, or None. Only the first page of a large value is touched.

        Copy from it in a way that lets go of the GIL, as numpy does.

        Args:
            raw: A read transaction. Those that write have copies of pages elsewhere.
            table: The table.
            key: The key.
        """
        if not self._is_as_expected:
            found: memoryview | None = raw.get(key, db=table)
            return found
        cursor = raw.cursor(db=table)
        if not cursor.set_key(key):
            return None
        place = self._find(cursor.key())
        if place is not None and self._is_checked:
            view: memoryview = _view(place.address, place.size, _READ_ONLY)
            return view
        value: memoryview = cursor.value()
        if place is not None:
            self._is_as_expected = place == _Place(_address(value), len(value))
            self._is_checked = True
        return value

    def _find(self, key: memoryview) -> _Place | None:
        """Return where the value of a key is; None if it has no pages of its own.

        Args:
            key: The key in its leaf page.
        """
        at = _address(key)
        size, flags, key_bytes = _ENTRY.unpack(_read(at - _ENTRY.size, _ENTRY.size))
        if not flags & _HAS_PAGES or key_bytes != len(key):
            return None
        number = int.from_bytes(_read(at + key_bytes, _NUMBER_BYTES), "little")
        leaf = at - at % self._page_bytes
        leaf_number, _, flags, _ = _PAGE.unpack(_read(leaf, _PAGE.size))
        if not flags & _LEAF:
            return None
        first = leaf + (number - leaf_number) * self._page_bytes
        found, _, flags, pages = _PAGE.unpack(_read(first, _PAGE.size))
        if found != number or not flags & _OVERFLOW or _PAGE.size + size > pages * self._page_bytes:
            return None
        return _Place(first + _PAGE.size, size)


def _has_known_layout(file: Path) -> bool:
    if sys.byteorder != "little" or struct.calcsize("P") != _NUMBER_BYTES:
        return False
    with file.open("rb", buffering=0) as opened:
        return opened.read(_PAGE.size + len(_FORMAT)).endswith(_FORMAT)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _read(address: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    _copy(data, address, size)
    return data.raw
