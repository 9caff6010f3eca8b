"""Insertion of the taps: finds a model's decoder layers and puts the ops into the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from inference_svc.taps import op
from inference_svc.taps.model.hooked_runs import CannotTapError
from inference_svc.taps.model.structure import Entry
from inference_svc.taps.points import ENTRY, FINAL_NORM, STEERABLE, WIDE_SITES
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from inference_svc.taps.model.calls import Argument
    from inference_svc.taps.model.structure import Structure
    from inference_svc.taps.model.wide_places import WideEntry
    from inference_svc.taps.points import AllPoints, RowShape, Site


PARTS = (capture_pb2.SITE_ATTN_OUT, capture_pb2.SITE_MLP_OUT)
"""The sites that are the output of a part of a layer."""

_NAMED_LISTS = 8
"""How many lists of modules a refusal names. A mixture of experts has one in each layer."""

_SUM_TOLERANCE = 0.05
"""The largest relative error that rounding to bfloat16 in every operation can cause."""


def find_decoder_layers(model: nn.Module, num_layers: int) -> dict[int, nn.Module]:
    """Return this rank's decoder layers by their index in the whole model.

    The decoder layers are the outermost `nn.ModuleList` with as many members as the configuration has layers. There
    must be exactly one; lists of the same members count once. Members of other pipeline stages are vLLM's
    `PPMissingLayer` and are left out.

    Args:
        model: The model as vLLM loaded it.
        num_layers: Decoder layers of the whole model.

    Raises:
        CannotTapError: There is no such list, or more than one.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    }
    outermost = {
        name: found for name, found in lists.items() if not any(name.startswith(f"{other}.") for other in lists)
    }
    if len({tuple(map(id, found)) for found in outermost.values()}) != 1:
        raise CannotTapError(
            f"{type(model).__name__} cannot be tapped: looked for one nn.ModuleList of {num_layers} decoder layers, "
            f"found {sorted(outermost) or _other_lists(model)}. residuum does not support this model; please report it."
        )
    layers = next(iter(outermost.values()))
    return {index: layer for index, layer in enumerate(layers) if type(layer).__name__ != "PPMissingLayer"}


