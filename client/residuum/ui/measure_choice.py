"""The measure that a request of the page names, with the direction, probe or sparse autoencoder that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from residuum.ui.answers import invalid, whole_number
from residuum.ui.gallery import Gallery, layer_vectors
from residuum.ui.measures import Feature, Measure, Norm, ProbeScore, Projection
from residuum.values.captures.manifest import Manifest
from residuum.values.tensors.vector import rows_site

MEASURES = ("norm", "projection", "cosine", "probe", "feature")
_SHOWN_FEATURES = 12


def chosen_measure(gallery: Gallery, manifest: Manifest, site: str, asked: Mapping[str, Any]) -> tuple[Measure, Any]:
    """Return a measure of a capture's rows, and a key that names it with the version of the file that it needs.

    Args:
        gallery: Where directions, probes and sparse autoencoders are.
        manifest: The capture's manifest.
        site: The site of the rows.
        asked: The parameters of the request: `measure` and what it needs, `direction` and `from`, `probe`, `output` and
            `from`, or `feature`, `sae` and `from`.

    Raises:
        InvalidRequest: There is no such measure, or it does not suit the rows; the message says why.
        FileNotFoundError: The gallery does not have the file.
    """
    name = str(asked.get("measure") or "norm")
    if name not in MEASURES:
        raise invalid(f"There is no measure {name!r}. Choose among {', '.join(MEASURES)}.")
    if name == "norm":
        return Norm(), name
    if not manifest.format_at(site).decodes_to_rows and (name, manifest.encoding) != ("feature", "sae"):
        raise invalid(
            f"The rows of {manifest.capture_id} are encoded as {manifest.encoding!r}: other numbers, even if there "
            f"are as many. The measure {name!r} needs rows."
        )
    if name == "feature":
        return _feature(gallery, manifest, asked)
    source = str(asked.get("probe" if name == "probe" else "direction") or "")
    if not source:
        raise invalid(f"The measure {name!r} needs a {'probe' if name == 'probe' else 'direction'}. Choose one.")
    key = (name, source, gallery.version(source), str(asked.get("from") or ""), str(asked.get("output") or ""))
    if name == "probe":
        return _probe(gallery, manifest, site, source, asked), key
    directions = gallery.load(source)
    rows_site(directions, site)
    vectors = layer_vectors(directions, manifest.layers_at(site), str(asked.get("from") or ""))
    return Projection(vectors, is_cosine=name == "cosine"), key


def _probe(gallery: Gallery, manifest: Manifest, site: str, name: str, asked: Mapping[str, Any]) -> ProbeScore:
    probe = gallery.probe(name)
    at_all_layers = asked.get("from") == "all"
    if len(probe.places) > 1:
        raise invalid(
            f"The probe {name} reads {len(probe.places)} places, and a view shows the rows of one. Score the rows in "
            "Python: probe.score(...)."
        )
    if probe.attention is not None:
        raise invalid(
            f"The probe {name} has attention: its score at a token depends on all rows before, and a view scores each "
            "row alone. Score all rows in Python, probe.score(acts[layer]), or give the probe to a request: probes=."
        )
    if probe.site != site:
        raise invalid(f"The probe {name} reads rows of the site {probe.site}, but these are of {site}.")
    if not at_all_layers and probe.layer not in manifest.layers_at(site):
        raise invalid(f"The probe {name} reads layer {probe.layer}, which was not captured. Score all layers with it.")
    return ProbeScore(probe, whole_number(asked, "output", 0), at_all_layers=at_all_layers)


def _feature(gallery: Gallery, manifest: Manifest, asked: Mapping[str, Any]) -> tuple[Feature, Any]:
    feature, source = whole_number(asked, "feature"), str(asked.get("sae") or "")
    if manifest.encoding != "sae":
        if not source:
            raise invalid(
                f"The rows of {manifest.capture_id} are encoded as {manifest.encoding!r}, not as features. Choose a "
                "sparse autoencoder that computes them."
            )
        layer = whole_number(asked, "from")
        return Feature(feature, gallery.sae(source), layer), (
            "feature",
            source,
            gallery.version(source),
            feature,
            layer,
        )
    count = manifest.proto.description.spec.encoding_options.sae.features
    if feature >= count:
        raise invalid(f"The feature {feature} does not exist: the rows have the features 0 to {count - 1}.")
    if manifest.features and feature not in manifest.features:
        kept = ", ".join(map(str, manifest.features[:_SHOWN_FEATURES]))
        more = ", …" if len(manifest.features) > _SHOWN_FEATURES else ""
        raise invalid(f"The capture does not have the feature {feature}: it keeps {kept}{more}.")
    return Feature(feature), ("feature", feature)
