"""How to install an extra of this distribution. It is on no package index, so the advice names a checkout."""

from __future__ import annotations


def install_extra(name: str) -> str:
    """Return the advice to install a missing extra, for the end of an error message."""
    return f"install residuum's extra {name!r} (from a checkout: pip install '.[{name}]')"
