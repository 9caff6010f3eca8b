"""Labels of captures: their values, their limits, and filters on them (`where`). The protos have the rules."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from residuum.v1 import capture_pb2
from residuum.wire.limits import (
    MAX_LABEL_NAME_LENGTH,
    MAX_LABEL_TEXT_LENGTH,
    MAX_LABELS,
    MAX_LABELS_BYTES,
    MAX_WHERE_CONDITIONS,
    MAX_WHERE_LENGTH,
)

LabelValue = Union[str, int, float, bool]  # noqa: UP007 - evaluated at run time on Python 3.10
"""The value of a label."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*", re.ASCII)
_INT64 = range(-(1 << 63), 1 << 63)
_SHOWN = 80
"""The characters of a caller's text that an error shows."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<operator>!=|<=|>=|=|<|>)|(?P<word>[A-Za-z0-9._+-]+)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'))""",
    re.ASCII | re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_VALUE_AT = 2
"""The place of the value among the tokens of a condition."""
_ESCAPED = re.compile(r"\\([\"'\\])")
_AND = "and"
_UNSUPPORTED = {
    "or": "use one filter for each case",
    "in": "use one filter for each value",
    "not": "use !=",
    "like": "use = with a whole value",
    "between": "use >= and <=",
}
"""Words of other languages for filters, and what to use instead."""
_GRAMMAR = "Write conditions such as: split = train and y >= 2."


class LabelError(ValueError):
    """A label or a filter is invalid; the message says why."""


def to_label(name: str, value: LabelValue) -> capture_pb2.Label:
    """Return the message of a label.

    Raises:
        LabelError: The name or the value is invalid.
        TypeError: The value is not a text, number or bool.
    """
    check_name(name)  # before protobuf has it, which cannot encode half of a character
    if isinstance(value, bool):
        label = capture_pb2.Label(name=name, flag=value)
    elif isinstance(value, int):
        if value not in _INT64:
            raise LabelError(f"the label {name!r} is {value}, which does not fit into 64 bits")
        label = capture_pb2.Label(name=name, integer=value)
    elif isinstance(value, float):
        label = capture_pb2.Label(name=name, number=value)
    elif isinstance(value, str):
        try:
            label = capture_pb2.Label(name=name, text=value)
        except UnicodeEncodeError:
            raise LabelError(f"the label {name!r} has half of a character (a lone surrogate): {value!r}") from None
    else:
        raise TypeError(f"The label {name!r} takes a text, a number or a bool, not {value!r}.")
    check_label(label)
    return label


def value_of(label: capture_pb2.Label) -> LabelValue:
    """Return the value of a label; an empty text if this version does not know its kind."""
    kind = label.WhichOneof("value")
    value: LabelValue = getattr(label, kind) if kind else ""
    return value


def to_dict(labels: Iterable[capture_pb2.Label]) -> dict[str, LabelValue]:
    """Return labels as a mapping from name to value."""
    return {label.name: value_of(label) for label in labels}


def check_name(name: str) -> None:
    """Check the name of a label.

    Raises:
        LabelError: It is invalid.
    """
    if len(name) > MAX_LABEL_NAME_LENGTH or not _NAME.fullmatch(name) or name == _AND:
        raise LabelError(
            f"{name[:_SHOWN]!r} is not the name of a label: use 1 to {MAX_LABEL_NAME_LENGTH} of a-z A-Z 0-9 . _ - and "
            f"begin with a letter or _; {_AND!r} is not a name"
        )


def check_label(label: capture_pb2.Label) -> None:
    """Check one label.

    Raises:
        LabelError: Its name or value is invalid.
    """
    check_name(label.name)
    kind = label.WhichOneof("value")
    if kind is None:
        raise LabelError(f"the label {label.name!r} has no value")
    if kind == "text" and len(label.text) > MAX_LABEL_TEXT_LENGTH:
        limit = MAX_LABEL_TEXT_LENGTH
        raise LabelError(f"the label {label.name!r} has {len(label.text)} characters, more than {limit}")
    if kind == "number" and not math.isfinite(label.number):
        raise LabelError(f"the label {label.name!r} is {label.number}, which is not finite")


