"""The tokens file of a service: who may call, as which tenant, with which rights and within which limits.

    [[token]]
    hash = "sha256:..."              # never the token itself: `residuum token` prints both
    tenant = "alice"
    rights = ["generate", "read"]
    expires = 2027-01-01T00:00:00Z   # optional
    name = "Alice's laptop"          # optional, for people

    [tenant.alice]                   # optional, as each line of it
    max_bytes = "100GiB"             # chunks in the store
    max_open_captures = 64
    max_vector_bytes = "64MiB"       # steering vectors that the inference service keeps
    max_requests = 256               # that run at once, or wait for their turn, in the inference service

The file is read again when it changes, so tokens come and go without a restart. A call that runs goes on to its end.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import hmac
import secrets
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
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


class TokensError(OSError):
    """A tokens file cannot be used. The text says why; nothing that stands in the file is part of it."""


class Right(enum.Enum):
    """What a token may allow."""

    GENERATE = "generate"
    """To register and run requests, send vectors, and delete captures."""
    READ = "read"
    """To read captures."""
    WRITE = "write"
    """To write captures, as inference services do."""
    ADMIN = "admin"
    """Everything, of all tenants."""


@dataclass(frozen=True)
class Caller:
    """Who makes a call."""

    tenant: str
    """Whose captures and requests it is about; "*": any that it names."""
    rights: frozenset[Right]
    """What it may do."""

    @property
    def is_admin(self) -> bool:
        """Whether it may do everything, to all tenants."""
        return Right.ADMIN in self.rights

    @property
    def own_tenant(self) -> str:
        """The tenant that is meant where it names none."""
        return DEFAULT_TENANT if self.tenant == ANY_TENANT else self.tenant

    def may(self, right: Right | None) -> bool:
        """Tell whether it has a right; None is one that everybody has."""
        return right is None or self.is_admin or right in self.rights

    def acts_for(self, tenant: str) -> bool:
        """Tell whether what belongs to a tenant exists for this caller."""
        return self.is_admin or self.tenant in {ANY_TENANT, tenant}


ANYBODY = Caller(ANY_TENANT, frozenset(Right))
"""The caller where nobody is asked who they are."""


@dataclass(frozen=True)
class Limits:
    """What a tenant may have; None: any amount."""

    max_bytes: int | None = None
    """Bytes of its chunks in a store."""
    max_open_captures: int | None = None
    """Captures of it that have not ended."""
    max_vector_bytes: int | None = None
    """Bytes of its steering vectors that an inference service keeps."""
    max_requests: int | None = None
    """Requests of it that run at once, or wait for their turn, in an inference service."""


class TokenTable:
    """The contents of a tokens file.

    Tokens are found by a keyed hash of their hash, with a key of chance: how long that takes tells nobody how a token
    that they guessed differs from one that is there.
    """

    def __init__(self, callers: Mapping[bytes, tuple[Caller, datetime.datetime | None]], limits: Mapping[str, Limits]):
        self._key = secrets.token_bytes(32)
        self._callers = {self._blind(digest): entry for digest, entry in callers.items()}
        self._limits = dict(limits)

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, token: str) -> tuple[Caller, datetime.datetime | None] | None:
        """Return whose token this is, and when it expires; None: nobody's."""
        return self._callers.get(self._blind(hashlib.sha256(token.encode()).digest()))

    def limits_of(self, tenant: str) -> Limits:
        """Return what a tenant may have."""
        return self._limits.get(tenant, Limits())

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")


class TokenFile:
    """A tokens file that is read again when it changes. Safe for threads."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            TokensError: It cannot be used.
        """
        self._path = path
        self._lock = threading.Lock()
        self._stamp = self._current_stamp()
        self._table = _load(path)
        _log.info("tokens read", path=str(path), tokens=len(self._table))

    def table(self) -> TokenTable:
        """Return what stands in the file. While that cannot be used, what stood there before holds; the log says so."""
        with self._lock:
            stamp = self._current_stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
            return self._table

    def _reload(self) -> None:
        try:
            self._table = _load(self._path)
        except TokensError as error:
            # Not the traceback: it could show what stands in the file.
            _log.error("the tokens file has changed and cannot be used; what it said before holds", error=str(error))
        else:
            _log.info("tokens read again", path=str(self._path), tokens=len(self._table))

    def _current_stamp(self) -> tuple[int, ...]:
        try:
            return file_stamp(self._path)
        except OSError:
            return ()


def _tenant(name: str) -> str:
    if name != ANY_TENANT and not is_valid_tenant(name):
        raise ValueError("a tenant's name is 1 to 128 of a-z A-Z 0-9 . _ -, and begins with no dot or dash")
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


class _Tenant(_Strict):
    max_bytes: ByteSize | None = None
    max_open_captures: Annotated[int, Field(ge=0)] | None = None
    max_vector_bytes: ByteSize | None = None
    max_requests: Annotated[int, Field(ge=0)] | None = None


class _File(_Strict):
    token: tuple[_Token, ...] = ()
    tenant: dict[str, _Tenant] = Field(default_factory=dict)


def _load(path: Path) -> TokenTable:
    """Read a tokens file.

    Raises:
        TokensError: It cannot be used.
    """
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise TokensError(f"tokens: {path} cannot be read: {error.strerror or error}") from None
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
            raise TokensError(f"tokens: {path}: token {number} stands there twice")
        if token.tenant == ANY_TENANT and not token.rights <= {Right.WRITE, Right.ADMIN}:
            raise TokensError(f"tokens: {path}: token {number}: the tenant '*' is for the rights write and admin alone")
        callers[digest] = token.caller, token.expires
    for name in file.tenant:
        if not is_valid_tenant(name):
            raise TokensError(f"tokens: {path}: tenant.{name!r} is no tenant's name")
    return TokenTable(callers, {name: Limits(**vars(limits)) for name, limits in file.tenant.items()})


def _place(location: tuple[int | str, ...]) -> str:
    """Return where in the file something is wrong: the tokens are counted from 1."""
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in location)
