"""What a channel shows to a service, and what it wants to see: TLS and a bearer token.

A token goes over TLS alone, unless the service is on this machine, or the caller says otherwise (`insecure`): whoever
reads it on its way may use it.
"""

from __future__ import annotations

import ipaddress
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

import grpc

FilePath = Union[str, "os.PathLike[str]"]


class CredentialsError(ValueError):
    """Credentials cannot be used as they are given. The text says why, and what to do."""


def is_loopback(host: str) -> bool:
    """Tell whether a host, as it stands in host:port, is this machine's own: nobody else can listen to it, or call it.

    Names are not looked up: only `localhost` is known to be so.
    """
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True)
class TLS:
    """How a client's connections are encrypted, and who is trusted. All files are PEM; they are read when it connects.

    Example:
        TLS()                                                     # a certificate of a public CA
        TLS(ca="ca.pem")                                          # of your own
        TLS(ca="ca.pem", cert="client.pem", key="client.key")     # mutual TLS: the service asks for yours, too
    """

    ca: FilePath | None = None
    """The CAs that are trusted; None: the public ones that gRPC brings (or GRPC_DEFAULT_SSL_ROOTS_FILE_PATH)."""
    cert: FilePath | None = None
    """The client's own certificate, and those between it and its CA. Set with `key`, or not at all."""
    key: FilePath | None = None
    """The private key of `cert`."""
    server_name: str | None = None
    """The name that the service's certificate must have, if it is not the one in the endpoint."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise CredentialsError("A client certificate takes two files: give both cert and key, or neither.")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            CredentialsError: One cannot be read, or holds nothing of the kind.
        """
        ca, cert, key = (path and _read_pem(path) for path in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(ca or None, key or None, cert or None)


@dataclass(frozen=True)
class Credentials:
    """What a client of either service connects with."""

    tls: TLS | None = None
    """How the connection is encrypted; None: it is not."""
    token: str = field(default="", repr=False)
    """The bearer token; empty: that of `token_file`, or none."""
    token_file: FilePath | None = None
    """A file that holds the token and nothing else. It is read again when it changes, so tokens rotate."""
    insecure: bool = False
    """Send a token without TLS to another machine, too. Whoever is on the way can read it, and use it."""

    def __post_init__(self) -> None:
        if self.token:
            _check_token(self.token, "The token")

    @property
    def has_token(self) -> bool:
        """Whether a token is sent."""
        return bool(self.token or self.token_file)

    def token_source(self) -> TokenSource:
        """Return where each call finds its token.

        Raises:
            CredentialsError: The file cannot be read, or holds something else.
        """
        return TokenSource(self.token, self.token_file)

    def check_files(self) -> None:
        """Make sure that the files can be used, before the first connection needs them.

        Raises:
            CredentialsError: They cannot.
        """
        if self.tls is not None:
            self.tls.channel_credentials()
        self.token_source()

    def check_endpoint(self, endpoint: str) -> None:
        """Make sure that no token would be sent where others can read it.

        Raises:
            CredentialsError: It would.
        """
        host = endpoint.rpartition(":")[0]
        if self.has_token and self.tls is None and not self.insecure and not is_loopback(host):
            raise CredentialsError(
                f"The token would go to {endpoint} in plain text, where others on the way can read it. Connect with "
                "TLS (tls=TLS(ca='ca.pem')), or if the way is safe, as within a tunnel, say insecure=True."
            )


class TokenSource:
    """The token of each call: fixed, or from a file that may change. Safe for threads."""

    def __init__(self, token: str = "", path: FilePath | None = None) -> None:
        self._token = token
        self._path = Path(path) if path and not token else None
        self._stamp: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self.get()

    def get(self) -> str:
        """Return the token.

        Raises:
            CredentialsError: The file cannot be read, or holds something else.
        """
        if self._path is None:
            return self._token
        with self._lock:
            try:
                stamp = file_stamp(self._path)
                if stamp != self._stamp:
                    self._token, self._stamp = _check_token(self._path.read_text().strip(), str(self._path)), stamp
            except (OSError, UnicodeDecodeError) as error:
                raise CredentialsError(f"The token file {self._path} cannot be read: {error}") from None
            return self._token


def file_stamp(path: FilePath) -> tuple[int, ...]:
    """Return what changes when a file does.

    Raises:
        OSError: It is not there.
    """
    status = Path(path).stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _check_token(text: str, where: str) -> str:
    """Return a token that can stand in a header. The text itself is never shown.

    Raises:
        CredentialsError: It is none.
    """
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise CredentialsError(f"{where} must be one word of printable ASCII, as `residuum token` makes it.")
    return text


def _read_pem(path: FilePath) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror or error}") from None
    if b"-----BEGIN " not in data:
        raise CredentialsError(f"{path} is not a PEM file: nothing in it begins with -----BEGIN.")
    return data
