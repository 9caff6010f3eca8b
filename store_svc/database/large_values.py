"""Finds large values in LMDB without touching them.

Before py-lmdb returns a value, it reads a byte of each of its pages without the GIL, so that later reads do not fault
while they hold it. But a frame has the rows of all layers, and most reads want one layer. The first read of a capture
would wait for pages that nobody asked for, perhaps from the disk. So this module finds the address of a value itself,
as LMDB's `mdb_node_read` does: the address of the map, plus the number of the value's first page times the size of a
page. The first large value that py-lmdb returns tells the address of the map, which never moves.

The layout is that of LMDB 0.9 (`MDB_page` and `MDB_node` in mdb.c), whose file format no longer changes:

* An entry of a leaf page has the size of its value (4 bytes), flags (2), the size of its key (2), and the key. If the
  value has pages of its own, the number of the first one follows (8).
* A value's first page begins with its number (8 bytes), a pad (2), flags (2) and the number of pages (4). The value
  follows.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_ENTRY = struct.Struct("<IHH")
_HAS_PAGES = 0x01
_NUMBER_BYTES = 8

_PAGE = struct.Struct("<QHHI")
_OVERFLOW = 0x04

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


class _Pages(NamedTuple):
    """The pages of a value."""

    number: int
    """The number of the first one. LMDB has checked it when its cursor finds the entry."""
    size: int
    """The size of the value in bytes."""


class LargeValues:
    """The values of one file that have pages of their own."""

    def __init__(self, file: Path, page_bytes: int) -> None:
        """Look at the format of a file whose pages have this size."""
        self._page_bytes = page_bytes
        self._is_known = _has_known_layout(file)  # only ever set to False
        self._map: int | None = None  # the address of the map

    @property
    def finds(self) -> bool:
        """Whether it finds values itself. If not, and until the first large value, py-lmdb finds them."""
        return self._is_known and self._map is not None

    def get(self, raw: Any, table: Any, key: bytes) -> memoryview | None:
        """Return the value of a key, or None. Only the first page of a large value is touched.

        Copy from it with calls that release the GIL, as numpy's do.

        Args:
            raw: A read transaction. Those that write have copies of pages elsewhere.
            table: The table.
            key: The key.
        """
        if not self._is_known:
            found: memoryview | None = raw.get(key, db=table)
            return found
        cursor = raw.cursor(db=table)
        if not cursor.set_key(key):
            return None
        pages = _pages(cursor.key())
        if pages is not None and self.finds and (view := self._find(pages)) is not None:
            return view
        value: memoryview = cursor.value()
        if pages is not None and not self.finds:
            self._learn(pages, value)
        return value

    def _learn(self, pages: _Pages, value: memoryview) -> None:
        """Find out where the map is, from a value and its pages."""
        start = _address(value) - _PAGE.size - pages.number * self._page_bytes
        if start % mmap.PAGESIZE or len(value) != pages.size:
            self._is_known = False
        self._map = start

    def _find(self, pages: _Pages) -> memoryview | None:
        """Return the value on some pages; None if these do not look like that."""
        assert self._map is not None  # noqa: S101 - `finds` is true
        first = self._map + pages.number * self._page_bytes
        number, _, flags, count = _PAGE.unpack(_read(first, _PAGE.size))
        if number != pages.number or not flags & _OVERFLOW or _PAGE.size + pages.size > count * self._page_bytes:
            return None
        view: memoryview = _view(first + _PAGE.size, pages.size, _READ_ONLY)
        return view


def _pages(key: memoryview) -> _Pages | None:
    """Return the pages of the value of a key, given in its leaf page; None if the value has no pages of its own."""
    at = _address(key)
    size, flags, key_bytes = _ENTRY.unpack(_read(at - _ENTRY.size, _ENTRY.size))
    if not flags & _HAS_PAGES or key_bytes != len(key):
        return None
    return _Pages(int.from_bytes(_read(at + key_bytes, _NUMBER_BYTES), "little"), size)


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
