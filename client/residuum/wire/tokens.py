"""Bearer tokens and tenants: how a token is made, and what a service keeps of it."""

from __future__ import annotations

import hashlib
import secrets

from residuum.wire.ids import is_valid_id

RIGHTS = ("generate", "read", "write", "admin")
"""What a token may allow: to generate, and to delete what came of it; to read captures; to write them; everything, of
all tenants."""

DEFAULT_TENANT = ""
"""The tenant of whatever was made where nobody is asked who they are."""

ANY_TENANT = "*"
"""The tenant of a token that acts for any: an inference service that writes to a store, or an admin."""

_PREFIX = "rsd_"
"""Tells people, and programs that look for secrets in the wrong places, what it is."""

_SECRET_BYTES = 32


def make_token() -> str:
    """Make a token with 256 random bits: so many that its plain hash can be kept, and needs no salt."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def token_hash(token: str) -> str:
    """Return what a service keeps of a token: "sha256:" and the hexadecimal SHA-256 of its bytes."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def tenant_path(tenant: str, request_id: str) -> str:
    """Return one name for a request, or its capture, that no other tenant's has: "alice/req-1", "req-1" by default.

    It is for within a process, and from worker to shipper. Both parts must be valid names, and so hold no slash.
    """
    return f"{tenant}/{request_id}" if tenant else request_id


def split_path(path: str) -> tuple[str, str]:
    """Return the tenant and the request id of a `tenant_path`."""
    tenant, _, request_id = path.rpartition("/")
    return tenant, request_id


def is_valid_tenant(name: str) -> bool:
    """Tell whether `name` may name a tenant. The rules are those of request ids; the default tenant's is empty."""
    return name == DEFAULT_TENANT or is_valid_id(name)
