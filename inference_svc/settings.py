"""The settings of the inference service. Each is a flag, an environment variable and a key of the settings file."""

from __future__ import annotations

from collections.abc import Iterable
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode
from typing_extensions import Self

from inference_svc.tap_settings import Stores, TapSettings, split_list
from residuum.wire.limits import MAX_ID_LENGTH
from residuum.wire.placement import StoreAddress, parse_stores
from svc_common.security.tls import SecureSettings
from svc_common.settings import BadSettingsError, Endpoint, OptionalEndpoint

_RESERVED_ENGINE_ARGS = {"model", "worker_cls", "additional_config", "speculative_config"}
"""Engine arguments that the taps depend on."""


def _engine_args(value: dict[str, Any]) -> dict[str, Any]:
    refused = _RESERVED_ENGINE_ARGS & value.keys()
    if refused:
        raise ValueError(f"{', '.join(sorted(refused))} cannot be set here: the taps depend on it. Leave it out.")
    return value


def parse_modules(texts: Iterable[str]) -> dict[str, str]:
    """Return where each LoRA adapter is, by its name.

    Raises:
        ValueError: A text is not name=place, a name is too long, or two adapters have the same name.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, place = (part.strip() for part in text.partition("="))
        if not name or not place or len(name) > MAX_ID_LENGTH:
            raise ValueError(
                f"{text!r} is not name=folder. Give each adapter a name of at most {MAX_ID_LENGTH} characters and a "
                "folder, as in joy=/adapters/joy"
            )
        if name in found:
            raise ValueError(f"two adapters are named {name!r}. Give each its own name")
        found[name] = expanduser(place)  # noqa: PTH111 - a Path would drop "./", which marks a folder
    return found


def _modules(texts: tuple[str, ...]) -> tuple[str, ...]:
    parse_modules(texts)
    return texts


LoraModules = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_modules)]
"""LoRA adapters, each as name=folder."""


class InferenceSettings(SecureSettings, TapSettings):
    """Serve a language model with vLLM, and capture and steer its activations, over gRPC."""

    model: Annotated[str, AfterValidator(expanduser)] = Field(min_length=1)
    """The model: a folder with configuration, weights and tokenizer, or a name on the Hugging Face hub."""
    listen: Endpoint = "127.0.0.1:50051"
    """host:port to serve on. Port 0 takes any free port; see port-file."""
    metrics: OptionalEndpoint = ""
    """host:port to serve Prometheus metrics on, at http://host:port/metrics. Default: no metrics."""
    served_model_name: str = ""
    """The model name that clients see. Default: the last part of model."""
    advertise_store: Stores = ()
    """host:port at which clients reach the store, if it differs from store. For several stores, give one for each in
    the same order, or only those that differ, as name=host:port."""
    lora_modules: LoraModules = ()
    """LoRA adapters in PEFT's format, as name=folder or name=name on the Hugging Face hub, separated by commas. A
    request chooses one by its name. All of them fit into one batch, unless engine-args sets a smaller max_loras."""
    port_file: str = ""
    """A file to write the port to, once it is known."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The dtype of the model and of raw rows."""
    enforce_eager: bool = False
    """Run the model without compiling it: starts sooner, generates more slowly."""
    max_model_len: int = Field(default=0, ge=0)
    """Most tokens in prompt and reply together. 0: the model's own limit."""
    max_num_seqs: int = Field(default=64, ge=1, le=1024)
    """Most requests that run at once; others wait. Capture blocks take device memory: on a GPU (2 *
    max-num-batched-tokens + 96 * max-num-seqs) * layers * sites * hidden size * bytes per element, on a CPU
    (max-num-batched-tokens + 64 * max-num-seqs) * the same. With the defaults, a model of 8 billion parameters on a GPU
    takes 2.5 GiB per site. See docs/operations/sizing.md."""
    max_num_batched_tokens: int = Field(default=2048, ge=32)
    """Most tokens that one step computes. The memory of capture blocks grows with it; see max-num-seqs."""
    kv_cache_gib: float = Field(default=0.0, ge=0.0)
    """Memory of the KV cache in GiB. 0: vLLM decides on a GPU; 2 GiB on a CPU."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of devices that each layer is split over."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Number of stages that the layers are divided into."""
    seed: int = Field(default=0, ge=0)
    """vLLM's random seed."""
    engine_args: Annotated[dict[str, Any], AfterValidator(_engine_args)] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, as a JSON object. It must not set model, worker_cls,
    additional_config or speculative_config: the taps depend on them."""

    sae_mib: int = Field(default=0, ge=0)
    """Device memory for the encoders of sparse autoencoders and the matrices of lenses, in MiB. An encoder takes 4 or 2
    bytes * features * width of a row; a matrix 4 or 2 bytes * width * width. The KV cache leaves this room free, and
    128 MiB more to compute features. 0: neither autoencoders nor lenses."""
    max_registrations: int = Field(default=10_000, ge=1)
    """Most registrations that may wait for their Generate call."""
    max_registration_mib: int = Field(default=64, ge=1)
    """Memory for waiting registrations, in MiB of their messages."""
    max_requests: int = Field(default=1024, ge=1, le=65_536)
    """Most requests that may run or wait at once. The service refuses more."""
    first_message_seconds: float = Field(default=20.0, gt=0)
    """The service ends a call that has sent no message for this long."""
    stall_seconds: float = Field(default=600.0, gt=0)
    """The service ends a stream whose caller has not read sent data for this long, and the request with it. Waiting for
    tokens is not limited."""
    registration_seconds: float = Field(default=600.0, gt=0)
    """How long an unused registration lasts."""
    grace_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM. The service then aborts them."""

    @property
    def visible_name(self) -> str:
        """The model name that clients see."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def adapters(self) -> dict[str, str]:
        """Where each LoRA adapter is, by its name: a folder, or a name on the Hugging Face hub."""
        return parse_modules(self.lora_modules)

    @model_validator(mode="after")
    def _check_adapter_names(self) -> Self:
        if self.visible_name in self.adapters:
            raise ValueError(
                f"--lora-modules has an adapter {self.visible_name!r}, which is the name of the model. Choose another "
                "name for one of them; --served-model-name names the model."
            )
        return self

    def check_folders(self) -> None:
        """Check that the folders of the model and of the adapters exist.

        vLLM would take the path of another one for a name on the Hugging Face hub, and fail half a minute later for
        that reason.
        """
        _check_folder("--model (RESIDUUM_MODEL)", self.model)
        for place in self.adapters.values():
            _check_folder("--lora-modules (RESIDUUM_LORA_MODULES)", place)

    @property
    def advertised_stores(self) -> tuple[StoreAddress, ...]:
        """The stores at the addresses where clients reach them, in the order of `stores`.

        Raises:
            ValueError: `advertise_store` does not match the stores.
        """
        stores, advertised = self.stores, parse_stores(self.advertise_store)
        if not advertised:
            return stores
        if any("=" in text for text in self.advertise_store):
            known = {store.name: store.endpoint for store in stores}
            unknown = [store.name for store in advertised if store.name not in known]
            if unknown:
                raise ValueError(
                    f"--advertise-store names {', '.join(unknown)}, which --store does not have. Choose among its "
                    f"stores: {', '.join(known)}"
                )
            known.update(advertised)
            return tuple(StoreAddress(name, endpoint) for name, endpoint in known.items())
        if len(advertised) != len(stores):
            raise ValueError(
                f"--advertise-store has {len(advertised)} endpoints without names, but there are {len(stores)} stores. "
                "Give one for each store, or name those that differ: name=host:port"
            )
        return tuple(StoreAddress(store.name, item.endpoint) for store, item in zip(stores, advertised, strict=True))

    @model_validator(mode="after")
    def _check_advertised_stores(self) -> Self:
        if self.advertise_store and not self.store:
            raise ValueError("--advertise-store says where clients reach a store, but there is no store. Give --store.")
        self.advertised_stores  # noqa: B018 - raises ValueError if the setting does not match the stores
        return self


def _check_folder(setting: str, place: str) -> None:
    if place.startswith(("/", "./", "../", "~")) and not Path(place).is_dir():
        raise BadSettingsError(
            f"  {setting}: there is no folder {place!r}. Give the path of an existing folder, or a name on the Hugging "
            "Face hub."
        )
