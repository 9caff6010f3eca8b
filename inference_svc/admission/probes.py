"""The probes of a request: their checks, and the columns of their scores."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inference_svc.admission.fields import invalid, layer_list, site_name
from inference_svc.admission.sampling import is_prefill_only
from inference_svc.taps.points import INNER_SITES
from inference_svc.taps.steps.demand import point_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, probe_pb2, selection_pb2
from residuum.wire.limits import DIGEST_BYTES, MAX_PROBE_OUTPUTS, MAX_PROBES_BYTES
from residuum.wire.probes.arithmetic import (
    is_valid_probe_name,
    num_outputs,
    problem_of_attention,
    problem_of_mlp,
    problem_of_names,
    problem_of_places,
)
from residuum.wire.probes.smoothing import problem_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inference_svc.model_facts import ModelFacts
    from residuum.v1 import inference_pb2

PROBED = frozenset({capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE, *INNER_SITES})
"""The sites at which probes can read rows: those whose rows are as wide as the residual stream."""


def probe_sites(sites: Iterable[capture_pb2.Site.ValueType]) -> tuple[capture_pb2.Site.ValueType, ...]:
    """Return the sites at which probes can read rows, given those that the server was started with."""
    return tuple(sorted({capture_pb2.SITE_RESID_POST, *PROBED.intersection(sites)}))


def resolve_probes(spec: probe_pb2.ProbeSpec, facts: ModelFacts) -> probe_pb2.ProbeSpec:
    """Check probes against the model, and return them with every default filled in.

    Raises:
        Failure: A probe is invalid. The reason and the metadata name the field.
    """
    if not facts.probe_sites:
        raise invalid(
            "probes",
            "This server has no probes. Use an inference service without data and pipeline parallelism, started with "
            "score-mib above 0 (--score-mib, RESIDUUM_SCORE_MIB).",
        )
    outputs = sum(map(num_products, spec.probes))
    if outputs > MAX_PROBE_OUTPUTS:
        raise invalid(
            "probes.probes",
            f"The probes have {outputs} outputs; all probes of a request have at most {MAX_PROBE_OUTPUTS}. Of an MLP, "
            "the units of its first layer count. Each counts once for each place that the probe reads.",
        )
    if spec.ByteSize() > MAX_PROBES_BYTES:
        raise invalid(
            "probes",
            f"The probes and rules take {spec.ByteSize()} bytes; those of a request take at most {MAX_PROBES_BYTES}. "
            "Use smaller layers of MLPs, or fewer operations of rules.",
        )
    names = [probe.name for probe in spec.probes]
    resolved = probe_pb2.ProbeSpec()
    resolved.CopyFrom(spec)
    for index, probe in enumerate(resolved.probes):
        field = f"probes.probes[{index}]"
        if not is_valid_probe_name(probe.name):
            raise invalid(f"{field}.name", "A probe's name has 1 to 64 of the characters a-z A-Z 0-9 . _ -.")
        if names.index(probe.name) != index:
            raise invalid(f"{field}.name", f"Two probes are named {probe.name}. Give each a name of its own.")
        _check_probe(field, probe, facts)
    return resolved


def _check_probe(field: str, probe: probe_pb2.Probe, facts: ModelFacts) -> None:
    """Check one probe, and fill in its sites."""
    _check_outputs(field, probe)  # with at least one output, the limit of outputs bounds the places
    _check_place(field, probe, facts)
    for at, place in enumerate(probe.further_places):
        _check_place(f"{field}.further_places[{at}]", place, facts)
    if problem := problem_of_places(probe):
        raise invalid(f"{field}.further_places", f"The places of the probe {probe.name} are invalid: {problem}.")
    if problem := problem_of_attention(probe):
        raise invalid(f"{field}.attention", f"The attention of the probe {probe.name} is invalid: {problem}.")
    for name, problem in (
        ("mlp", problem_of_mlp(probe)),
        ("output_names", problem_of_names(probe)),
        ("smoothing", problem_of(probe.smoothing) if probe.HasField("smoothing") else ""),
    ):
        if problem:
            raise invalid(f"{field}.{name}", f"The {name} of the probe {probe.name} is invalid: {problem}.")
    if probe.activation not in probe_pb2.ProbeActivation.values():
        names = ", ".join(probe_pb2.ProbeActivation.keys())
        raise invalid(f"{field}.activation", f"The activation is {int(probe.activation)}; this server knows {names}.")
    if probe.activation == probe_pb2.PROBE_ACTIVATION_SOFTMAX and num_outputs(probe) == 1:
        raise invalid(
            f"{field}.activation", "The softmax of a single output is always 1. Use a sigmoid, or two outputs or more."
        )


def _check_place(field: str, place: probe_pb2.Probe | probe_pb2.ProbePlace, facts: ModelFacts) -> None:
    """Check a place that a probe reads, and fill in its site."""
    place.site = place.site or capture_pb2.SITE_RESID_POST
    if place.site not in facts.probe_sites:
        known = [site_name(site) for site in facts.probe_sites]
        advice = (
            "Its operator enables the site with --capture-sites."
            if place.site in PROBED
            else "Probes read rows that are as wide as the residual stream."
        )
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_SITE,
            f"Probes cannot read rows at the site {site_name(place.site)}; this server's read at: {', '.join(known)}. "
            f"{advice}",
            site=site_name(place.site),
            armed=",".join(known),
        )
    layers = selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=[place.layer]))
    layer_list(f"{field}.layer", layers, facts, place.site)


def _check_outputs(field: str, probe: probe_pb2.Probe) -> None:
    if not probe.outputs:
        raise invalid(f"{field}.outputs", "A probe has at least one output.")
    for number, output in enumerate(probe.outputs):
        if len(output.digest) != DIGEST_BYTES:
            raise invalid(
                f"{field}.outputs[{number}].digest",
                f"A digest must be {DIGEST_BYTES} bytes long: the SHA-256 of the vector.",
            )
        if not math.isfinite(output.bias):
            raise invalid(f"{field}.outputs[{number}].bias", f"The bias is {output.bias}; it must be finite.")


def check_scores(spec: probe_pb2.ProbeSpec | None, sampling: inference_pb2.SamplingParameters) -> None:
    """Check that some row of a request is scored.

    Raises:
        Failure: No token is generated, and the prompt's rows are not asked for.
    """
    if spec is not None and not spec.score_prompt and is_prefill_only(sampling):
        raise invalid(
            "probes.score_prompt",
            "The request generates no tokens, so there is nothing to score. Set score_prompt to score its prompt.",
        )


def probe_digests(spec: probe_pb2.ProbeSpec | None) -> list[bytes]:
    """Return the digests of the vectors of all probes."""
    return [product.digest for probe in spec.probes for product in products_of(probe)] if spec else []


class Product(NamedTuple):
    """An inner product of a row and a vector, which is one of an output's summands."""

    site: capture_pb2.Site.ValueType
    layer: int
    digest: bytes