def check_labels(labels: Iterable[capture_pb2.Label]) -> None:
    """Check all labels of a capture.

    Raises:
        LabelError: One is invalid, two have the same name, or there are too many.
    """
    found = list(labels)
    for label in found:
        check_label(label)
    names = [label.name for label in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise LabelError(f"the label {twice!r} is given twice")
    if len(names) > MAX_LABELS:
        raise LabelError(f"a capture has at most {MAX_LABELS} labels, not {len(names)}")
    size = capture_pb2.CaptureManifest(labels=found).ByteSize()
    if size > MAX_LABELS_BYTES:
        raise LabelError(f"the labels of a capture take at most {MAX_LABELS_BYTES} bytes, not {size}")


def changed(
    labels: Iterable[capture_pb2.Label], given: Iterable[capture_pb2.Label], removed: Iterable[str]
) -> list[capture_pb2.Label]:
    """Return labels after a change, by name.

    Args:
        labels: The labels before.
        given: The labels to set.
        removed: The names of labels to remove.

    Raises:
        LabelError: A label is invalid, is given twice or both set and removed, or there are too many.
    """
    given, removed = list(given), set(removed)
    check_labels(given)
    both = removed & {label.name for label in given}
    if both:
        raise LabelError(f"the label {min(both)!r} is both set and removed")
    kept = {label.name: label for label in labels if label.name not in removed}
    kept.update({label.name: label for label in given})
    result = [kept[name] for name in sorted(kept)]
    check_labels(result)
    return result


def canonical(value: LabelValue) -> str:
    """Return a text that is the same for equal values, and only for these. 1 equals 1.0, but not true."""
    if isinstance(value, bool):
        return f"flag {value}"
    if isinstance(value, str):
        return f"text {value}"
    return f"number {int(value) if value == int(value) else value!r}"


_Compare = Callable[[LabelValue, LabelValue], bool]


def _equal(one: LabelValue, other: LabelValue) -> bool:
    return canonical(one) == canonical(other)


def _of_numbers(compare: Callable[[float, float], bool]) -> _Compare:
    return lambda one, other: (
        isinstance(one, (int, float))
        and isinstance(other, (int, float))
        and not isinstance(one, bool)
        and compare(one, other)
    )


_OPERATORS: Mapping[str, _Compare] = {
    "=": _equal,
    "!=": lambda one, other: not _equal(one, other),
    "<": _of_numbers(operator.lt),
    "<=": _of_numbers(operator.le),
    ">": _of_numbers(operator.gt),
    ">=": _of_numbers(operator.ge),
}


@dataclass(frozen=True)
class Condition:
    """One condition of a filter."""

    name: str
    """The label's name."""
    operator: str
    """One of = != < <= > >=."""
    value: LabelValue
    """The value to compare with."""

    def holds(self, labels: Mapping[str, LabelValue]) -> bool:
        """Tell whether labels meet the condition."""
        if self.name not in labels:
            return self.operator == "!="
        return _OPERATORS[self.operator](labels[self.name], self.value)


def matches(conditions: Iterable[Condition], labels: Iterable[capture_pb2.Label]) -> bool:
    """Tell whether labels meet all conditions."""
    values = to_dict(labels)
    return all(condition.holds(values) for condition in conditions)


def parse_where(where: str) -> tuple[Condition, ...]:
    """Return the conditions of a filter; none for an empty one.

    Raises:
        LabelError: The filter cannot be parsed. The message says where and why.
    """
    if len(where) > MAX_WHERE_LENGTH:
        raise LabelError(f"a filter has at most {MAX_WHERE_LENGTH} characters, not {len(where)}")
    tokens = _tokens(where)
    if not tokens:
        return ()
    _check_dialect(tokens)
    conditions = []
    while True:
        conditions.append(_condition(tokens[:3]))
        rest = tokens[3:]
        if not rest:
            break
        if rest[0] != ("word", _AND):
            raise LabelError(f"expected {_AND!r} before {_shown(rest[0])}. {_GRAMMAR}")
        tokens = rest[1:]
    if len(conditions) > MAX_WHERE_CONDITIONS:
        raise LabelError(f"a filter has at most {MAX_WHERE_CONDITIONS} conditions, not {len(conditions)}")
    return tuple(conditions)


_Token = tuple[str, str]
"""A kind ("operator", "word" or "text"), and what is written."""


def _tokens(where: str) -> list[_Token]:
    tokens, at = [], 0
    while where[at:].strip():
        found = _TOKEN.match(where, at)
        if found is None:
            raise LabelError(f"cannot read {where[at:].strip()[:_SHOWN]!r}. {_GRAMMAR}")
        kind = found.lastgroup or ""
        tokens.append((kind, found[kind]))
        at = found.end()
    return tokens


def _check_dialect(tokens: Sequence[_Token]) -> None:
    """Refuse by name what other languages for filters have.

    Raises:
        LabelError: The filter has ==, or a word such as "or" where none can be.
    """
    for (kind, written), (next_kind, following) in itertools.pairwise(tokens):
        if kind == next_kind == "operator" and written == following == "=":
            raise LabelError(f"use a single = instead of ==. {_GRAMMAR}")
    # A condition is 3 tokens and "and" follows it: a word at another place than these is a name or a value.
    for at, (kind, written) in enumerate(tokens):
        is_name = at % 4 == 0 and tokens[at + 1 : at + 2] and tokens[at + 1][0] == "operator"
        is_value = at % 4 == _VALUE_AT
        if kind == "word" and written.lower() in _UNSUPPORTED and not is_name and not is_value:
            raise LabelError(f"{written!r} is not supported; {_UNSUPPORTED[written.lower()]}. {_GRAMMAR}")


def _condition(tokens: list[_Token]) -> Condition:
    wanted = ("a label's name", "one of = != < <= > >=", "a value")
    if len(tokens) < len(wanted):
        raise LabelError(f"expected {wanted[len(tokens)]} at the end. {_GRAMMAR}")
    name, sign, value = tokens
    if name[0] != "word":
        raise LabelError(f"expected a label's name before {_shown(name)}. {_GRAMMAR}")
    check_name(name[1])
    if sign[0] != "operator":
        raise LabelError(f"expected one of = != < <= > >= before {_shown(sign)}. {_GRAMMAR}")
    condition = Condition(name[1], sign[1], _value(value))
    if sign[1] in ("<", "<=", ">", ">=") and canonical(condition.value).split()[0] != "number":
        raise LabelError(f"{sign[1]} compares numbers, not {_shown(value)}")
    return condition


def _value(token: _Token) -> LabelValue:
    kind, written = token
    if kind == "text":
        return _ESCAPED.sub(r"\1", written[1:-1])
    if kind != "word" or written == _AND:
        raise LabelError(f"expected a value before {_shown(token)}. {_GRAMMAR}")
    if written in ("true", "false"):
        return written == "true"
    if not _NUMBER.fullmatch(written):
        return written
    if re.fullmatch(r"[+-]?\d+", written, re.ASCII):
        return int(written)
    number = float(written)
    if not math.isfinite(number):
        raise LabelError(f"{written[:_SHOWN]} is too large for a number")
    return number


def read_value(text: str) -> LabelValue:
    """Return the value of a text, parsed as in a filter. A text that a filter cannot have is itself the value."""
    try:
        tokens = _tokens(text)
        if len(tokens) == 1 and tokens[0] != ("word", _AND):
            return _value(tokens[0])
    except LabelError:
        pass
    return text


def write_value(value: LabelValue) -> str:
    """Return a value as it is written in a filter."""
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else repr(value)
    is_word = re.fullmatch(r"[A-Za-z0-9._+-]+", value, re.ASCII) and value not in ("true", "false", _AND)
    return value if is_word and not _NUMBER.fullmatch(value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _shown(token: _Token) -> str:
    return repr(token[1][:_SHOWN])
