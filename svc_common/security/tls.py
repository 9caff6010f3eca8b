"""Settings of both services for their address, certificates and callers.

No service is open to other machines by accident. To listen beyond loopback, a service needs TLS and authentication,
unless its operator sets `insecure`.
"""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from pydantic import model_validator

from residuum.rpc.credentials import file_stamp, is_loopback
from residuum.wire.endpoints import parse_endpoint
from svc_common.logs import get_logger
from svc_common.settings import Endpoint, OptionalUrl, ServiceSettings

if TYPE_CHECKING:
    import grpc.aio
    from typing_extensions import Self

_log = get_logger(__name__)


class SecurityError(OSError):
    """A certificate or tokens file cannot be used. The message says which file, and why."""


class SecureSettings(ServiceSettings):
    """Settings of a listening service. Subclasses give `listen` its default."""

    listen: Endpoint
    published_on: str = ""
    """The address at which the service's port is published, if it differs from listen: 127.0.0.1 for a container
    started with `-p 127.0.0.1:PORT:PORT`. Beyond loopback it requires TLS and authentication, or insecure, as listen
    does. Containers on the same network still reach listen, so that network must be private. Default: listen."""
    tls_cert: Path | None = None
    """Serve with TLS, using this certificate chain: a PEM file, read again when it changes."""
    tls_key: Path | None = None
    """The private key of tls-cert: a PEM file without a passphrase."""
    tls_client_ca: Path | None = None
    """Require client certificates from the CAs in this PEM file. A certificate only allows a caller to connect. Without
    tokens, every caller that connects has all rights, for all tenants."""
    tokens: Path | None = None
    """Require a token that is listed in this file, with the caller's rights (docs/operations/security.md). The file is
    read again when it changes."""
    otel_endpoint: OptionalUrl = ""
    """Where to send traces by OTLP over gRPC, such as http://localhost:4317; needs the extra `otel`. Default: the value
    of OTEL_EXPORTER_OTLP_ENDPOINT, OpenTelemetry's own variable, else nowhere."""
    insecure: bool = False
    """Allow listening beyond loopback without TLS or without authentication, and sending a token in plain text beyond
    loopback. For private networks, and behind a proxy that encrypts and authenticates."""

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: set both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca requires TLS: set --tls-cert and --tls-key as well")
        if not self.insecure and not self.is_local:
            self._check_exposure()
        return self

    @property
    def requires_authentication(self) -> bool:
        """Whether callers must authenticate, with a token or a certificate."""
        return self.tls_client_ca is not None or self.tokens is not None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can call the service: its port is open, or published, on loopback only."""
        return is_loopback(self.published_on or parse_endpoint(self.listen, listening=True)[0])

    def _check_exposure(self) -> None:
        missing = []
        if self.tls_cert is None:
            missing.append("does not encrypt (--tls-cert and --tls-key)")
        if not self.requires_authentication:
            missing.append("does not authenticate callers (--tokens or --tls-client-ca)")
        if not missing:
            return
        where, instead, word = self.listen, "listen on 127.0.0.1", "--insecure"
        if self.published_on:
            where, instead = f"{self.published_on}, where the port is published,", "publish it on 127.0.0.1"
            word = "--insecure (with compose.yaml: RESIDUUM_BIND_INSECURE=true)"
        raise ValueError(
            f"{where} can be reached from other machines, and the service {' and '.join(missing)}. Set these flags, or "
            f"{instead}. If the network itself is private, set {word}"
        )


def log_callers(settings: SecureSettings) -> None:
    """Log at startup that callers have all rights, if no tokens file limits them."""
    if settings.tokens is not None:
        return
    if settings.tls_client_ca is not None:
        _log.warning(
            "callers have all rights, for all tenants",
            who="every caller with a certificate of tls-client-ca",
            advice="a certificate only allows a caller to connect: set --tokens to limit its rights",
        )
    elif settings.is_local:
        _log.info("callers have all rights, for all tenants", who="every process on this machine")
    else:
        _log.warning(
            "callers have all rights, for all tenants",
            who=f"every caller that reaches {settings.published_on or settings.listen}",
            advice="set --tokens to limit rights",
        )


def add_port(server: grpc.Server | grpc.aio.Server, settings: SecureSettings) -> int:
    """Open a server's port as its settings say, and log who may call. Return the port.

    Raises:
        SecurityError: A certificate or key cannot be used.
        OSError: The address cannot be listened on.
    """
    credentials = _Certificates(settings).credentials() if settings.tls_cert else None
    log_callers(settings)
    try:
        if credentials is None:
            return server.add_insecure_port(settings.listen)
        return server.add_secure_port(settings.listen, credentials)
    except RuntimeError as error:  # gRPC does not say why
        reason = _why_unusable(settings.listen)
        raise OSError(
            f"listen: cannot listen on {settings.listen}: {reason}. Set --listen to another address."
        ) from error


def _why_unusable(endpoint: str) -> str:
    """Return why an address cannot be listened on, in the system's words."""
    host, port = parse_endpoint(endpoint, listening=True)
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC cannot open the port"


class _Certificates:
    """A server's certificates, reloaded when their files change, so that they can be renewed without a restart."""

    def __init__(self, settings: SecureSettings) -> None:
        assert settings.tls_cert is not None  # noqa: S101 - add_port checks it
        assert settings.tls_key is not None  # noqa: S101 - settings require both or neither
        self._cert, self._key, self._client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        self._lock = threading.Lock()
        self._stamp = self._current_stamp()
        self._why_unused = ""  # what was logged when changed files could not be used

    def credentials(self) -> grpc.ServerCredentials:
        """Return the server's credentials. gRPC asks for changed certificates at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._load(), self._changed, require_client_authentication=self._client_ca is not None
        )

    def _changed(self) -> Any:
        """Return the certificates if they have changed, else None, which gRPC's type stubs do not allow.

        If the new files cannot be used, log that and keep the current certificates. The next handshake tries again: the
        files may be fine, and the process has too many open files.
        """
        with self._lock:
            try:
                stamp = self._current_stamp()
                if stamp == self._stamp:
                    return None
                configuration = self._load()
            except OSError as error:
                if str(error) != self._why_unused:
                    _log.error("cannot use the changed certificates; keeping the current ones", error=str(error))
                self._why_unused = str(error)
                return None
            self._stamp, self._why_unused = stamp, ""
            _log.info("certificates reloaded", cert=str(self._cert))
            return configuration

    def _current_stamp(self) -> tuple[tuple[int, ...], ...]:
        try:
            return tuple(file_stamp(path) for path in (self._cert, self._key, self._client_ca) if path)
        except OSError as error:
            raise SecurityError(f"tls: {error}") from None

    def _load(self) -> grpc.ServerCertificateConfiguration:
        """Read and check the files. gRPC would report bad files only at the first handshake, and without a reason.

        Raises:
            SecurityError: The files cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            raise SecurityError(
                f"tls-cert, tls-key: {self._cert} and {self._key} must be a certificate and its private key, in PEM "
                f"format and without a passphrase: {error}"
            ) from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ssl.SSLError) as error:
                raise SecurityError(f"tls-client-ca: {self._client_ca} holds no certificates: {error}") from None
        return grpc.ssl_server_certificate_configuration(
            [(self._key.read_bytes(), self._cert.read_bytes())],
            root_certificates=self._client_ca.read_bytes() if self._client_ca else None,
        )
