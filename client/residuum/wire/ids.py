"""Names of requests and their captures."""

from __future__ import annotations

import re
import secrets

from residuum.wire.limits import MAX_ID_LENGTH

_PATTERN = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_ID_LENGTH - 1}}}", re.ASCII)


def is_valid_id(text: str) -> bool:
    """Tell whether `text` may name a request: 1 to 128 of `a-z A-Z 0-9 . _ -`, not starting with a dot or a dash."""
    return _PATTERN.fullmatch(text) is not None


def make_id() -> str:
    """Make a fresh request id with 96 random bits."""
    return f"req-{secrets.token_hex(12)}"
