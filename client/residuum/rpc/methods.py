"""What methods are called on the wire."""

from __future__ import annotations


def is_ours(method: str) -> bool:
    """Tell whether a full name, as "/residuum.v1.StoreService/GetStats", is that of a method of ours.

    Those of others are health and reflection.
    """
    return method.startswith("/residuum.")
