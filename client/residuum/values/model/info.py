"""The model that a server serves."""

from __future__ import annotations

import dataclasses
import datetime
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from residuum.exceptions import InvalidRequest, UnknownSite
from residuum.v1 import inference_pb2
from residuum.values.captures.capture import REDUCTIONS
from residuum.values.captures.manifest_names import site_name, to_datetime
from residuum.values.model.attention import AttentionLayer
from residuum.values.steering.gates import MEASURE_NAMES
from residuum.values.tensors.vector import Vector
from residuum.wire.dtypes import dtype_name
from residuum.wire.rows.encodings import ENCODING_NAMES, RAW


@dataclass(frozen=True)
class ServiceLoad:
    """What a server does at the moment, and what it has done since it started. At most about a second old.

    Attributes:
        running_requests: Requests that generate, or wait to generate.
        open_captures: Captures that are open: the store has not sealed them.
        ring_used_bytes: Bytes of the rings that are filled; `ModelInfo.limits["ring_bytes"]` is the size of the rings.
        ring_wait_seconds: Seconds that the engine's workers waited for room in a ring, since the start.
        ring_losses: Losses since the start: rows that a full ring shed, or that failed.
        prompt_tokens: Prompt tokens of requests that started, since the start.
        generated_tokens: Tokens generated and sent to clients, since the start.
        acknowledged_bytes: Bytes of rows that the stores have acknowledged, since the start.
    """

    running_requests: int
    open_captures: int
    ring_used_bytes: int
    ring_wait_seconds: float
    ring_losses: int
    prompt_tokens: int
    generated_tokens: int
    acknowledged_bytes: int

    @classmethod
    def from_proto(cls, proto: inference_pb2.ServiceLoad) -> ServiceLoad:
        """Return the value of a message."""
        return cls(**{item.name: getattr(proto, item.name) for item in proto.DESCRIPTOR.fields if item.name in _LOAD})


