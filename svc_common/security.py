"""Where a service may listen, and with which certificates: the settings that both services have for it.

Nothing is open to other machines by accident: a service that listens beyond loopback has TLS and asks who calls, or was
told that it need not (`insecure`).
"""

from __future__ import annotations

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
    """A file of certificates or tokens cannot be used. The text says which, and why."""


class SecureSettings(ServiceSettings):
    """Settings of whoever listens. Subclasses give `listen` its default."""

    listen: Endpoint
    published_on: str = ""
    """The address at which the service's port is published, where that is not the one it listens on: 127.0.0.1 in a
    container started with `-p 127.0.0.1:50051:50051`. Beyond loopback it takes TLS and callers who say who they are, or
    `insecure`, as `listen` would. Containers on the same network reach `listen` all the same: that network must be
    private. Default: where it listens."""
    tls_cert: Path | None = None
    """Speak TLS, with this certificate and those between it and its CA: a PEM file, read again when it changes."""
    tls_key: Path | None = None
    """The private key of tls-cert: a PEM file, without a passphrase."""
    tls_client_ca: Path | None = None
    """Ask callers for a certificate, too, and serve those alone whose CA is in this PEM file. It says who may connect;
    without tokens, each of them may do everything, to all tenants."""
    tokens: Path | None = None
    """Require a token that is listed in this file, with the caller's rights (docs/operations/security.md). The file is
    read again when it changes."""
    otel_endpoint: OptionalUrl = ""
    """Where to send traces by OTLP over gRPC, such as http://localhost:4317; needs the extra `otel`. Default: where
    OpenTelemetry's own OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere."""
    insecure: bool = False
    """Listen beyond loopback without TLS, or without asking who calls; send a token in plain text beyond it, too. For
    private networks, and behind whatever encrypts and asks instead."""

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: set both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca is for TLS: set --tls-cert and --tls-key, too")
        if not self.insecure and not self.is_this_machines_own:
            self._check_exposure()
        return self

    @property
    def asks_who_calls(self) -> bool:
        """Whether callers must show something: a token, or a certificate."""
        return self.tls_client_ca is not None or self.tokens is not None

    @property
    def is_this_machines_own(self) -> bool:
        """Whether nobody on another machine can call: the port is open on loopback alone, or published there alone."""
        return is_loopback(self.published_on or parse_endpoint(self.listen, listening=True)[0])

    def _check_exposure(self) -> None:
        missing = []
        if self.tls_cert is None:
            missing.append("encrypts nothing (--tls-cert and --tls-key do)")
        if not self.asks_who_calls:
            missing.append("asks nobody who they are (--tokens or --tls-client-ca does)")
        if not missing:
            return
        where, instead, word = self.listen, "listen on 127.0.0.1", "--insecure"
        if self.published_on:
            where, instead = f"{self.published_on}, where the port is published,", "publish it on 127.0.0.1"
            word = "--insecure (with compose.yaml: RESIDUUM_BIND_INSECURE=true)"
        raise ValueError(
            f"{where} can be reached from other machines, and the service {' and '.join(missing)}. Set these, or "
            f"{instead}; where the network itself is private, say {word}"
        )


def log_callers(settings: SecureSettings) -> None:
    """Say at the start what nobody should learn later: without tokens, whoever is let in may do everything."""
    if settings.tokens is not None:
        return
    if settings.tls_client_ca is not None:
        _log.warning(
            "callers have all rights, of all tenants",
            who="whoever has a certificate of tls-client-ca",
            advice="a certificate says who may connect, --tokens says who may do what: set both",
        )
    elif settings.is_this_machines_own:
        _log.info("callers have all rights, of all tenants", who="whoever is on this machine")
    else:
        _log.warning(
            "callers have all rights, of all tenants",
            who=f"whoever reaches {settings.published_on or settings.listen}",
            advice="--tokens says who may do what",
        )


def add_port(server: grpc.Server | grpc.aio.Server, settings: SecureSettings) -> int:
    """Let a server listen as its settings say, and log who may call; return the port.

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
    except RuntimeError as error:
        raise OSError(f"listen: cannot listen on {settings.listen}: {error}") from error


class _Certificates:
    """The certificates of a server, read again when their files change: they are renewed while it runs."""

    def __init__(self, settings: SecureSettings) -> None:
        assert settings.tls_cert is not None  # noqa: S101 - add_port
        assert settings.tls_key is not None  # noqa: S101 - they go together
        self._cert, self._key, self._client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        self._lock = threading.Lock()
        self._stamp = self._current_stamp()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what the server listens with; it asks for changes at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._load(), self._changed, require_client_authentication=self._client_ca is not None
        )

    def _changed(self) -> Any:
        """Return the certificates if they have changed, else None, which the types of gRPC's stubs forget.

        What cannot be used is logged, and the ones before stay.
        """
        with self._lock:
            try:
                stamp = self._current_stamp()
                if stamp == self._stamp:
                    return None
                self._stamp = stamp
                configuration = self._load()
            except SecurityError as error:
                _log.error("the certificates have changed and cannot be used; those before stay", error=str(error))
                return None
            _log.info("the certificates have changed", cert=str(self._cert))
            return configuration

    def _current_stamp(self) -> tuple[tuple[int, ...], ...]:
        try:
            return tuple(file_stamp(path) for path in (self._cert, self._key, self._client_ca) if path)
        except OSError as error:
            raise SecurityError(f"tls: {error}") from None

    def _load(self) -> grpc.ServerCertificateConfiguration:
        """Read the files.

        Raises:
            SecurityError: They cannot be used. gRPC itself would not say so before the first handshake, nor why.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            raise SecurityError(
                f"tls-cert, tls-key: {self._cert} and {self._key} are not a certificate and its key, both PEM and "
                f"without a passphrase: {error}"
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
