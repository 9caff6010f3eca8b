"""Advice to install missing packages. It names a checkout, because residuum is on no package index."""

from __future__ import annotations


def install_extra(name: str) -> str:
    """Return the advice to install a missing extra, for the end of an error message."""
    return f"install residuum's extra {name!r} (from a checkout: pip install '.[{name}]')"


def install_server() -> str:
    """Return the advice to install the services and what they need, for the end of an error message."""
    return "install residuum-server (from a checkout: pip install . './server[cuda,store]'; without a GPU: make setup)"
