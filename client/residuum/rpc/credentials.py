"""A client's credentials: TLS and a bearer token.

The client sends a token only over TLS, because anyone who reads the token can use it. There are two exceptions: a
service on this machine, and `insecure=True`.
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
    """Credentials cannot be used as given. The message says why, and what to do."""


def is_loopback(host: str) -> bool:
    """Tell whether a host, as written in host:port, is a loopback address, which no other machine can reach.

    Names are not resolved: `localhost` is the only name that counts.
    """
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True)
class TLS:
    """TLS settings of a client. All files are PEM; they are read when the client connects.

    Attributes:
        ca: The trusted CAs; None for the public CAs that gRPC ships (or GRPC_DEFAULT_SSL_ROOTS_FILE_PATH).
        cert: The client's certificate chain. Set both `cert` and `key`, or neither.
        key: The private key of `cert`.
        server_name: The name that the service's certificate must have, if it differs from the endpoint's host.

    Example:
        TLS()                                                     # the service's certificate is from a public CA
        TLS(ca="ca.pem")                                          # ... from your own CA
        TLS(ca="ca.pem", cert="client.pem", key="client.key")     # mutual TLS: the service requires yours, too
    """

    ca: FilePath | None = None
    cert: FilePath | None = None
    key: FilePath | None = None
    server_name: str | None = None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return gRPC's channel credentials.

        Raises:
            CredentialsError: A file cannot be read, is not PEM, or only one of cert and key is set.
        """
        if (self.cert is None) != (self.key is None):
            raise CredentialsError("A client certificate needs two files. Give both cert and key, or neither.")
        ca, cert, key = (path and _read_pem(path) for path in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(ca or None, key or None, cert or None)


@dataclass(frozen=True)
class Credentials:
    """Credentials of a client of either service."""

    tls: TLS | None = None
    """TLS settings; None for a plain-text connection."""
    token: str = field(default="", repr=False)
    """The bearer token; empty to use `token_file`, or no token."""
    token_file: FilePath | None = None
    """A file that holds only the token. It is read again when it changes, so tokens can be rotated."""
    insecure: bool = False
    """Send a token without TLS to other machines, too. Anyone on the network path can then read and use it."""

    def __post_init__(self) -> None:
        if self.token:
            _check_token(self.token, "The token")

    @property
    def has_token(self) -> bool:
        """Whether the client sends a token."""
        return bool(self.token or self.token_file)

    def token_source(self) -> TokenSource:
        """Return the source of each call's token.

        Raises:
            CredentialsError: The token file cannot be read, or does not hold a token.
        """
        return TokenSource(self.token, self.token_file)

    def check_files(self) -> None:
        """Check that the files can be used, before the first connection needs them.

        Raises:
            CredentialsError: A file cannot be used.
        """
        if self.tls is not None:
            self.tls.channel_credentials()
        self.token_source()

    def check_endpoint(self, endpoint: str) -> None:
        """Check that no token would be sent in plain text to another machine.

        Raises:
            CredentialsError: A token would be sent that way, and `insecure` is not set.
        """
        host = endpoint.rpartition(":")[0]
        if self.has_token and self.tls is None and not self.insecure and not is_loopback(host):
            raise CredentialsError(
                f"The token would go to {endpoint} in plain text, where others on the network path can read it. "
                "Connect with TLS (tls=TLS(ca='ca.pem')). If the path is safe, such as a tunnel, set insecure=True."
            )


class TokenSource:
    """Provides the token of each call: a fixed token, or that of a file that may change. It is thread-safe."""

    def __init__(self, token: str = "", path: FilePath | None = None) -> None:
        self._token = token
        self._path = Path(path) if path and not token else None
        self._stamp: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self.get()

    def get(self) -> str:
        """Return the current token.

        If the file has no token any more, the earlier one stays in use: `>` and `cp` empty a file before they write it.

        Raises:
            CredentialsError: The file cannot be read, or does not hold a token. Only `__init__` raises this.
        """
        if self._path is None:
            return self._token
        with self._lock:
            try:
                stamp = file_stamp(self._path)
                if stamp != self._stamp:
                    self._token, self._stamp = _check_token(self._path.read_text().strip(), str(self._path)), stamp
            except (OSError, ValueError) as error:
                if self._token:
                    return self._token
                if isinstance(error, CredentialsError):
                    raise
                raise CredentialsError(f"The token file {self._path} cannot be read: {error}") from None
            return self._token


def file_stamp(path: FilePath) -> tuple[int, ...]:
    """Return a value that changes when the file changes: its times, inode and size.

    The second time changes with the owner and the permissions too. So a file that could not be read is read again once
    it can be.

    Raises:
        OSError: The file does not exist or cannot be accessed.
    """
    status = Path(path).stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


def _check_token(text: str, where: str) -> str:
    """Return the token if it can be sent in a header. Error messages never show the token.

    Raises:
        CredentialsError: The text cannot be a token.
    """
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise CredentialsError(f"{where} must be one word of printable ASCII. `residuum token` creates such tokens.")
    return text


def _read_pem(path: FilePath) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror or error}") from None
    if b"-----BEGIN " not in data:
        raise CredentialsError(f"{path} is not a PEM file: it has no -----BEGIN line.")
    return data
