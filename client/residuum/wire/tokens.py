"""Bearer tokens and tenants: creating tokens, and the hash that a service keeps of a token."""

from __future__ import annotations

import hashlib
import secrets

from residuum.wire.ids import is_valid_id

RIGHTS = ("generate", "read", "write", "admin")
"""The rights of tokens: run requests and delete captures; read captures; write captures; everything, for any tenant."""

DEFAULT_TENANT = ""
"""The tenant of requests and captures on services without authentication."""

ANY_TENANT = "*"
"""The tenant of a token that may act for any tenant: an admin's, or an inference service's for writing to a store."""

_PREFIX = "rsd_"
"""Lets people and secret scanners recognise a token."""

_SECRET_BYTES = 32


def make_token() -> str:
    """Return a new token with 256 random bits. These are enough to keep its hash without a salt."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def token_hash(token: str) -> str:
    """Return the hash that a service keeps of a token: "sha256:" and the hexadecimal SHA-256 of its bytes."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def tenant_path(tenant: str, request_id: str, attempt: int = 0) -> str:
    """Return a name of a request, or its capture, that is unique among tenants and in time: "alice/req-1@7c3".

    It is used within a process, and between worker and shipper. Both texts must be valid, so they contain neither a
    slash nor an at sign.

    Args:
        tenant: The owner. Empty: the default tenant; then the path has no slash.
        request_id: The ID.
        attempt: The capture's `attempt`. 0: none; then the path has no at sign.
    """
    path = f"{tenant}/{request_id}" if tenant else request_id
    return f"{path}@{attempt:x}" if attempt else path


def split_path(path: str) -> tuple[str, str, int]:
    """Return the tenant, the request ID and the attempt of a `tenant_path`."""
    tenant, _, name = path.rpartition("/")
    request_id, _, attempt = name.partition("@")
    return tenant, request_id, int(attempt or "0", 16)


def is_valid_tenant(name: str) -> bool:
    """Tell whether `name` is a valid tenant name: empty for the default tenant, else as for request IDs."""
    return name == DEFAULT_TENANT or is_valid_id(name)
