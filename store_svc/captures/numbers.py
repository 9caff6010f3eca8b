"""The internal numbers of captures. They ascend and are never used again, because rows are kept under them."""

from __future__ import annotations

from store_svc.database.db import Table, Txn
from store_svc.database.keys import pack_number, unpack_number

_NEXT = b"next_number"


def next_number(txn: Txn) -> int:
    """Return the number of the next capture."""
    value = txn.get(Table.META, _NEXT)
    return unpack_number(bytes(value)) if value is not None else 1


def take_number(txn: Txn) -> int:
    """Return the number of a new capture."""
    number = next_number(txn)
    txn.put(Table.META, _NEXT, pack_number(number + 1))
    return number


def skip_numbers(txn: Txn, number: int) -> None:
    """Note that a number, and those before it, are in use."""
    if next_number(txn) <= number:
        txn.put(Table.META, _NEXT, pack_number(number + 1))


def doom_unopened(txn: Txn) -> list[int]:
    """Free the frames of captures that were never opened; return the numbers of these captures.

    The process ended after shards had committed such frames, and before the main file committed the capture. The
    captures become deleted ones, so their frames are freed as theirs are, and their numbers are not used again.
    """
    numbers: list[int] = []
    at = next_number(txn)
    while (key := txn.next_key(Table.FRAMES, pack_number(at))) is not None:
        numbers.append(unpack_number(key[: len(pack_number(0))]))
        at = numbers[-1] + 1
    for number in numbers:
        txn.put(Table.DOOMED, pack_number(number), b"")
        txn.put(Table.META, _NEXT, pack_number(number + 1))
    return numbers