def _other_lists(model: nn.Module) -> str:
    """Return the names and lengths of a model's lists of modules, for a refusal."""
    lists = [f"{name} ({len(module)})" for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    more = f" and {len(lists) - _NAMED_LISTS} more" if len(lists) > _NAMED_LISTS else ""
    return (
        f"none; its lists have other lengths: {', '.join(lists[:_NAMED_LISTS])}{more}" if lists else "no nn.ModuleList"
    )


def put_taps(
    layers: Mapping[int, nn.Module],
    points: AllPoints,
    structure: Structure,
    sites: Iterable[Site.ValueType],
    fold: Callable[[nn.Module, int], bool],
) -> int:
    """Put the ops into a model. Call it before vLLM's first run of the compiled model, which traces the graph.

    Args:
        layers: The decoder layers by index.
        points: The tap points.
        structure: The model's structure.
        sites: The sites that requests can capture. The point after each layer always gets an op, because rows are
            steered there.
        fold: Folds the tap of a point into a norm if the norm allows it. Returns whether it did.

    Returns:
        How many taps were folded into norms.

    Raises:
        CannotTapError: The model has no place for a site.
    """
    folded = 0
    for index, layer in layers.items():
        norm = structure.norms.get(index)
        if norm is not None and fold(norm, points.after(index)):
            folded += 1
        else:
            layer.register_forward_hook(_after_module(points.after(index), adds_residual=structure.adds_residual))
    for site in sites:
        if site == capture_pb2.SITE_RESID_PRE:
            _put_entry(layers, structure)
        elif site in PARTS:
            _put_parts(layers, points, structure, site)
        elif site == FINAL_NORM:
            if structure.final_norm is not None:  # only in the last pipeline stage
                point = points.of(FINAL_NORM, max(layers))
                structure.final_norm.register_forward_hook(_after_module(point, adds_residual=False))
        elif site != capture_pb2.SITE_RESID_POST:
            folded += _put_inputs(layers, points, structure, site, fold)
    return folded


def check_middles(layers: Mapping[int, nn.Module], structure: Structure) -> None:
    """Check that the stream between attention and MLP of every layer was found.

    Raises:
        CannotTapError: It was not.
    """
    _check_inputs("resid_mid", layers, structure)
    missing = sorted(set(layers) - structure.middles.keys())
    if missing:
        raise CannotTapError(
            f"resid_mid cannot be captured: looked in {type(layers[missing[0]]).__name__} for an MLP that takes what "
            f"the attention has changed, found none (layers {missing}). Leave the site out of --capture-sites."
        )


def check_middle(errors: Mapping[int, float]) -> None:
    """Check that the stream that was found is between attention and MLP; see `parts_check.middle_error`.

    Raises:
        CannotTapError: It is not.
    """
    off = [layer for layer, error in errors.items() if not _is_small(error)]
    if off:
        raise CannotTapError(
            "resid_mid cannot be captured: looked for the stream to which the attention is added, and from which the "
            f"MLP's sum starts; in layers {off} no tensor is both. The model computes attention and MLP side by side, "
            "or adds to the stream elsewhere. Leave the site out of --capture-sites."
        )


def is_middle(errors: Mapping[int, float]) -> bool:
    """Return whether the errors of `parts_check.middle_error` are those of the stream between attention and MLP."""
    return all(map(_is_small, errors.values()))


def _is_small(error: float) -> bool:
    return error < _SUM_TOLERANCE


def steering_sites(
    sites: Iterable[Site.ValueType], structure: Structure, shapes: Mapping[Site.ValueType, RowShape]
) -> list[int]:
    """Return the sites at which rows can be steered: after the layers, and those of `sites` where the model allows it.

    Args:
        sites: The sites that requests can capture.
        structure: The model's structure, with the result of `parts_check.middle_error`.
        shapes: The result of `row_shapes`. Rows that ranks divide cannot be steered.
    """
    divided = {site for site, shape in shapes.items() if shape.is_divided}
    found = {capture_pb2.SITE_RESID_POST, *STEERABLE.intersection(sites) - divided}
    if not structure.middle_moves:
        found.discard(capture_pb2.SITE_RESID_MID)
    return sorted(found)


def row_shapes(
    layers: Mapping[int, nn.Module],
    structure: Structure,
    sites: Iterable[Site.ValueType],
    shape_of: Callable[[Site.ValueType, WideEntry], RowShape | None],
) -> dict[Site.ValueType, RowShape]:
    """Return the shape of a row at each of the sites that has a width of its own. Some layers may lack the site.

    Args:
        layers: The decoder layers by index.
        structure: The model's structure.
        sites: The sites that requests can capture.
        shape_of: Returns the shape of the rows at a place, or None if it does not know how ranks share them.

    Raises:
        CannotTapError: A site was found in no layer, differs from layer to layer, or is shared by ranks in a way that
            is not known.
    """
    asked = [site for site in WIDE_SITES if site in set(sites)]
    lacking = [site for site in asked if not structure.wide[site]]
    if lacking:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers.values()}))
        has = [site for site in WIDE_SITES if structure.wide[site]]
        raise CannotTapError(
            f"{_names(lacking)} cannot be captured: looked in {kinds} for modules of the attention or the MLP that "
            f"take or return rows of this kind, found none (layers {sorted(layers)}). Leave "
            f"{'these sites' if len(lacking) > 1 else 'the site'} out of --capture-sites. Of the sites with a width of "
            f"their own, the model has {_names(has) if has else 'none'}."
        )
    shapes = {site: {shape_of(site, entry) for entry in structure.wide[site].values()} for site in asked}
    return {site: _only_shape(site, found, structure.wide[site].values()) for site, found in shapes.items()}


