"""IDs of requests, which are also the IDs of their captures."""

from __future__ import annotations

import re
import secrets

from residuum.wire.limits import MAX_ID_LENGTH

_PATTERN = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_ID_LENGTH - 1}}}", re.ASCII)


def is_valid_id(text: str) -> bool:
    """Tell whether `text` is a valid request ID: 1 to 128 of `a-z A-Z 0-9 . _ -`, not starting with a dot or dash."""
    return _PATTERN.fullmatch(text) is not None


def make_attempt() -> int:
    """Return a new `CaptureDescription.attempt`: 63 random bits, never 0."""
    return secrets.randbits(63) or 1


def make_id() -> str:
    """Return a new request ID with 96 random bits."""
    return f"req-{secrets.token_hex(12)}"