@dataclass(frozen=True)
class ModelInfo:
    """The model that a server serves, with the server's limits.

    Attributes:
        model: The model's name.
        num_layers: Number of decoder layers; they are numbered from 0.
        hidden_size: Elements of a row of the residual stream, and of a steering vector.
        dtype: The element type in which the model computes rows, such as "bfloat16".
        sites: The capture sites that the server was started with.
        steering_operations: The steering operations that the server knows.
        max_model_len: The most tokens of a prompt and its reply together.
        limits: All limits by their contract names.
        store_endpoints: The addresses at which clients reach the stores; empty if the server captures nothing.
        stores: The same addresses by the stores' names.
        tensor_parallel_size: Tensor parallel ranks.
        pipeline_parallel_size: Pipeline parallel stages.
        eager: Whether the model runs without compiled graphs.
        vllm_version: The version of vLLM.
        server_version: The version of the server.
        server_time: The server's clock when it answered; None if the server is older than this field.
        encodings: The encodings that a capture may request.
        default_encoding: The encoding of captures that request none.
        reductions: The reductions that a capture may request.
        adapters: The LoRA adapters that requests may choose with `model=`.
        site_widths: Elements of a row at each of `sites`, by name.
        site_layers: The layers that have each of `sites`, by name. Most models have all sites in all layers; one with
            state spaces in some layers, for example, has "q" only in the others.
        steering_sites: The sites at which rows can be steered. Empty: the server is older than this field, and steers
            only at "resid_post".
        gate_measures: What the gate of a steering operation may measure. Empty: the server is older than this field,
            and has no gates.
        probe_sites: The sites at which probes can read rows; `limits["max_probe_outputs"]` says how many outputs the
            probes of a request may have, each counted once for each place. Empty: the server is older than this field,
            and has no probes.
        operator_rules: The names of the operator's rules that apply to your requests.
        attention: What determines the attention weights of each layer; empty if the server does not say.
        load: What the server does at the moment; None if you are not an admin, or the server is older than this field.
        store_reachable: Whether all stores answer the inference service; None without stores, or without a check
            (`check_store`).
        store_detail: Where the inference service looked for its stores, and what they answered.
    """

    model: str
    num_layers: int
    hidden_size: int
    dtype: str
    sites: tuple[str, ...]
    steering_operations: tuple[str, ...]
    max_model_len: int
    limits: dict[str, int]
    store_endpoints: tuple[str, ...]
    stores: dict[str, str]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    eager: bool
    vllm_version: str
    server_version: str
    server_time: datetime.datetime | None = None
    encodings: tuple[str, ...] = ("raw",)
    default_encoding: str = "raw"
    reductions: tuple[str, ...] = ("none",)
    adapters: tuple[str, ...] = ()
    site_widths: dict[str, int] = field(default_factory=dict)
    site_layers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steering_sites: tuple[str, ...] = ()
    gate_measures: tuple[str, ...] = ()
    probe_sites: tuple[str, ...] = ()
    operator_rules: tuple[str, ...] = ()
    attention: tuple[AttentionLayer, ...] = ()
    load: ServiceLoad | None = None
    store_reachable: bool | None = None
    store_detail: str = ""

    @classmethod
    def from_proto(cls, proto: inference_pb2.GetModelInfoResponse) -> ModelInfo:
        """Return the value of a message."""
        checks = proto.store_checks or ([proto.store_check] if proto.HasField("store_check") else [])
        return cls(
            model=proto.model,
            num_layers=proto.num_layers,
            hidden_size=proto.hidden_size,
            dtype=dtype_name(proto.dtype),
            sites=tuple(site_name(site) for site in proto.sites),
            site_widths=dict(
                zip(
                    map(site_name, proto.sites),
                    proto.site_widths or [proto.hidden_size] * len(proto.sites),
                    strict=True,
                )
            ),
            site_layers={
                site_name(site): tuple(
                    proto.site_layers[index].layers if proto.site_layers else range(proto.num_layers)
                )
                for index, site in enumerate(proto.sites)
            },
            steering_sites=tuple(site_name(site) for site in proto.steering_sites),
            gate_measures=tuple(MEASURE_NAMES[number] for number in proto.gate_measures if number in MEASURE_NAMES),
            probe_sites=tuple(site_name(site) for site in proto.probe_sites),
            operator_rules=tuple(proto.operator_rules),
            attention=tuple(map(AttentionLayer.from_proto, proto.attention)),
            steering_operations=tuple(proto.steering_operations),
            max_model_len=proto.limits.max_model_len,
            limits={item.name: getattr(proto.limits, item.name) for item in proto.limits.DESCRIPTOR.fields},
            store_endpoints=tuple(proto.store_endpoints),
            stores={store.name: store.endpoint for store in proto.stores}
            or {endpoint: endpoint for endpoint in proto.store_endpoints},
            tensor_parallel_size=proto.layout.tensor_parallel_size,
            pipeline_parallel_size=proto.layout.pipeline_parallel_size,
            eager=proto.eager,
            vllm_version=proto.vllm_version,
            server_version=proto.server_version,
            server_time=to_datetime(proto.server_time),
            encodings=tuple(ENCODING_NAMES[number] for number in proto.encodings if number in ENCODING_NAMES),
            default_encoding=ENCODING_NAMES.get(proto.default_encoding or RAW, "unknown"),
            reductions=tuple(name for name, number in REDUCTIONS.items() if number in proto.reductions) or ("none",),
            adapters=tuple(proto.adapters),
            load=ServiceLoad.from_proto(proto.load) if proto.HasField("load") else None,
            store_reachable=not any(check.HasField("error") for check in checks) if checks else None,
            store_detail="; ".join(map(_store_detail, checks)),
        )

    @property
    def num_heads(self) -> int:
        """Query heads of the layers that have attention; 0 if they are unknown, or differ from layer to layer."""
        found = {layer.num_heads for layer in self.attention if layer.num_heads}
        return found.pop() if len(found) == 1 else 0

    def mask(self, site: str, indices: Iterable[int], factor: float = 0.0) -> Vector:
        """Return a vector for `Multiply` that scales some attention heads or neurons and keeps the others.

        Args:
            site: "z", whose parts are the attention's heads, or "mlp_act", whose elements are the MLP's neurons.
            indices: The heads or neurons, counted from 0.
            factor: What they are multiplied by. The default removes them.

        Raises:
            UnknownSite: The site is another one, or the server was started without it.
            InvalidRequest: There is no such head or neuron, or the number of heads is unknown.

        Example:
            >>> info = client.info()
            >>> residuum.Multiply(info.mask("z", [3, 7]), layer=12, site="z")
            >>> residuum.Multiply(info.mask("mlp_act", [1024], factor=3.0), layer=12, site="mlp_act")
        """
        has_parts = site in {"z", "mlp_act"}
        if not has_parts or site not in self.steering_sites:
            problem = f"the server must be started with --capture-sites {site}"
            if not has_parts:
                problem = "there are masks for z and mlp_act only"
            raise UnknownSite(
                f"There is no mask for {site}: {problem}. This server steers at "
                f"{', '.join(self.steering_sites) or 'resid_post'}.",
                reason="UNKNOWN_SITE",
            )
        width = self.site_widths[site]
        kind, count = ("head", self.num_heads) if site == "z" else ("neuron", width)
        if not count or width % count:
            raise InvalidRequest("The server does not say how many heads the model has.", reason="INVALID_FIELD")
        chosen = [operator.index(index) for index in indices]
        wrong = [index for index in chosen if not 0 <= index < count]
        if wrong:
            raise InvalidRequest(
                f"There is no {kind} {wrong[0]}: the model has {count}, 0 to {count - 1}.", reason="INVALID_FIELD"
            )
        parts = np.ones((count, width // count), dtype=np.float32)
        parts[chosen] = factor
        return Vector(parts.reshape(-1))


def _store_detail(check: inference_pb2.StoreCheck) -> str:
    if check.HasField("error"):
        return check.error.message
    name = f"at {check.endpoint}" if check.store in {"", check.endpoint} else f"{check.store} ({check.endpoint})"
    return f"the store {name}, version {check.server_version}, answers it"


_LOAD = {item.name for item in dataclasses.fields(ServiceLoad)}
"""The fields that this version knows."""
