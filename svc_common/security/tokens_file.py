"""The tokens file of a service: its callers' tokens with tenant and rights, and the tenants' limits.

    [[token]]
    hash = "sha256:..."              # never the token itself: `residuum token` prints both
    tenant = "alice"
    rights = ["generate", "read"]
    expires = 2027-01-01T00:00:00Z   # optional
    name = "Alice's laptop"          # optional, for people

    [tenant.alice]                   # optional, as is each of its lines
    max_bytes = "100GiB"             # chunks in the store
    max_open_captures = 64
    max_vector_bytes = "64MiB"       # steering vectors that the inference service keeps
    max_sae_bytes = "512MiB"         # encoders of sparse autoencoders that the inference service keeps
    max_requests = 256               # running and queued requests in the inference service

The service reads the file again when it changes, so tokens can be added and removed without a restart. Running calls
are not affected.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import hmac
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ByteSize, ConfigDict, Field, ValidationError

from residuum.rpc.credentials import file_stamp
from residuum.wire.tokens import ANY_TENANT, DEFAULT_TENANT, is_valid_tenant
from svc_common.logs import get_logger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_log = get_logger(__name__)

_WRITE_SECONDS = 0.1
"""How long a program may take from emptying a file to writing it."""


class TokensError(OSError):
    """A tokens file cannot be used. The message says why, and reveals nothing of the file's contents."""


class _UnreadableError(TokensError):
    """The file cannot be read at the moment, whatever it contains."""


class Right(enum.Enum):
    """What a token may allow."""

    GENERATE = "generate"
    """Register and run requests, send vectors, and delete captures."""
    READ = "read"
    """Read captures."""
    WRITE = "write"
    """Write captures, as inference services do."""
    ADMIN = "admin"
    """Everything, for all tenants."""


@dataclass(frozen=True)
class Caller:
    """The caller of a call."""

    tenant: str
    """The tenant that it acts for; "*" for any tenant that it names."""
    rights: frozenset[Right]
    """The caller's rights."""

    @property
    def is_admin(self) -> bool:
        """Whether the caller has all rights, for all tenants."""
        return Right.ADMIN in self.rights

    @property
    def own_tenant(self) -> str:
        """The tenant of requests that name none."""
        return DEFAULT_TENANT if self.tenant == ANY_TENANT else self.tenant

    @property
    def holder(self) -> str:
        """The tenant on whose account the caller takes places and leases; "*" for one that acts for all tenants."""
        return ANY_TENANT if self.is_admin else self.tenant

    def may(self, right: Right | None) -> bool:
        """Tell whether the caller has a right. Every caller has the right None."""
        return right is None or self.is_admin or right in self.rights

    def acts_for(self, tenant: str) -> bool:
        """Tell whether the caller may act for a tenant. Requests and captures of other tenants do not exist for it."""
        return self.is_admin or self.tenant in {ANY_TENANT, tenant}


ANYBODY = Caller(ANY_TENANT, frozenset(Right))
"""The caller of every call to a service without authentication."""


@dataclass(frozen=True)
class Limits:
    """A tenant's limits; None means unlimited."""

    max_bytes: int | None = None
    """Bytes of the tenant's chunks in a store."""
    max_open_captures: int | None = None
    """The tenant's open captures in a store."""
    max_vector_bytes: int | None = None
    """Bytes of the tenant's steering vectors that an inference service keeps."""
    max_requests: int | None = None
    """The tenant's running and queued requests in an inference service."""
    max_sae_bytes: int | None = None
    """Bytes of the tenant's encoders of sparse autoencoders that an inference service keeps."""
    has_neighbours: bool = False
    """Whether the tokens file names several tenants."""

    def share_of(self, places: int) -> int:
        """Return how many of the places that all tenants share the tenant may take.

        If there are others it is half, so that no tenant locks the others out on its own.
        """
        return max(places // 2, 1) if self.has_neighbours else places


def no_limits(_tenant: str) -> Limits:
    """Return the limits of any tenant where there are none."""
    return Limits()


class TokenTable:
    """The contents of a tokens file.

    The table looks tokens up by a keyed hash of their hash, with a random key. So the time of a lookup does not reveal
    how close a guessed token is to a real one.
    """

    def __init__(self, callers: Mapping[bytes, tuple[Caller, datetime.datetime | None]], limits: Mapping[str, Limits]):
        self._key = secrets.token_bytes(32)
        self._callers = {self._blind(digest): entry for digest, entry in callers.items()}
        has_neighbours = len({caller.tenant for caller, _ in callers.values()} - {ANY_TENANT}) > 1
        self._others = Limits(has_neighbours=has_neighbours)
        self._limits = {name: replace(item, has_neighbours=has_neighbours) for name, item in limits.items()}
        self._limits[ANY_TENANT] = Limits()

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, token: str) -> tuple[Caller, datetime.datetime | None] | None:
        """Return a token's caller and its expiry time, which may be None; return None if the token is unknown."""
        return self._callers.get(self._blind(hashlib.sha256(token.encode()).digest()))

    def limits_of(self, tenant: str) -> Limits:
        """Return a tenant's limits. "*" has none."""
        return self._limits.get(tenant, self._others)

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")


