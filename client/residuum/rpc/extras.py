"""How what is not there is installed. It is in no index: who runs from a checkout has to name that."""

from __future__ import annotations


def install_extra(name: str) -> str:
    """Return what to do about an extra that is not there, for the end of a message."""
    return f"install residuum's extra {name!r} (from a checkout: pip install '.[{name}]')"


def install_server() -> str:
    """Return what to do where the services, or what they need, are not there, for the end of a message."""
    return "install residuum-server (from a checkout: pip install . './server[cuda,store]'; without a GPU: make setup)"
