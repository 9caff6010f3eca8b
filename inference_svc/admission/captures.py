"""The capture spec of a request: its checks against the model, and its defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_svc.admission.fields import check_selection, invalid, layer_list, site_name
from inference_svc.taps.encodings.projections import is_computed
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.labels import LabelError, check_labels
from residuum.wire.limits import (
    BLOCK_TOKENS,
    DIGEST_BYTES,
    MAX_KEPT_FEATURES,
    MAX_PROJECTION_VECTORS,
)
from residuum.wire.rows.encodings import (
    BY_DIMENSION,
    BY_ROW,
    ENCODING_NAMES,
    ENCODINGS,
    FULL8,
    LARGEST,
    PROJECT,
    RANDOM_PROJECTIONS,
    SAE,
    SIZED,
    EncodingError,
    RowFormat,
    kept_features,
)
from residuum.wire.selection import is_reduced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.model_facts import ModelFacts


def resolve_capture(spec: capture_pb2.CaptureSpec, facts: ModelFacts) -> capture_pb2.CaptureSpec:
    """Check a capture spec against the model, and return it with every default filled in.

    Raises:
        Failure: The spec is invalid. The reason and the metadata name the field.
    """
    sites = list(spec.sites) or [capture_pb2.SITE_RESID_POST]
    _check_sites(sites, facts)
    if spec.overflow not in capture_pb2.OverflowPolicy.values():
        raise invalid("capture.overflow", "capture.overflow: set OVERFLOW_POLICY_WAIT or OVERFLOW_POLICY_SHED.")
    if spec.flush_interval > BLOCK_TOKENS:
        raise invalid(
            "capture.flush_interval",
            f"capture.flush_interval is {spec.flush_interval} tokens; it must be from 1 to {BLOCK_TOKENS}.",
        )
    check_selection("capture.positions", spec.positions)
    check_capture_labels(spec)
    resolved = capture_pb2.CaptureSpec()
    resolved.CopyFrom(spec)
    _fill_layers(resolved, sites, facts)
    resolved.sites[:] = sites
    resolved.overflow = spec.overflow or capture_pb2.OVERFLOW_POLICY_WAIT
    resolved.encoding = _encoding(spec.encoding, facts)
    resolved.encoding_options.CopyFrom(_options(resolved.encoding, spec.encoding_options, sites, facts))
    if resolved.encoding_options == capture_pb2.EncodingOptions():
        resolved.ClearField("encoding_options")
    resolved.reduction = spec.reduction or capture_pb2.REDUCTION_NONE
    resolved.flush_interval = spec.flush_interval or BLOCK_TOKENS
    _check_reduction(resolved, facts)
    return resolved


def check_capture_labels(spec: capture_pb2.CaptureSpec) -> None:
    """Check the labels of a capture spec; raise a Failure if they are invalid."""
    try:
        check_labels(spec.labels)
    except LabelError as error:
        raise invalid("capture.labels", f"capture.labels: {error}.") from None


def _fill_layers(spec: capture_pb2.CaptureSpec, sites: list[capture_pb2.Site.ValueType], facts: ModelFacts) -> None:
    """Replace the layers of a spec by lists. `site_layers` stays only if sites have different layers."""
    given = list(spec.site_layers)
    if given and len(given) != len(sites):
        raise invalid(
            "capture.site_layers",
            f"capture.site_layers has {len(given)} entries, but capture.sites has {len(sites)}. Give the "
            "layers of each site, in the order of the sites.",
        )
    field = "capture.site_layers" if given else "capture.layers"
    pairs = zip(given or [spec.layers] * len(sites), sites, strict=True)
    lists = [layer_list(field, selection, facts, site) for selection, site in pairs]
    every = sorted({layer for selection in lists for layer in selection.list.layers})
    union = selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=every))
    names_others = spec.layers.HasField("list") and layer_list("capture.layers", spec.layers, facts) != union
    if given and names_others:
        raise invalid(
            "capture.layers",
            f"capture.layers must be unset, all, or the union of capture.site_layers, which is {every}.",
        )
    spec.layers.CopyFrom(union)
    del spec.site_layers[:]
    if any(selection != union for selection in lists):
        spec.site_layers.extend(lists)


def _check_sites(sites: list[capture_pb2.Site.ValueType], facts: ModelFacts) -> None:
    for site in sites:
        if site not in facts.sites:
            enabled = [site_name(known) for known in facts.sites]
            exists = site in capture_pb2.Site.values()
            raise Failure(
                Reason.ERROR_REASON_UNKNOWN_SITE,
                f"The site {site_name(site)} is not enabled on this server; enabled: {', '.join(enabled)}. "
                + ("Its operator enables sites with --capture-sites." if exists else "There is no such site."),
                site=site_name(site),
                armed=",".join(enabled),
            )
    if len(set(sites)) != len(sites):
        raise invalid("capture.sites", "capture.sites: name each site only once.")


def _encoding(asked: capture_pb2.Encoding.ValueType, facts: ModelFacts) -> capture_pb2.Encoding.ValueType:
    encoding = asked or facts.capture_defaults.encoding
    if encoding in facts.encodings:
        return encoding
    known = ", ".join(ENCODING_NAMES[number] for number in facts.encodings)
    name = ENCODING_NAMES.get(encoding, str(int(encoding)))
    advice = (
        " The inference service has sae if its operator sets --sae-mib; vllm serve never has it."
        if encoding == SAE
        else ""
    )
    raise invalid("capture.encoding", f"This server does not support the encoding {name}; it supports {known}.{advice}")


def _options(
    encoding: capture_pb2.Encoding.ValueType,
    asked: capture_pb2.EncodingOptions,
    sites: Sequence[capture_pb2.Site.ValueType],
    facts: ModelFacts,
) -> capture_pb2.EncodingOptions:
    """Return the options of an encoding with every default filled in."""
    _check_options(encoding, asked)
    others = [site for site in sites if facts.width(site) != facts.hidden_size]
    if others and encoding in RANDOM_PROJECTIONS | {PROJECT}:
        raise invalid(
            "capture.encoding",
            f"{ENCODING_NAMES[encoding]} projects rows of {facts.hidden_size} elements. Rows at "
            f"{site_name(others[0])} have {facts.width(others[0])}. Choose another encoding for this site.",
        )
    width = min((facts.width(site) for site in sites), default=facts.hidden_size)
    options = capture_pb2.EncodingOptions()
    options.CopyFrom(asked)
    if encoding in SIZED and not asked.dimensions:
        defaults = facts.capture_defaults
        options.dimensions = min(defaults.topk if encoding in LARGEST else defaults.projection, width)
    if encoding == SAE:
        options.dimensions = kept_features(asked)
    if encoding == FULL8:
        options.axis = asked.axis or BY_ROW
    dimensions = options.dimensions or len(options.vectors)
    try:
        for site in sites:
            RowFormat(encoding, facts.width(site), facts.dtype, dimensions, options.axis, options.sae.features)
    except EncodingError as error:
        raise invalid("capture.encoding_options", f"capture.encoding_options: {error}.") from None
    return options


def _check_options(encoding: capture_pb2.Encoding.ValueType, asked: capture_pb2.EncodingOptions) -> None:
    name, count = ENCODING_NAMES[encoding], len(asked.vectors)
    rules = (
        (
            "dimensions",
            not asked.dimensions or encoding in SIZED | {SAE},
            f"{name} has none; only {_names(SIZED | {SAE})} have",
        ),
        (
            "seed",
            not asked.seed or encoding in RANDOM_PROJECTIONS,
            f"{name} has none; only rp8 and rp have",
        ),
        (
            "axis",
            asked.axis in capture_pb2.QuantizationAxis.values(),
            "set ROW or DIMENSION",
        ),
        ("axis", not asked.axis or encoding == FULL8, f"{name} has none; only full8 has"),
        ("vectors", not count or encoding == PROJECT, f"{name} takes none; only project does"),
        (
            "vectors",
            encoding != PROJECT or 1 <= count <= MAX_PROJECTION_VECTORS,
            f"project takes 1 to {MAX_PROJECTION_VECTORS} vectors, not {count}",
        ),
        ("vectors", {*map(len, asked.vectors)} <= {DIGEST_BYTES}, f"a digest is {DIGEST_BYTES} bytes long"),
        ("vectors", len(set(asked.vectors)) == count, "name each vector only once"),
        ("sae", asked.HasField("sae") == (encoding == SAE), "sae needs it, and no other encoding takes it"),
        ("sae.digest", encoding != SAE or len(asked.sae.digest) == DIGEST_BYTES, f"it is {DIGEST_BYTES} bytes long"),
        *_chosen_rules(asked),
    )
    for field, holds, message in rules:
        if not holds:
            raise invalid(f"capture.encoding_options.{field}", f"capture.encoding_options.{field}: {message}.")


def _chosen_rules(asked: capture_pb2.EncodingOptions) -> Sequence[tuple[str, bool, str]]:
    chosen, features = asked.sae.chosen, asked.sae.features
    unknown = [number for number in chosen if number >= features]
    return (
        ("sae.chosen", len(chosen) <= MAX_KEPT_FEATURES, f"choose at most {MAX_KEPT_FEATURES} features"),
        ("sae.chosen", len(set(chosen)) == len(chosen), "name each feature only once"),
        ("sae.chosen", not unknown, f"there is no feature {unknown[:1]} among the {features}: they count from 0"),
        (
            "dimensions",
            not chosen or asked.dimensions in (0, len(chosen)),
            f"{len(chosen)} features are chosen; leave it out, or set it to their number",
        ),
    )


def _check_reduction(resolved: capture_pb2.CaptureSpec, facts: ModelFacts) -> None:
    if resolved.reduction not in facts.reductions:
        known = ", ".join(capture_pb2.Reduction.Name(number).removeprefix("REDUCTION_") for number in facts.reductions)
        raise invalid("capture.reduction", f"This server does not support this reduction; it supports {known}.")
    if resolved.encoding == SAE and is_computed(resolved.reduction):
        raise invalid(
            "capture.reduction",
            "The features of a mean, maximum or sum of rows say nothing about the rows. Use no reduction, or 'last', "
            "and reduce the features yourself.",
        )
    if is_reduced(resolved) and resolved.encoding_options.axis == BY_DIMENSION:
        raise invalid(
            "capture.reduction",
            "A reduced capture has a single row, which cannot be quantised by dimension: that needs several rows that "
            "share a scale. Set the axis to ROW.",
        )


def _names(encodings: frozenset[capture_pb2.Encoding.ValueType]) -> str:
    return " and ".join(name for name, number in ENCODINGS.items() if number in encodings)