class TokenFile:
    """A tokens file that is read again when it changes. It is thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            TokensError: The file cannot be used.
        """
        self._path = path
        self._lock = threading.Lock()
        self._stamp = self._current_stamp()
        self._table = _load(path)
        self._why_unread = ""  # what was logged when the changed file could not be read
        _log.info("tokens read", path=str(path), tokens=len(self._table))

    def table(self) -> TokenTable:
        """Return the file's current contents. If a changed file cannot be used, log that and keep the old contents."""
        with self._lock:
            stamp = self._current_stamp()
            if stamp != self._stamp:
                before, self._stamp = self._stamp, stamp
                try:
                    self._reload()
                except _UnreadableError as error:
                    # The next call reads it again: with too many open files, a removed token would stay known for ever.
                    self._stamp = before
                    self._note_unread(str(error))
            return self._table

    def _reload(self) -> None:
        try:
            table = _load(self._path)
            if not table and self._table:
                # `cp` and editors empty a file before they write it. Nobody's token is unknown for that moment.
                time.sleep(_WRITE_SECONDS)
                self._stamp = self._current_stamp()
                table = _load(self._path)
            self._table = table
        except _UnreadableError:
            raise
        except TokensError as error:
            # No traceback: it could reveal the file's contents.
            _log.error("cannot use the changed tokens file; keeping its previous contents", error=str(error))
        else:
            self._why_unread = ""
            _log.info("tokens reloaded", path=str(self._path), tokens=len(self._table))

    def _note_unread(self, why: str) -> None:
        if why != self._why_unread:
            _log.error("cannot read the changed tokens file; keeping its previous contents", error=why)
        self._why_unread = why

    def _current_stamp(self) -> tuple[int, ...]:
        try:
            return file_stamp(self._path)
        except OSError:
            return ()


def _tenant(name: str) -> str:
    if name != ANY_TENANT and not is_valid_tenant(name):
        raise ValueError("a tenant's name must have 1 to 128 characters of a-z A-Z 0-9 . _ - and not begin with . or -")
    return name


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class _Token(_Strict):
    hash: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    tenant: Annotated[str, AfterValidator(_tenant)]
    rights: Annotated[frozenset[Right], Field(min_length=1)]
    expires: AwareDatetime | None = None
    name: str = ""

    @property
    def caller(self) -> Caller:
        return Caller(self.tenant, self.rights)


_Limit = Field(ge=0, lt=1 << 63)
"""Statistics have the limits as numbers of 64 bits."""


class _Tenant(_Strict):
    max_bytes: Annotated[ByteSize, _Limit] | None = None
    max_open_captures: Annotated[int, _Limit] | None = None
    max_vector_bytes: Annotated[ByteSize, _Limit] | None = None
    max_requests: Annotated[int, _Limit] | None = None
    max_sae_bytes: Annotated[ByteSize, _Limit] | None = None


class _File(_Strict):
    token: tuple[_Token, ...] = ()
    tenant: dict[str, _Tenant] = Field(default_factory=dict)


def _load(path: Path) -> TokenTable:
    """Read a tokens file.

    Raises:
        TokensError: The file cannot be used.
    """
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise _UnreadableError(f"tokens: {path} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        problems = "; ".join(f"{_place(item['loc'])}: {item['msg']}" for item in error.errors(include_input=False))
        raise TokensError(f"tokens: {path}: {problems}") from None
    except ValueError as error:
        raise TokensError(f"tokens: {path} is not TOML: {error}") from None
    return _table(file, path)


def _table(file: _File, path: Path) -> TokenTable:
    callers: dict[bytes, tuple[Caller, datetime.datetime | None]] = {}
    for number, token in enumerate(file.token, start=1):
        digest = bytes.fromhex(token.hash.removeprefix("sha256:"))
        if digest in callers:
            raise TokensError(f"tokens: {path}: token {number} repeats the hash of an earlier token; remove one")
        if token.tenant == ANY_TENANT and not token.rights <= {Right.WRITE, Right.ADMIN}:
            raise TokensError(
                f"tokens: {path}: token {number}: tenant '*' may have only the rights write and admin; name a tenant"
            )
        callers[digest] = token.caller, token.expires
    for name in file.tenant:
        if not is_valid_tenant(name):
            raise TokensError(f"tokens: {path}: tenant.{name!r} is not a valid tenant name")
    return TokenTable(callers, {name: Limits(**vars(limits)) for name, limits in file.tenant.items()})


def _place(location: tuple[int | str, ...]) -> str:
    """Return the location of a problem in the file. Tokens are counted from 1."""
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in location)