def _only_shape(site: Site.ValueType, found: Collection[RowShape | None], entries: Iterable[WideEntry]) -> RowShape:
    known = [shape for shape in found if shape is not None]
    if len(known) < len(found):
        kinds = ", ".join(sorted({type(entry.module).__name__ for entry in entries}))
        raise CannotTapError(
            f"{_names([site])} cannot be captured with tensor parallelism: looked for how the ranks share its rows, "
            f"found only that {kinds} takes them. Use one rank, or leave the site out of --capture-sites."
        )
    if len(known) > 1:
        shapes = " or ".join(
            f"{shape.whole}" + f" on {shape.ranks} ranks" * shape.is_divided for shape in sorted(known)
        )
        raise CannotTapError(
            f"{_names([site])} cannot be captured: its rows must have the same width in all layers, and have "
            f"{shapes} elements. Leave the site out of --capture-sites."
        )
    return known[0]


def layers_of_sites(
    layers: Mapping[int, nn.Module], structure: Structure, sites: Iterable[Site.ValueType]
) -> list[list[int]]:
    """Return the layers of this stage that have each of the sites."""
    final = [max(layers)] if structure.final_norm is not None else []
    return [final if site == FINAL_NORM else sorted(structure.wide.get(site, layers)) for site in sites]


def _names(sites: Sequence[Site.ValueType]) -> str:
    names = [capture_pb2.Site.Name(site).removeprefix("SITE_").lower() for site in sites]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def check_final_norm(model: nn.Module, structure: Structure) -> None:
    """Check that the final norm of a model was found. Call it in the last pipeline stage only.

    Raises:
        CannotTapError: It was not.
    """
    if structure.final_norm is None:
        raise CannotTapError(
            f"final_norm cannot be captured: looked in {type(model).__name__} for a norm after the last layer whose "
            "rows the model returns, found none. The model has no final norm, or changes its rows. Leave the site out "
            "of --capture-sites."
        )


def check_parts(layers: Mapping[int, nn.Module], structure: Structure) -> None:
    """Check that attention and MLP of every layer were found, and the arguments that carry the residual stream.

    Raises:
        CannotTapError: They were not found.
    """
    missing = sorted(set(layers) - (structure.attention.keys() & structure.mlp.keys()))
    if missing:
        layer = layers[missing[0]]
        raise CannotTapError(
            f"attn_out and mlp_out cannot be captured: looked in {type(layer).__name__} for an attention block and for "
            "an MLP after it, each a module of its own, "
            f"found {sorted(name for name, _ in layer.named_children())} (layers {missing}). Leave the two sites out "
            "of --capture-sites."
        )
    _check_inputs("attn_out and mlp_out", layers, structure)


def _check_inputs(sites: str, layers: Mapping[int, nn.Module], structure: Structure) -> None:
    if structure.inputs is None:
        raise CannotTapError(
            f"{sites} cannot be captured: looked for the arguments of {type(layers[min(layers)]).__name__} that carry "
            "what the layer before it returned, found none. They can be found only in a pipeline stage of two or more "
            "layers. Use fewer pipeline stages, or leave these sites out of --capture-sites."
        )


def check_sum(errors: Mapping[int, float]) -> None:
    """Check that the parts of each layer add up to what it adds to the residual stream; see `parts_check.sum_error`.

    Raises:
        CannotTapError: They do not.
    """
    off = {layer: error for layer, error in errors.items() if not error < _SUM_TOLERANCE}
    if off:
        layer, error = max(off.items(), key=lambda item: item[1] if math.isfinite(item[1]) else math.inf)
        found = f"off by {error:.0%}" if math.isfinite(error) else "not finite"
        raise CannotTapError(
            "attn_out and mlp_out cannot be captured: looked for two modules whose outputs, added to the residual "
            f"stream before a layer, give the stream after it; in layer {layer} the sums are {found}. The model "
            "scales or merges them. Leave the two sites out of --capture-sites."
        )


def _put_entry(layers: Mapping[int, nn.Module], structure: Structure) -> None:
    _check_inputs("resid_pre", layers, structure)
    assert structure.inputs is not None  # noqa: S101 - just checked
    hidden, residual = structure.inputs

    first = layers[min(layers)]
    first.register_forward_pre_hook(_before_module(Entry(first, hidden, residual), ENTRY), with_kwargs=True)


