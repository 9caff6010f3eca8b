"""Encodings and reductions in requests: invalid ones are refused, and defaults are filled in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inference_svc.admission.captures import resolve_capture
from inference_svc.model_facts import CaptureDefaults
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, inference_pb2, sae_pb2, selection_pb2
from residuum.wire.rows.encodings import (
    BY_DIMENSION,
    BY_ROW,
    ENCODINGS,
    FP16,
    FULL8,
    PROJECT,
    RAW,
    RP,
    RP8,
    SAE,
    TOPK,
    TOPK8,
    RowFormat,
)
from tests.inference.admission.test_specs import FACTS, A, B, add, steered
from tests.inference.spec_support import resolve_spec

ALL = selection_pb2.LayerSelection(all=True)
WIDTH = FACTS.hidden_size


def facts(**fields):
    made = SimpleNamespace(**{**vars(FACTS), **fields})
    widths = dict(zip(made.sites, fields.get("site_widths", ()), strict=False))
    made.width = lambda site: widths.get(site, made.hidden_size)
    return made


def capture(encoding=0, *, reduction=0, **options):
    return capture_pb2.CaptureSpec(
        layers=ALL,
        encoding=encoding,
        reduction=reduction,
        encoding_options=capture_pb2.EncodingOptions(**options) if options else None,
    )


def resolved(spec, **changes):
    return resolve_capture(spec, facts(**changes))


BAD = {
    "unknown encoding": (capture(99), "encoding", "not support the encoding 99; it supports raw, fp32"),
    "more than the width": (
        capture(RP8, dimensions=WIDTH + 1),
        "encoding_options",
        "rp8 takes 1 to 200 dimensions, not 201",
    ),
    "more to keep than there are": (capture(TOPK, dimensions=WIDTH + 1), "encoding_options", "1 to 200 dimensions"),
    "dimensions of raw": (
        capture(RAW, dimensions=5),
        "encoding_options.dimensions",
        "raw has none; only rp8 and topk8 and",
    ),
    "dimensions of projections onto vectors": (
        capture(PROJECT, dimensions=1, vectors=[A]),
        "encoding_options.dimensions",
        "project has none",
    ),
    "seed of topk": (capture(TOPK, seed=1), "encoding_options.seed", "topk has none; only rp8 and rp have"),
    "axis of rp8": (capture(RP8, axis=BY_ROW), "encoding_options.axis", "rp8 has none; only full8 has"),
    "unknown axis": (capture(FULL8, axis=9), "encoding_options.axis", "ROW or DIMENSION"),
    "no vectors": (capture(PROJECT), "encoding_options.vectors", "project takes 1 to 256 vectors, not 0"),
    "too many vectors": (
        capture(PROJECT, vectors=[bytes([number, 0] * 16) for number in range(256)] + [A]),
        "encoding_options.vectors",
        "1 to 256 vectors, not 257",
    ),
    "vectors of fp16": (capture(FP16, vectors=[A]), "encoding_options.vectors", "fp16 takes none; only project does"),
    "half a digest": (capture(PROJECT, vectors=[A, b"b"]), "encoding_options.vectors", "a digest is 32 bytes long"),
    "a vector twice": (capture(PROJECT, vectors=[A, B, A]), "encoding_options.vectors", "name each vector only once"),
    "unknown reduction": (capture(reduction=9), "reduction", "it supports NONE, LAST, MEAN, MAX, SUM"),
    "reduction along dimensions": (
        capture(FULL8, axis=BY_DIMENSION, reduction=capture_pb2.REDUCTION_MEAN),
        "reduction",
        "Set the axis to ROW.",
    ),
}


@pytest.mark.parametrize(("spec", "field", "message"), BAD.values(), ids=BAD)
def test_contradictory_encoding_options_are_refused(spec, field, message):
    with pytest.raises(Failure) as caught:
        resolved(spec)
    assert (caught.value.reason_name, caught.value.metadata) == ("INVALID_FIELD", {"field": f"capture.{field}"})
    assert message in caught.value.message


def test_rows_too_wide_for_an_index_are_refused():
    with pytest.raises(Failure, match="topk8 takes rows of at most 65536 elements, not 65537"):
        resolved(capture(TOPK8), hidden_size=65537)


def test_unsupported_encodings_and_reductions_are_refused():
    only = {"encodings": (RAW,), "reductions": (capture_pb2.REDUCTION_NONE,)}
    with pytest.raises(Failure, match="not support the encoding rp8; it supports raw"):
        resolved(capture(RP8), **only)
    with pytest.raises(Failure, match="not support this reduction; it supports NONE"):
        resolved(capture(reduction=capture_pb2.REDUCTION_LAST), **only)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (capture(RP8), {"dimensions": WIDTH}),
        (capture(TOPK8), {"dimensions": 128}),
        (capture(RP, seed=7), {"dimensions": WIDTH, "seed": 7}),
        (capture(RP8, dimensions=3), {"dimensions": 3}),
        (capture(FULL8), {"axis": BY_ROW}),
        (capture(FULL8, axis=BY_DIMENSION), {"axis": BY_DIMENSION}),
        (capture(PROJECT, vectors=[B, A]), {"vectors": [B, A]}),
    ],
)
def test_options_are_filled_in(asked, options):
    found = resolved(asked)
    assert found.encoding == asked.encoding
    assert found.encoding_options == capture_pb2.EncodingOptions(**options)
    assert found.reduction == capture_pb2.REDUCTION_NONE


@pytest.mark.parametrize("encoding", set(ENCODINGS.values()) - {PROJECT, SAE})
def test_operator_defaults_apply_where_a_request_sets_nothing(encoding):
    found = resolved(capture(), capture_defaults=CaptureDefaults(encoding, projection=64, topk=9))
    assert found.encoding == encoding
    assert found.encoding_options.dimensions == {RP: 64, RP8: 64, TOPK: 9, TOPK8: 9}.get(encoding, 0)
    assert resolved(capture(RAW), capture_defaults=CaptureDefaults(RP8)).encoding == RAW


def test_the_store_and_the_client_see_the_format_that_was_checked():
    for asked in (capture(RP8), capture(TOPK, dimensions=4), capture(FULL8), capture(PROJECT, vectors=[A, B])):
        description = capture_pb2.CaptureDescription(hidden_size=WIDTH, dtype=FACTS.dtype, spec=resolved(asked))
        form = RowFormat.of_capture(description)
        assert (form.encoding, form.width) == (asked.encoding, WIDTH)
        assert form.dimensions == {RP8: WIDTH, TOPK: 4, PROJECT: 2}.get(asked.encoding, 0)


def test_vectors_to_project_onto_are_needed_like_those_of_steering():
    spec = steered(add(B))
    spec.capture.CopyFrom(capture(PROJECT, vectors=[A, B]))
    assert resolve_spec(spec, FACTS).shared.digests == [B, A]
    spec.ClearField("steering")
    assert resolve_spec(spec, FACTS).shared.digests == [A, B]


def test_encodings_do_not_separate_what_shares_a_cache():
    spec = inference_pb2.RequestSpec(capture=capture(PROJECT, vectors=[A]))
    assert resolve_spec(spec, FACTS).shared.cache_salt(10) is None


DIGEST = bytes(range(32))


def features(digest=DIGEST, count=500, chosen=(), **options):
    kept = sae_pb2.SAEFeatures(digest=digest, features=count, chosen=chosen)
    return capture(SAE, sae=kept, **options)


def test_features_have_defaults():
    assert resolved(features()).encoding_options.dimensions == 32
    assert resolved(features(count=9)).encoding_options.dimensions == 9
    assert resolved(features(dimensions=7)).encoding_options.dimensions == 7
    assert resolved(features(chosen=[3, 1])).encoding_options.dimensions == 2
    last = features()
    last.reduction = capture_pb2.REDUCTION_LAST
    assert resolved(last).reduction == capture_pb2.REDUCTION_LAST
    spec = inference_pb2.RequestSpec(capture=features())
    assert (resolve_spec(spec, FACTS).shared.sae_digest, resolve_spec(spec, FACTS).shared.digests) == (DIGEST, [])


BAD_FEATURES = {
    "no encoder": (capture(SAE), "encoding_options.sae", "sae needs it"),
    "an encoder for raw": (
        capture(RAW, sae=sae_pb2.SAEFeatures()),
        "encoding_options.sae",
        "no other encoding takes it",
    ),
    "half a digest": (features(b"a"), "encoding_options.sae.digest", "32 bytes"),
    "no features": (features(count=0), "encoding_options", "1 to 1048576 features, not 0"),
    "too many features": (features(count=1 << 21), "encoding_options", "1 to 1048576 features"),
    "more than there are": (features(count=5, dimensions=6), "encoding_options", "keeps 1 to 5 features"),
    "more than can be kept": (features(dimensions=257), "encoding_options", "keeps 1 to 256 features"),
    "an unknown feature": (features(chosen=[1, 500]), "encoding_options.sae.chosen", "no feature .500. among the 500"),
    "a feature twice": (features(chosen=[1, 1]), "encoding_options.sae.chosen", "only once"),
    "too many chosen": (features(chosen=range(257)), "encoding_options.sae.chosen", "at most 256"),
    "another number": (features(chosen=[1, 2], dimensions=3), "encoding_options.dimensions", "2 features are chosen"),
    "a seed": (features(seed=4), "encoding_options.seed", "sae has none"),
    "a mean": (features(), "reduction", "say nothing about the rows"),
}


@pytest.mark.parametrize("name", BAD_FEATURES)
def test_features_that_cannot_be_kept_are_refused(name):
    spec, field, message = BAD_FEATURES[name]
    if name == "a mean":
        spec.reduction = capture_pb2.REDUCTION_MEAN
    with pytest.raises(Failure, match=message) as caught:
        resolved(spec)
    assert caught.value.metadata["field"] == f"capture.{field}"


def test_a_server_without_memory_for_encoders_says_so():
    with pytest.raises(Failure, match=r"not support the encoding sae; .*has sae if its operator sets --sae-mib"):
        resolved(features(), encodings=(RAW,))


WIDE = {"sites": (capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Q, capture_pb2.SITE_K), "site_widths": (WIDTH, 128, 32)}


def at(spec, *sites):
    spec.sites[:] = sites
    return spec


@pytest.mark.parametrize(
    ("sites", "dimensions"),
    [
        ((capture_pb2.SITE_Q,), 100),
        ((capture_pb2.SITE_Q, capture_pb2.SITE_K), 32),
        ((capture_pb2.SITE_RESID_POST,), 100),
    ],
)
def test_the_default_of_dimensions_is_at_most_the_smallest_width(sites, dimensions):
    defaults = CaptureDefaults(topk=100)
    spec = at(capture(TOPK8), *sites)
    assert resolved(spec, **WIDE, capture_defaults=defaults).encoding_options.dimensions == dimensions


def test_more_dimensions_than_a_site_has_are_refused():
    spec = at(capture(TOPK, dimensions=33), capture_pb2.SITE_RESID_POST, capture_pb2.SITE_K)
    with pytest.raises(Failure, match="topk takes 1 to 32 dimensions, not 33: rows have 32 elements"):
        resolved(spec, **WIDE)


@pytest.mark.parametrize(("encoding", "options"), [(PROJECT, {"vectors": [bytes(32)]}), (RP8, {}), (RP, {})])
def test_only_rows_as_wide_as_the_stream_are_projected(encoding, options):
    spec = at(capture(encoding, **options), capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Q)
    with pytest.raises(Failure, match=r"projects rows of 200 elements\. Rows at SITE_Q have 128"):
        resolved(spec, **WIDE)
