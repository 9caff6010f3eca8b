"""Checks that several parts of a request share: selections of layers and positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.selection import check_positions, resolve_layers

if TYPE_CHECKING:
    from inference_svc.model_facts import ModelFacts


def invalid(field: str, message: str) -> Failure:
    """Return the failure for an invalid field; the message says what to change."""
    return Failure(Reason.ERROR_REASON_INVALID_FIELD, message, field=field)


def site_name(site: int) -> str:
    """Return the name of a site in the contract; its number if it has none."""
    return capture_pb2.Site.Name(site) if site in capture_pb2.Site.values() else str(site)  # type: ignore[arg-type]


def layer_list(
    field: str,
    selection: selection_pb2.LayerSelection,
    facts: ModelFacts,
    site: capture_pb2.Site.ValueType = capture_pb2.SITE_RESID_POST,
) -> selection_pb2.LayerSelection:
    """Return a selection of layers as a list: those of its layers that have a site, if it selects all.

    Raises:
        Failure: UNKNOWN_LAYER or INVALID_FIELD.
    """
    try:
        layers = resolve_layers(selection, facts.num_layers)
    except IndexError as error:
        layer = error.args[0]
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_LAYER,
            f"There is no layer {layer}: {facts.name} has {facts.num_layers} layers, 0 to {facts.num_layers - 1}.",
            layer=layer,
            layers=facts.num_layers,
        ) from None
    except ValueError as error:
        raise invalid(field, f"{field}: {error}.") from None
    existing = facts.layers_at(site)
    if selection.WhichOneof("selection") == "all":
        layers = list(existing)
    lacking = [layer for layer in layers if layer not in existing]
    if lacking:
        others = [site_name(other) for other in facts.sites if lacking[0] in facts.layers_at(other)]
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_LAYER,
            f"Layer {lacking[0]} of {facts.name} has no {site_name(site)}. The layers that do are "
            f"{', '.join(map(str, existing))}. Select these, or all. The sites of layer {lacking[0]} on this server "
            f"are {', '.join(others) or 'none'}.",
            layer=lacking[0],
            layers=facts.num_layers,
        )
    return selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=layers))


def check_selection(field: str, selection: selection_pb2.PositionSelection) -> None:
    """Check a selection of positions.

    Raises:
        Failure: INVALID_FIELD.
    """
    try:
        check_positions(selection)
    except ValueError as error:
        raise invalid(field, f"{field}: {error}.") from None