def _put_parts(layers: Mapping[int, nn.Module], points: AllPoints, structure: Structure, site: Site.ValueType) -> None:
    check_parts(layers, structure)
    found = structure.attention if site == capture_pb2.SITE_ATTN_OUT else structure.mlp
    for index in layers:
        part, point = found[index], points.of(site, index)
        if part in structure.written:
            part.register_forward_hook(_after_writing(point, structure.written[part]), with_kwargs=True)
        else:
            part.register_forward_hook(_after_module(point, adds_residual=False))


def _put_inputs(
    layers: Mapping[int, nn.Module],
    points: AllPoints,
    structure: Structure,
    site: Site.ValueType,
    fold: Callable[[nn.Module, int], bool],
) -> int:
    """Put the ops of a site that is not a part's output, and return how many were folded into norms."""
    if site in WIDE_SITES:
        for index, wide in structure.wide[site].items():
            _put_wide(wide, points.of(site, index), steerable=site in STEERABLE)
        return 0
    name, found = {
        capture_pb2.SITE_ATTN_IN: ("attn_in", structure.attention_inputs),
        capture_pb2.SITE_MLP_IN: ("mlp_in", structure.mlp_inputs),
        capture_pb2.SITE_RESID_MID: ("resid_mid", structure.middles),
    }[site]
    missing = sorted(set(layers) - found.keys())
    if missing:
        raise CannotTapError(
            f"{name} cannot be captured: looked in {type(layers[missing[0]]).__name__} for an attention block and an "
            f"MLP after it that take one row for each token and are called once, found none (layers {missing}). Leave "
            "the site out of --capture-sites."
        )
    folded = 0
    for index in layers:
        entry, point = found[index], points.of(site, index)
        if site == capture_pb2.SITE_RESID_MID and entry.residual is not None and fold(entry.module, point):
            folded += 1
        else:
            entry.module.register_forward_pre_hook(_before_module(entry, point), with_kwargs=True)
    return folded


def _put_wide(wide: WideEntry, point: int, *, steerable: bool) -> None:
    if wide.tap is not None:
        wide.tap(point)
        return
    if wide.first is not None:
        wide.module.register_forward_hook(_after_columns(wide.first, wide.width, point))
        return
    if wide.hidden is None:
        wide.module.register_forward_hook(_after_module(point, adds_residual=False))
        return
    hook = _before_module(Entry(wide.module, wide.hidden), point) if steerable else _copying(wide.hidden, point)
    wide.module.register_forward_pre_hook(hook, with_kwargs=True)


def _before_module(entry: Entry, point: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        _tap(entry.hidden.of(args, kwargs), entry.residual.of(args, kwargs) if entry.residual else None, point)

    return hook


def _copying(hidden: Argument, point: int) -> Any:
    """Return a hook that replaces an argument by the copy that `op.call_copy` returns."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        rows = hidden.of(args, kwargs)
        return hidden.replaced(args, kwargs, op.call_copy(_rows(rows), point).view(rows.shape))

    return hook


def _after_writing(point: int, written: Argument) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: None) -> None:
        del module, output
        _tap(written.of(args, kwargs), None, point)

    return hook


def _after_module(point: int, *, adds_residual: bool) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        del module, arguments
        if isinstance(output, Tensor):
            _tap(output, None, point)
        else:
            _tap(output[0], output[1] if adds_residual and len(output) > 1 else None, point)

    return hook


def _after_columns(first: int, width: int, point: int) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        del module, arguments
        op.call_columns(output if isinstance(output, Tensor) else output[0], first, width, point)

    return hook


def _tap(hidden: Tensor, residual: Tensor | None, point: int) -> None:
    op.call(_rows(hidden), _rows(residual) if residual is not None else None, point)


def _rows(stream: Tensor) -> Tensor:
    """View [1, tokens, hidden], the form in models from transformers, as [tokens, hidden]. Copies nothing."""
    return stream if stream.dim() == 2 else stream.view(-1, stream.shape[-1])  # noqa: PLR2004 - [tokens, hidden]
