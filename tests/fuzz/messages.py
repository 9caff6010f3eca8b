"""Makes hostile messages from valid ones, by descriptor and by bytes. All choices come from one source."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = (0, 1, 2, 3, 7, 63, 64, 127, 128, 255, 4095, 4096, 65_535, 65_536, 131_071, 131_072, 2**31 - 1, 2**31)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, float("nan"), float("inf"), float("-inf"), 1e-45, 3e38, -3e38)
_TEXTS = (
    *("", " ", "\0", ".", "..", "-", "a/b", "../../etc/passwd", "%s%n", "a\nb", "\x1b[2J", "'; --", "{{7*7}}", "${x}"),
    *("\u202etxt", "\U0001f600", "é" * 65, "a" * 128, "a" * 129, "x" * 5000),
)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_MOST_REPEATED = 50_000
_MOST_NESTED = 65
_MOST_BYTES = 5 << 20
"""A little more than a service accepts."""
_DEEPEST = 6


class Choices(random.Random):
    """Random choices derived from some bytes: first the bytes themselves, then random numbers seeded with them.

    So a fuzzer that changes the bytes (atheris) or shrinks them (hypothesis) changes the choices too, and a few bytes
    are enough for a long input.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data, self._at = data, 0
        self._rest = random.Random(zlib.crc32(data))

    def getrandbits(self, count: int, /) -> int:
        size = (count + 7) // 8
        part = self._data[self._at : self._at + size]
        self._at += size
        number = int.from_bytes(part, "little") if len(part) == size else self._rest.getrandbits(8 * size)
        return number >> (8 * size - count)

    def random(self) -> float:
        return self.getrandbits(16) / 65_536

    def one_in(self, count: int) -> bool:
        return self.randrange(count) == 0


@dataclass
class Words:
    """Values that are meaningful to the service, used for fields in addition to odd values."""

    texts: list[str] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)


def made(choices: Choices, seed: Message, words: Words) -> bytes:
    """Return the bytes of a message of the seed's type: the seed itself, with changed fields, or with changed bytes."""
    message = type(seed)()
    message.CopyFrom(seed)
    kind = choices.randrange(8)
    if kind == 0:
        message.Clear()
        fill(choices, message, words)
    for _ in range((0, 0, 1, 1, 2, 4, 1, 0)[kind]):
        change_field(choices, message, words)
    data = message.SerializeToString()[:_MOST_BYTES]
    return change_bytes(choices, data) if kind in (6, 7) else data


def fill(choices: Choices, message: Message, words: Words, depth: int = 0) -> None:
    """Set fields at random."""
    for item in message.DESCRIPTOR.fields:
        if choices.one_in(3):
            set_field(choices, message, item, words, depth)


def change_field(choices: Choices, message: Message, words: Words) -> None:
    """Change one field at a random place in the tree."""
    depth = 0
    while True:
        nested = [item for item, _ in message.ListFields() if item.message_type]
        if not nested or choices.one_in(3):
            break
        value = getattr(message, (item := choices.choice(nested)).name)
        message, depth = (choices.choice(list(value)) if item.is_repeated else value), depth + 1
    item = choices.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
    if item is None:
        return
    if choices.one_in(4):
        message.ClearField(item.name)
    else:
        set_field(choices, message, item, words, depth)


def set_field(choices: Choices, message: Message, item: FieldDescriptor, words: Words, depth: int) -> None:
    """Set one field to a random value."""
    if item.message_type:
        if depth < _DEEPEST:
            values = getattr(message, item.name)
            for _ in range(_count(choices, _MOST_NESTED) if item.is_repeated else 1):
                value = values.add() if item.is_repeated else values
                value.SetInParent()
                fill(choices, value, words, depth + 1)
    elif item.is_repeated:
        count = _count(choices, _MOST_REPEATED)
        few = [_scalar(choices, item, words) for _ in range(min(count, 16))]
        if count > len(few) and item.cpp_type == FieldDescriptor.CPPTYPE_UINT32 and choices.one_in(2):
            few = list(range(count))
        getattr(message, item.name)[:] = (few * (count // max(len(few), 1) + 1))[:count]
    else:
        setattr(message, item.name, _scalar(choices, item, words))


def change_bytes(choices: Choices, data: bytes) -> bytes:
    """Damage a message's bytes."""
    damaged = bytearray(data)
    for _ in range(choices.randrange(1, 5)):
        at = choices.randrange(len(damaged) + 1)
        match choices.randrange(9):
            case 0 if damaged:
                damaged[at % len(damaged)] ^= 1 << choices.randrange(8)
            case 1:
                del damaged[at:]
            case 2:
                damaged[at:at] = choices.randbytes(choices.randrange(1, 9))
            case 3:
                damaged[at : at + choices.randrange(1, 64)] = b""
            case 4:
                damaged[at:at] = damaged[: choices.randrange(len(damaged) + 1)]
            case 5:  # an impossible length or number
                damaged[at:at] = choices.choice((b"\xff" * 9 + b"\x01", b"\xff" * 11, b"\xff\xff\xff\xff\x0f", b"\x80"))
            case 6:  # text that is not UTF-8
                damaged[at:at] = choices.choice((b"\xc0\x80", b"\xed\xa0\x80", b"\xff\xfe"))
            case 7:  # nested messages, deeper than any parser's limit
                damaged[at:at] = _nested(choices.randrange(1, 16), choices.choice((3, 99, 101, 300)))
            case _:  # unbalanced groups, an obsolete feature
                damaged[at:at] = choices.choice((b"\x0b", b"\x0c", b"\x0b\x0c", b"\x0e\x0f"))
    return bytes(damaged)


def _nested(number: int, depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = bytes([number << 3 | 2]) + _varint(len(data)) + data
    return data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _count(choices: Choices, most: int) -> int:
    return choices.choice((0, 1, 1, 2, 17, 65, min(1025, most), most)) if choices.one_in(4) else choices.randrange(4)


def _scalar(choices: Choices, item: FieldDescriptor, words: Words) -> object:
    kind = item.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return choices.one_in(2)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = [value.number for value in item.enum_type.values]
        return choices.choice([*known, *known, -1, 99, 2**31 - 1])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return choices.choice(_FLOATS) if choices.one_in(2) else struct.unpack("<f", choices.randbytes(4))[0]
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return _blob(choices, words) if item.type == FieldDescriptor.TYPE_BYTES else _text(choices, words)
    low, high = _RANGES[kind]
    number = choices.choice((*_INTEGERS, high - 1, high, low, -1, -2)) + choices.choice((0, 0, 0, -1, 1))
    return min(max(number, low), high)


def _text(choices: Choices, words: Words) -> str:
    if words.texts and choices.one_in(2):
        return choices.choice(words.texts)
    return choices.choice(_TEXTS)


def _blob(choices: Choices, words: Words) -> bytes:
    if words.blobs and choices.one_in(2):
        return choices.choice(words.blobs)
    return choices.randbytes(choices.choice((0, 1, 31, 32, 33, 4096)))


def some(choices: Choices, items: Sequence[bytes]) -> list[bytes]:
    """Return some of the items, possibly reordered or repeated."""
    return [choices.choice(items) for _ in range(choices.randrange(1, 7))] if choices.one_in(2) else list(items)