def products_of(probe: probe_pb2.Probe) -> list[Product]:
    """Return the inner products of a checked probe: those of all outputs at its first place, then at the next."""
    found = [Product(probe.site, probe.layer, output.digest) for output in probe.outputs]
    for place in probe.further_places:
        found += [Product(place.site, place.layer, digest) for digest in place.digests]
    return found


def num_products(probe: probe_pb2.Probe) -> int:
    """Return how many inner products a probe takes of each position."""
    return len(probe.outputs) * (1 + len(probe.further_places))


def columns_of(spec: probe_pb2.ProbeSpec) -> list[list[int]]:
    """Return, for each probe, the column of each of its `products_of`.

    Columns are in the order of layers, so those of a pipeline stage are neighbours. So are those of a probe at a place.
    """
    layers = [product.layer for probe in spec.probes for product in products_of(probe)]
    ranks = iter(np.argsort(np.argsort(layers, kind="stable")).tolist())
    return [list(islice(ranks, num_products(probe))) for probe in spec.probes]


def demanded(
    spec: probe_pb2.ProbeSpec | None,
) -> list[tuple[Sequence[tuple[int, int]], selection_pb2.PositionSelection, bool]]:
    """Return the point and the positions of each inner product, without a gate, as `demand_of` takes them."""
    everywhere = selection_pb2.PositionSelection()
    return [
        ([point_name(product.site, product.layer)], everywhere, False)
        for probe in (spec.probes if spec else ())
        for product in products_of(probe)
    ]
