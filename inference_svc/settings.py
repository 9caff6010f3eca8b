"""The settings of the inference service: flags, environment and file from one declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode
from typing_extensions import Self

from residuum.rpc.credentials import TLS, Credentials, CredentialsError
from residuum.rpc.security import SecureSettings
from residuum.rpc.serving import parse_endpoint
from residuum.rpc.settings import Endpoint, OptionalEndpoint
from residuum.v1 import capture_pb2
from residuum.wire.limits import DEFAULT_PROJECTION, DEFAULT_TOPK
from residuum.wire.placement import StoreAddress, parse_stores

_TAPS_OWN = {"model", "worker_cls", "additional_config", "speculative_config"}
"""Engine arguments that the taps depend on."""


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


def _engine_args(value: dict[str, Any]) -> dict[str, Any]:
    refused = _TAPS_OWN & value.keys()
    if refused:
        raise ValueError(f"{', '.join(sorted(refused))} cannot be set here: the taps depend on it")
    return value


class InferenceSettings(SecureSettings):
    """Serve a language model with vLLM; capture its activations and steer it, over gRPC."""

    model: str = Field(min_length=1)
    """The model: a folder with config, weights and tokenizer, or a name on the Hugging Face hub."""
    store: Stores = ()
    """host:port of the store that captures go to, or of several, separated by commas. Each can have a name, as in
    a=host:port,b=host:port: captures are placed by it, so it must stay the store's wherever that moves; the default is
    its host:port. Without a store, nothing can be captured."""
    fixed_stores: bool = False
    """No store was ever added to the list, removed or called otherwise since the first capture: so an id that a caller
    chose can only be in its own store, and the others are not asked, before a capture is made, whether they have it."""
    listen: Endpoint = "127.0.0.1:50051"
    """host:port to serve on. Port 0 takes any free one; see port-file."""
    metrics: OptionalEndpoint = ""
    """host:port to show figures for Prometheus on: http://host:port/metrics. Default: nowhere."""
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
    served_model_name: str = ""
    """The name that clients see. Default: the model's."""
    advertise_store: Stores = ()
    """host:port under which clients reach the store, if it is not the one above; of several, as many and in the same
    order, or those that differ, as name=host:port."""
    port_file: str = ""
    """A file to write the port to, once it is known."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The model's dtype, and so that of raw rows."""
    enforce_eager: bool = False
    """Run without compiling the model: starts sooner, generates more slowly."""
    max_model_len: int = Field(default=0, ge=0)
    """Tokens in prompt and reply together; 0 takes the model's own limit."""
    max_num_seqs: int = Field(default=64, ge=1, le=1024)
    """Requests that run at once; more wait. Capture blocks take, of device memory, (2 * max-num-batched-tokens + 96 *
    max-num-seqs) * layers * sites * hidden size * bytes of an element on a GPU, and (max-num-batched-tokens + 64 *
    max-num-seqs) * ... on a CPU: at the defaults 2.5 GiB a site for 8 B parameters on a GPU. See deploy/README.md."""
    max_num_batched_tokens: int = Field(default=2048, ge=32)
    """Tokens that one step computes at most. The memory of capture blocks grows with it; see max-num-seqs."""
    kv_cache_gib: float = Field(default=0.0, ge=0.0)
    """Memory of the KV cache in GiB; 0 leaves it to vLLM on a GPU, and takes 2 on a CPU."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that each layer is split over."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages that the layers are divided into."""
    seed: int = Field(default=0, ge=0)
    """vLLM's seed."""
    engine_args: Annotated[dict[str, Any], AfterValidator(_engine_args)] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, as a JSON object. What the taps depend on cannot be set here."""

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
    max_registrations: int = Field(default=10_000, ge=1)
    """Registrations that may wait for their generation."""
    max_registration_mib: int = Field(default=64, ge=1)
    """Memory of the registrations that wait, in MiB of their messages."""
    max_requests: int = Field(default=1024, ge=1, le=65_536)
    """Requests that may run, or wait for their turn, at once; more are refused."""
    first_message_seconds: float = Field(default=20.0, gt=0)
    """A call that has sent no message for this long is ended."""
    stall_seconds: float = Field(default=600.0, gt=0)
    """A stream whose caller reads nothing of what was sent to it for this long is ended, and its request with it. Those
    who wait for tokens may wait as long as they like."""
    registration_seconds: float = Field(default=600.0, gt=0)
    """How long a registration lasts if it is not used."""
    grace_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM before they are aborted."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged."""

    @property
    def stores(self) -> tuple[StoreAddress, ...]:
        """The stores as this service reaches them."""
        return parse_stores(self.store)

    @property
    def advertised_stores(self) -> tuple[StoreAddress, ...]:
        """The same stores, in the same order, as clients reach them.

        Raises:
            ValueError: What is advertised does not go with the stores.
        """
        stores, told = self.stores, parse_stores(self.advertise_store)
        if not told:
            return stores
        if any("=" in text for text in self.advertise_store):
            known = {store.name: store.endpoint for store in stores}
            strangers = [store.name for store in told if store.name not in known]
            if strangers:
                raise ValueError(f"--advertise-store names {', '.join(strangers)}; the stores are {', '.join(known)}")
            known.update(told)
            return tuple(StoreAddress(name, endpoint) for name, endpoint in known.items())
        if len(told) != len(stores):
            raise ValueError(f"--advertise-store has {len(told)} endpoints without names, for {len(stores)} stores")
        return tuple(StoreAddress(store.name, item.endpoint) for store, item in zip(stores, told, strict=True))

    @model_validator(mode="after")
    def _check_advertised_stores(self) -> Self:
        if self.advertise_store and not self.store:
            raise ValueError("--advertise-store says where clients reach a store; give --store, too")
        self.advertised_stores  # noqa: B018 - raises what there is to say
        return self

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
