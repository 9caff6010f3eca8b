"""Names of gRPC methods, and of their metadata."""

from __future__ import annotations

OPEN_CAPTURE = "/residuum.v1.StoreService/OpenCapture"
OPEN_CAPTURES = "/residuum.v1.StoreService/OpenCaptures"
SEAL_CAPTURE = "/residuum.v1.StoreService/SealCapture"
SEAL_CAPTURES = "/residuum.v1.StoreService/SealCaptures"
QUEUED = "residuum-queued"
"""The key in OpenCapture's initial metadata that says that chunks may be sent; see store.proto."""


def is_ours(method: str) -> bool:
    """Tell whether a full method name, such as "/residuum.v1.StoreService/GetStats", belongs to our services.

    The other methods are health checks and reflection.
    """
    return method.startswith("/residuum.")
