"""The independent reference: transformers in float32, with the residual stream of every decoder layer and site."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn

from bench.conformance.architectures import Architecture
from bench.conformance.heads import WEIGHTS, Heads, record_heads
from bench.conformance.models import ONE_AT_A_TIME
from bench.conformance.routing import Routing

Rows = npt.NDArray[np.float32]
Change = Callable[[Tensor], Tensor]
"""Returns changed rows, [positions, width]. Row p belongs to position p."""
Changes = Mapping[Any, Change]
"""Changes by layer, of the layer's output; or by site and layer, of the rows at a site."""


_OF_EXPERTS = ("router_logits", "routing_weights")
_OF_ALL = ("q", "k", "v", "z", "mlp_act", "q_pre", "k_pre")
WIDE_SITES = (*_OF_ALL, *_OF_EXPERTS)
"""The sites whose rows have a width of their own: queries, keys, values, what the output projections of attention and
MLP take, queries and keys as their projection returns them; in a mixture of experts, the logits of the router, and the
weights of the experts that it chose."""
SITES = ("resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post", *_OF_ALL)
"""The sites of a layer: the residual stream that enters it, what the attention block takes and adds, the stream after
that, what the MLP takes and adds, the stream that leaves the layer, and those with a width of their own."""
FINAL_NORM = "final_norm"
"""The site after the model's final norm, in the last layer."""
ALL_SITES = (*SITES, *_OF_EXPERTS, FINAL_NORM)
"""With the sites that only a mixture of experts has, and the one that only the last layer has."""

_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba", "conv")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "fc1")
"""The paths of the modules that compute the parts: the first of them that a layer has."""
_PROJECTIONS = {
    "z": ("o_proj", "out_proj", "dense", "c_proj", "wo", "wqkv_out", "attn_out"),
    "mlp_act": ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "fc_out", "proj_out", "w2", "output_linear"),
}
"""The names of the output projections within these modules."""
_QUERIES, _KEYS, _JOINT = ("q_proj",), ("k_proj",), ("c_attn", "qkv_proj")
"""The names of the projections of queries and keys within the attention, and of those that return both and values. In
the joint projections of other models, the heads' queries, keys and values follow each other head by head."""
_ROUTERS = ("gate", "router", "gate.wg", "router.layer")
"""The names of the routers within the MLP. A router has a weight for each expert, and may have a bias."""

_LAYER_LISTS = ("model.layers", "model.decoder.layers", "transformer.h", "gpt_neox.layers", "backbone.layers")
"""The paths of the list of decoder layers in transformers' models."""


