"""Names of gRPC methods."""

from __future__ import annotations


def is_ours(method: str) -> bool:
    """Tell whether a full method name, such as "/residuum.v1.StoreService/GetStats", belongs to our services.

    The other methods are health checks and reflection.
    """
    return method.startswith("/residuum.")
