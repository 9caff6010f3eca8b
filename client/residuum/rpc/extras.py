"""How to install what is missing. No package index has it, so the advice names a checkout."""

from __future__ import annotations


def install_extra(name: str) -> str:
    """Return the advice to install a missing extra, for the end of an error message."""
    return f"install residuum's extra {name!r} (from a checkout: pip install '.[{name}]')"


def install_server() -> str:
    """Return what to do where the services, or what they need, are not there, for the end of a message."""
    return "install residuum-server (from a checkout: pip install . './server[cuda,store]'; without a GPU: make setup)"
