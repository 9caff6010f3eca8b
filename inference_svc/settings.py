"""The settings of the inference service: flags, environment and file from one declaration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from inference_svc.engine.tap_settings import Stores, TapSettings
from residuum.wire.placement import StoreAddress, parse_stores
from svc_common.security import SecureSettings
from svc_common.settings import Endpoint, OptionalEndpoint

_TAPS_OWN = {"model", "worker_cls", "additional_config", "speculative_config"}
"""Engine arguments that the taps depend on."""


def _engine_args(value: dict[str, Any]) -> dict[str, Any]:
    refused = _TAPS_OWN & value.keys()
    if refused:
        raise ValueError(f"{', '.join(sorted(refused))} cannot be set here: the taps depend on it")
    return value


class InferenceSettings(SecureSettings, TapSettings):
    """Serve a language model with vLLM; capture its activations and steer it, over gRPC."""

    model: str = Field(min_length=1)
    """The model: a folder with config, weights and tokenizer, or a name on the Hugging Face hub."""
    listen: Endpoint = "127.0.0.1:50051"
    """host:port to serve on. Port 0 takes any free one; see port-file."""
    metrics: OptionalEndpoint = ""
    """host:port to show figures for Prometheus on: http://host:port/metrics. Default: nowhere."""
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
    max-num-seqs) * ... on a CPU: at the defaults 2.5 GiB a site for 8 B parameters on a GPU. See
    docs/operations/sizing.md."""
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
