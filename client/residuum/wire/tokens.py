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


def tenant_path(tenant: str, request_id: str) -> str:
    """Return a name of a request, or its capture, that is unique among tenants: "alice/req-1".

    For the default tenant it is just the request ID. It is used within a process, and between worker and shipper. Both
    parts must be valid, so they contain no slash.
    """
    return f"{tenant}/{request_id}" if tenant else request_id


def split_path(path: str) -> tuple[str, str]:
    """Return the tenant and the request ID of a `tenant_path`."""
    tenant, _, request_id = path.rpartition("/")
    return tenant, request_id


def is_valid_tenant(name: str) -> bool:
    """Tell whether `name` is a valid tenant name: empty for the default tenant, else as for request IDs."""
    return name == DEFAULT_TENANT or is_valid_id(name)