class Reference:
    """Runs a model with transformers, can steer its decoder layers, and keeps its rows."""

    def __init__(self, architecture: Architecture, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Load the model from its folder."""
        self.widths: Mapping[str, int] = {}
        """The elements of a row at sites, as the service has them. Parts with other rows are not such a site: a state
        space, for example, has an output projection as an attention does."""
        transformers.utils.logging.disable_progress_bar()
        # Eager is transformers' only attention with every special feature, such as soft caps.
        with ONE_AT_A_TIME:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", **architecture.reference
            ).eval()
        self.weights: dict[int, Rows] = {}
        """Attention weights of the last run by layer, float32 [heads, positions, positions]. Some models have none."""
        self._changes: Changes = {}
        self._routing: Routing | None = None
        self._layers = decoder_layers(self.model)
        self._kept = self._nothing()
        self._body = self.model.get_submodule(_path(self.model).rpartition(".")[0])
        for index, layer in enumerate(self._layers):
            self._hook(architecture, index, layer)

    def rows(
        self, token_ids: Sequence[int], changes: Changes | None = None, routing: Routing | None = None
    ) -> dict[str, Rows]:
        """Run the model over a sequence.

        Args:
            token_ids: Prompt and reply.
            changes: The change of the rows after a layer, by layer; or of those at a site, by site and layer.
            routing: Records and changes the choices of experts; None to leave them as they are.

        Returns:
            For each site, float32 [layers, positions, width]. A part that a layer does not have has zeros. Rows of
            sites that have a width of their own, and of the final norm, are NaN in layers that do not have the site;
            sites that no layer has, or that have several widths, are left out.
        """
        self._routing = routing
        with routing or nullcontext():
            self.run(token_ids, changes)
        self._routing = None
        like = self._kept["resid_post"][0]
        assert like is not None  # noqa: S101 - the model has just been run
        kept = {
            site: _stacked(self._of_width(site, rows), None if site in {FINAL_NORM, *WIDE_SITES} else like)
            for site, rows in self._kept.items()
        }
        return {site: rows for site, rows in kept.items() if rows is not None}

    def run(self, token_ids: Sequence[int], changes: Changes | None = None) -> Tensor:
        """Run the model over a sequence; return the output of its final norm, [positions, hidden]."""
        self._kept = self._nothing()
        with torch.inference_mode(), self._changing(changes or {}):
            output = self._body(torch.tensor([[int(token) for token in token_ids]]), use_cache=False)
            last: Tensor = output.last_hidden_state[0]
            self._keep(FINAL_NORM, len(self._layers) - 1, last)
            return last

    def logprobs(self, rows: Rows) -> Rows:
        """Return the log-probabilities of the next token that follow from the rows after the last layer.

        Args:
            rows: [positions, hidden].

        Returns:
            [positions, vocabulary].
        """
        stream = torch.from_numpy(rows)
        self._kept = self._nothing()
        with torch.inference_mode(), self._changing({len(self._layers) - 1: lambda _: stream}):
            # The token IDs do not matter: the rows replace what the layers make of them.
            logits = self.model(torch.ones(1, len(rows), dtype=torch.long), use_cache=False).logits[0]
            logprobs: Rows = logits.float().log_softmax(-1).numpy()
            return logprobs

    @contextmanager
    def _changing(self, changes: Changes) -> Iterator[None]:
        self._changes = changes
        try:
            yield
        finally:
            self._changes = {}

    def _hook(self, architecture: Architecture, index: int, layer: nn.Module) -> None:
        scale = float(getattr(layer, architecture.residual_scale)) if architecture.residual_scale else 1.0
        layer.register_forward_pre_hook(self._enter(index), with_kwargs=True)
        for site, names in {"attn_in": _ATTENTION, "mlp_in": architecture.mlp_in or _MLP}.items():
            for part in _first(layer, names):
                part.register_forward_pre_hook(self._before(site, index), with_kwargs=True)
        for attention in _first(layer, _ATTENTION):
            record_heads(attention, self._heads(index))
            self._hook_projections(index, attention)
        for site, parts in {"z": _ATTENTION, "mlp_act": architecture.mlp_in or _MLP}.items():
            for part in _first(layer, parts):
                for projection in _first(layer if part is getattr(layer, "fc1", None) else part, _PROJECTIONS[site]):
                    projection.register_forward_pre_hook(self._before(site, index), with_kwargs=True)
        self._hook_inputs(architecture, index, layer)
        for site, names in {"attn_out": architecture.attention, "mlp_out": architecture.mlp}.items():
            for part in _first(layer, names):
                has_middle = bool(_first(layer, architecture.middle))
                part.register_forward_hook(self._part(site, index, scale, has_middle=has_middle))
        layer.register_forward_hook(self._leave(index))

    def _hook_projections(self, index: int, attention: nn.Module) -> None:
        for site, names in {"q_pre": _QUERIES, "k_pre": _KEYS}.items():
            for projection in _first(attention, names):
                projection.register_forward_hook(self._after(site, index))
        for projection in _first(attention, _JOINT):
            projection.register_forward_hook(self._split(index))

    def _hook_inputs(self, architecture: Architecture, index: int, layer: nn.Module) -> None:
        for router in _routers(_first(layer, architecture.mlp_in or _MLP)):
            router.register_forward_pre_hook(self._route(index), with_kwargs=True)
            router.register_forward_hook(self._score(index))
        for part in _first(layer, architecture.mlp_in or _MLP):
            for experts in _first(part, ["experts"]):
                experts.register_forward_pre_hook(self._choose(index))
        for part in _first(layer, architecture.middle):
            part.register_forward_pre_hook(self._before("resid_mid", index), with_kwargs=True)

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            del module
            if self._routing is not None:
                self._routing.enter(index)
            self._keep("resid_pre", index, arguments[0] if arguments else options["hidden_states"])

        return hook

    def _before(self, site: str, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            del module
            taken = arguments[0] if arguments else options["hidden_states"]
            self._change(site, index, taken)
            self._keep(site, index, taken)

        return hook

    def _after(self, site: str, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object, output: Tensor) -> None:
            del module, arguments
            self._keep(site, index, output)

        return hook

    def _split(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object, output: Tensor) -> None:
            del module, arguments
            widths = [self.widths[site] for site in ("q_pre", "k_pre") if site in self.widths]
            if len(widths) > 1:
                queries, keys, _ = output.split([*widths, output.shape[-1] - sum(widths)], dim=-1)
                self._keep("q_pre", index, queries)
                self._keep("k_pre", index, keys)

        return hook

    def _route(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            taken = arguments[0] if arguments else options["hidden_states"]
            bias = getattr(module, "bias", None)
            logits = nn.functional.linear(taken, module.weight.to(taken.dtype), bias)
            self._keep("router_logits", index, logits)

        return hook

    def _choose(self, index: int) -> Callable[..., None]:
        """Return a hook that keeps the chosen experts, which the module of the experts takes."""

        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if len(arguments) > 1:
                _, experts, weights = arguments
                rows = torch.zeros(len(weights), module.num_experts, dtype=weights.dtype)
                self._keep("routing_weights", index, rows.scatter(1, experts, weights))

        return hook

    def _score(self, index: int) -> Callable[..., None]:
        """Return a hook that keeps them where each expert takes all rows, multiplied with its weight: in Llama 4."""

        def hook(module: nn.Module, arguments: object, output: Tensor | tuple[Tensor, ...]) -> None:
            del arguments
            if type(module).__name__ == "Llama4Router":
                self._keep("routing_weights", index, output[0])

        return hook

    def _change(self, site: str, index: int, rows: Tensor, scale: float = 1.0) -> None:
        """Change rows in place, so that all who read the tensor see it."""
        if (site, index) in self._changes:
            flat = rows.view(-1, rows.shape[-1])
            flat.copy_(self._changes[site, index](scale * flat.float()) / scale)

    def _change_middle(self, index: int, attention: Tensor, scale: float) -> None:
        """Change the stream between attention and MLP, which no module takes by itself, with the attention's output."""
        if ("resid_mid", index) in self._changes:
            before = self._kept["resid_pre"][index]
            assert before is not None  # noqa: S101 - a layer is entered before its attention
            rows = attention.view(-1, attention.shape[-1])
            middle = before.float() + scale * rows.float()
            changed = self._changes["resid_mid", index](middle)
            rows += (changed - middle) / scale
            self._keep("resid_mid", index, changed)

    def _heads(self, index: int) -> Callable[[Heads], None]:
        def record(heads: Heads) -> None:
            for name, rows in heads.items():
                if name == WEIGHTS:
                    self.weights[index] = rows.float().numpy()
                else:
                    self._keep(name, index, rows)

        return record

    def _part(self, site: str, index: int, scale: float, *, has_middle: bool) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object, output: Tensor | tuple[Tensor, ...]) -> None:
            del module, arguments
            rows = output if isinstance(output, Tensor) else output[0]
            self._change(site, index, rows, scale)
            self._keep(site, index, scale * rows)
            if site == "attn_out" and not has_middle:
                self._change_middle(index, rows, scale)

        return hook

    def _leave(self, index: int) -> Callable[..., object]:
        def hook(module: nn.Module, arguments: object, output: Tensor | tuple[Tensor, ...]) -> object:
            del module, arguments
            hidden = output if isinstance(output, Tensor) else output[0]
            change = self._changes.get(index) or self._changes.get(("resid_post", index))
            if change is not None:
                hidden = change(hidden[0].float()).to(hidden.dtype)[None]
            self._keep("resid_post", index, hidden)
            before, attention = (self._kept[site][index] for site in ("resid_pre", "attn_out"))
            if self._kept["resid_mid"][index] is None and before is not None and attention is not None:
                self._keep("resid_mid", index, before + attention)
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return hook

    def _of_width(self, site: str, rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        width = self.widths.get(site)
        return [row if row is None or width in {None, row.shape[-1]} else None for row in rows]

    def _nothing(self) -> dict[str, list[Tensor | None]]:
        return {site: [None] * len(self._layers) for site in ALL_SITES}

    def _keep(self, site: str, index: int, rows: Tensor) -> None:
        self._kept[site][index] = rows.reshape(-1, rows.shape[-1]).clone()  # some parts have no batch dimension


def _stacked(rows: Sequence[Tensor | None], like: Tensor | None) -> Rows | None:
    """Return the rows of all layers, with zeros like a tensor for those that are not there, or with NaN without one.

    None if no layer has rows, or their widths differ.
    """
    found = [row for row in rows if row is not None] or ([like] if like is not None else [])
    if len({row.shape for row in found}) != 1:
        return None
    empty = torch.zeros_like(found[0]) if like is not None else torch.full_like(found[0].float(), torch.nan)
    stacked: Rows = torch.stack([(empty if row is None else row).float() for row in rows]).numpy()
    return stacked


def _first(layer: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Return the first of some submodules that a layer has; empty if it has none."""
    modules = dict(layer.named_modules())
    return [modules[path] for path in paths if path in modules][:1]


def _routers(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the routers of MLPs: modules of such a name that have a weight for each expert."""
    named = [module for part in parts for path in _ROUTERS for module in _first(part, [path])]
    weights = [getattr(module, "weight", None) for module in named]
    return [
        module for module, weight in zip(named, weights, strict=True) if isinstance(weight, Tensor) and weight.ndim > 1
    ]


def adding(push: Rows, start: int = 0, stop: int | None = None) -> Change:
    """Return the change that adds a vector, [hidden], to the rows at the positions from `start` to before `stop`."""
    vector = torch.from_numpy(push)

    def added(rows: Tensor) -> Tensor:
        changed = rows.clone()
        changed[start:stop] += vector
        return changed

    return added


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a transformers model."""
    return list(model.get_submodule(_path(model)).children())


def _path(model: nn.Module) -> str:
    """Return the path of the list of decoder layers."""
    modules = dict(model.named_modules())
    path = next((path for path in _LAYER_LISTS if path in modules), None)
    if path is None:
        raise LookupError(f"{type(model).__name__} has decoder layers at none of {', '.join(_LAYER_LISTS)}")
    return path
