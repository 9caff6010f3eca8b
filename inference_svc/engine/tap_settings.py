"""The settings of taps, rings, shippers and stores: the same for the inference service and for `vllm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode
from typing_extensions import Self

from residuum.rpc.credentials import TLS, Credentials, CredentialsError
from residuum.v1 import capture_pb2
from residuum.wire.endpoints import parse_endpoint
from residuum.wire.limits import DEFAULT_PROJECTION, DEFAULT_TOPK
from residuum.wire.placement import StoreAddress, parse_stores
from svc_common.settings import ServiceSettings

SITES = {
    "resid_post": capture_pb2.SITE_RESID_POST,
    "resid_pre": capture_pb2.SITE_RESID_PRE,
    "attn_out": capture_pb2.SITE_ATTN_OUT,
    "mlp_out": capture_pb2.SITE_MLP_OUT,
}
"""The sites that can be armed, by name."""


def _split(value: Any) -> Any:
    return [name.strip() for name in value.split(",")] if value and isinstance(value, str) else value or ()


def _stores(texts: tuple[str, ...]) -> tuple[str, ...]:
    for store in parse_stores(texts):
        parse_endpoint(store.endpoint)
    return texts


Stores = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_stores)]
"""Stores, each host:port or name=host:port."""


def _known_sites(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in SITES:
            raise ValueError(f"{name!r} is not a site; there are {', '.join(SITES)}")
    if len(set(names)) != len(names) or not names:
        raise ValueError("name at least one site, and each once")
    return names


class TapSettings(ServiceSettings):
    """What is tapped in vLLM, and where captured rows go."""

    store: Stores = ()
    """host:port of the store that captures go to, or of several, separated by commas. Each can have a name, as in
    a=host:port,b=host:port: captures are placed by it, so it must stay the store's wherever that moves; the default is
    its host:port. Without a store, nothing can be captured."""
    fixed_stores: bool = False
    """No store was ever added to the list, removed or called otherwise since the first capture: so an id that a caller
    chose can only be in its own store, and the others are not asked, before a capture is made, whether they have it."""
    store_token_file: Path | None = None
    """The file that holds the service's own token for the store, which has the right `write`; read again when it
    changes."""
    store_tls: bool = False
    """Connect to the store with TLS, trusting public CAs."""
    store_tls_ca: Path | None = None
    """Connect to the store with TLS, trusting the CAs in this PEM file."""
    store_tls_cert: Path | None = None
    """A certificate to show to the store (mutual TLS): a PEM file."""
    store_tls_key: Path | None = None
    """The private key of store-tls-cert: a PEM file."""
    store_tls_server_name: str = ""
    """The name that the store's certificate must have, if it is not the host in `store`."""
    insecure: bool = False
    """Send a token for the store in plain text beyond loopback, too: for private networks."""

    capture_sites: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_known_sites)] = (
        "resid_post",
    )
    """The sites that requests may capture, separated by commas: resid_post, resid_pre, attn_out, mlp_out. The memory of
    capture blocks grows with them, see max-num-seqs; attn_out and mlp_out cost a kernel a layer even where nobody
    captures them."""
    fold_norms: bool | None = None
    """Fold taps into the norms that follow them, so that idle ones cost next to nothing. Default: on a GPU."""

    capture_encoding: Literal["raw", "fp32", "fp16", "bf16", "full8", "rp8", "topk8", "rp", "topk"] = "raw"
    """How captured rows are encoded if a request does not say so; docs/encodings.md tells what each keeps."""
    capture_rp_k: int = Field(default=DEFAULT_PROJECTION, ge=1)
    """Dimensions of random projections (rp, rp8) if a request does not say how many; the width of rows, if that is
    less."""
    capture_topk_k: int = Field(default=DEFAULT_TOPK, ge=1)
    """Elements of the largest magnitude that topk and topk8 keep if a request does not say how many; the width of rows,
    if that is less."""

    ring_mib: int = Field(default=256, ge=1)
    """Shared memory between each capturing worker and the shippers, in MiB. With several stores, half of it is divided
    among them, so that one that is away leaves room for the others."""
    shippers: int = Field(default=1, ge=1, le=64)
    """Processes that send captured rows to the stores, each by one stream to every store."""
    shipper_nice: int = Field(default=5, ge=0, le=19)
    """By how much shippers give way to the engine where both want a core: niceness, as of `nice`. 0: not at all."""
    max_vectors: int = Field(default=4096, ge=1)
    """Steering vectors that are kept; the one that was not used for longest goes first. No request can use more."""
    max_vector_mib: int = Field(default=256, ge=1)
    """Memory of the vectors that are kept, in MiB."""
    max_active_vectors: int = Field(default=1024, ge=1, le=1 << 20)
    """Different steering vectors that running requests may use at once; more requests wait."""
    vector_wait_seconds: float = Field(default=30.0, gt=0)
    """How long a request waits for room among the active vectors, or among the signs of random projections, before it
    fails."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged."""

    @property
    def stores(self) -> tuple[StoreAddress, ...]:
        """The stores as this service reaches them."""
        return parse_stores(self.store)

    @property
    def store_credentials(self) -> Credentials:
        """What the store is shown.

        Raises:
            CredentialsError: It does not go together.
        """
        files = {"ca": self.store_tls_ca, "cert": self.store_tls_cert, "key": self.store_tls_key}
        encrypted = self.store_tls or self.store_tls_server_name or any(files.values())
        tls = TLS(**files, server_name=self.store_tls_server_name or None) if encrypted else None
        return Credentials(tls=tls, token_file=self.store_token_file, insecure=self.insecure)

    @model_validator(mode="after")
    def _check_store_credentials(self) -> Self:
        try:
            credentials = self.store_credentials
            credentials.check_files()
            for store in self.stores:
                credentials.check_endpoint(store.endpoint)
        except CredentialsError as error:
            raise ValueError(f"--store-tls-ca, --store-tls-cert, --store-token-file: {error}") from None
        return self
