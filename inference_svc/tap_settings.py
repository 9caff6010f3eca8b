"""The settings of taps, rings, shippers and stores, which the inference service and `vllm serve` share."""

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

SITES = {name.removeprefix("SITE_").lower(): site for name, site in capture_pb2.Site.items() if site}
"""The sites that --capture-sites accepts, by name."""


def split_list(value: Any) -> Any:
    """Return the parts of a text that are separated by commas, and any other value as it is."""
    return [name.strip() for name in value.split(",")] if value and isinstance(value, str) else value or ()


def _stores(texts: tuple[str, ...]) -> tuple[str, ...]:
    for store in parse_stores(texts):
        parse_endpoint(store.endpoint)
    return texts


Stores = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_stores)]
"""Stores, each as host:port or name=host:port."""


def _known_sites(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in SITES:
            raise ValueError(f"{name!r} is not a site. Choose among {', '.join(SITES)}")
    if len(set(names)) != len(names) or not names:
        raise ValueError(f"got {', '.join(names) or 'no site'}. Name at least one site, and each only once")
    return names


class TapSettings(ServiceSettings):
    """The sites that are tapped in vLLM, and the stores that captured rows go to."""

    store: Stores = ()
    """host:port of the store for captures; several are separated by commas. Each may have a name, as in
    a=host:port,b=host:port. The name decides which captures a store holds, so a store must keep its name when it moves.
    Default name: its host:port. Without a store, nothing can be captured."""
    fixed_stores: bool = False
    """State that no store was added, removed or renamed since the first capture. Before it opens a capture whose ID a
    caller chose, the service then does not ask the other stores whether they hold that ID."""
    store_token_file: Path | None = None
    """A file with this service's token for the store, which needs the right `write`. The service reads the file again
    when it changes."""
    store_tls: bool = False
    """Connect to the store with TLS, and trust public CAs."""
    store_tls_ca: Path | None = None
    """Connect to the store with TLS, and trust the CAs in this PEM file."""
    store_tls_cert: Path | None = None
    """A PEM file with this service's certificate for the store (mutual TLS)."""
    store_tls_key: Path | None = None
    """A PEM file with the private key of store-tls-cert."""
    store_tls_server_name: str = ""
    """The name that the store's certificate must have, if it differs from the host in `store`."""
    insecure: bool = False
    """Send the token for the store in plain text to other machines too. For private networks only."""

    capture_sites: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_known_sites)] = (
        "resid_post",
    )
    """The sites that requests may capture, separated by commas: resid_post, resid_pre, attn_out, mlp_out, attn_in,
    resid_mid, mlp_in, q, k, v, z, mlp_act, router_logits, final_norm, routing_weights, q_pre, k_pre. Each site adds
    memory for capture blocks; see max-num-seqs. All but resid_post and resid_pre add one kernel per layer to each step,
    even if no request captures them; resid_mid adds none where its tap folds into a norm, and final_norm adds one in
    all."""
    fold_norms: bool | None = None
    """Fold taps into the norms that follow them, so that idle taps cost almost nothing. Default: only on a GPU."""

    capture_encoding: Literal["raw", "fp32", "fp16", "bf16", "full8", "rp8", "topk8", "rp", "topk"] = "raw"
    """The encoding of captured rows if a request does not choose one. docs/encodings.md says what each one keeps."""
    capture_rp_k: int = Field(default=DEFAULT_PROJECTION, ge=1)
    """Dimensions of random projections (rp, rp8) if a request does not choose them; at most the width of rows."""
    capture_topk_k: int = Field(default=DEFAULT_TOPK, ge=1)
    """How many elements of largest magnitude topk and topk8 keep if a request does not choose; at most the width of
    rows."""

    ring_mib: int = Field(default=256, ge=1)
    """Shared memory between each capturing worker and the shippers, in MiB. With several stores, each has a reserved
    part of one half, so that a store that does not answer leaves room for the others."""
    shippers: int = Field(default=1, ge=1, le=64)
    """Processes that send captured rows to the stores. Each opens one stream to every store."""
    shipper_nice: int = Field(default=5, ge=0, le=19)
    """Niceness of the shippers: with a higher value, they give way to the engine when both want a core. 0: equal."""
    max_vectors: int = Field(default=4096, ge=1)
    """Most steering vectors that are kept. The least recently used is evicted first. One request cannot use more."""
    max_vector_mib: int = Field(default=256, ge=1)
    """Memory for kept steering vectors, in MiB."""
    max_active_vectors: int = Field(default=1024, ge=1, le=1 << 20)
    """Most different steering vectors that running requests use at once. Other requests wait."""
    vector_wait_seconds: float = Field(default=30.0, gt=0)
    """How long a request waits for room for its active vectors or for its random projection's signs. It then fails."""
    score_mib: int = Field(default=64, ge=0)
    """Shared memory for the scores of probes, in MiB: 4 bytes for each output, place and token of all running requests.
    0: no probes."""

    rules_file: Path | None = None
    """A TOML file of rules that apply to all requests, or to those of some tenants: they flag, end or steer replies by
    the scores of probes. docs/howto/watch.md describes it."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""

    @property
    def stores(self) -> tuple[StoreAddress, ...]:
        """The stores at the addresses where this service reaches them."""
        return parse_stores(self.store)

    @property
    def store_credentials(self) -> Credentials:
        """The credentials for the stores."""
        files = {"ca": self.store_tls_ca, "cert": self.store_tls_cert, "key": self.store_tls_key}
        encrypted = self.store_tls or self.store_tls_server_name or any(files.values())
        tls = TLS(**files, server_name=self.store_tls_server_name or None) if encrypted else None
        return Credentials(tls=tls, token_file=self.store_token_file, insecure=self.insecure)

    @model_validator(mode="after")
    def _check_store_credentials(self) -> Self:
        credentials = self.store_credentials
        try:
            credentials.check_files()
            for store in self.stores:
                credentials.check_endpoint(store.endpoint)
        except CredentialsError as error:
            raise ValueError(f"--store-tls-ca, --store-tls-cert, --store-token-file: {error}") from None
        return self
