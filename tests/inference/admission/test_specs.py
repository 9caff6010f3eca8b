"""The check of a request's spec: every invalid input with its reason and metadata, the defaults, and the salt."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from inference_svc.admission import specs
from inference_svc.admission.kept_parts import KeptParts
from inference_svc.admission.sampling import check_capture_size, check_prompt, check_sampling
from inference_svc.admission.specs import SharedSpec, SpecResolver
from inference_svc.admission.steering import directions_of
from inference_svc.model_facts import CaptureDefaults
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, inference_pb2, probe_pb2, rule_pb2, selection_pb2, steering_pb2, tensor_pb2
from residuum.wire.limits import MAX_OPERATIONS, MAX_RANGES
from residuum.wire.rows.encodings import ENCODINGS
from tests.inference.spec_support import resolve_spec
from tests.inference.taps_support import GENERATED, PROMPT, select

FACTS = SimpleNamespace(
    name="tiny",
    adapters=("joy", "calm"),
    num_layers=4,
    hidden_size=200,
    dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
    max_model_len=32,
    vocab_size=100,
    max_logprobs=20,
    sites=(capture_pb2.SITE_RESID_POST, capture_pb2.SITE_ATTN_OUT),
    steering_sites=(capture_pb2.SITE_RESID_POST, capture_pb2.SITE_ATTN_OUT),
    encodings=tuple(ENCODINGS.values()),
    reductions=tuple(capture_pb2.Reduction.values()[1:]),
    capture_defaults=CaptureDefaults(),
    width=lambda site: 200,
    layers_at=lambda site: (0, 1, 2, 3),
)
"""The fields of ModelFacts that the checks need. ModelFacts itself cannot be imported without vLLM."""
A, B = b"a" * 32, b"b" * 32
ALL = selection_pb2.LayerSelection(all=True)


def layer_list(*layers):
    return selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=layers))


def capturing(layers=ALL, **fields):
    return inference_pb2.RequestSpec(capture=capture_pb2.CaptureSpec(layers=layers, **fields))


def label(key, value):
    return capture_pb2.Label(name=key, text=value)


def steered(*operations):
    return inference_pb2.RequestSpec(steering=steering_pb2.SteeringSpec(operations=operations))


def add(digest=A, scale=1.0, layers=ALL, positions=None):
    return steering_pb2.SteeringOperation(
        layers=layers, positions=positions, add=steering_pb2.Add(digest=digest, scale=scale)
    )


def ablate(digest=A, **fields):
    return steering_pb2.SteeringOperation(layers=ALL, ablate=steering_pb2.Ablate(digest=digest, **fields))


def cap(digest=A, **fields):
    return steering_pb2.SteeringOperation(layers=ALL, cap=steering_pb2.Cap(digest=digest, **fields))


def operation_without_kind():
    """An operation of a newer client that this server does not know."""
    return steering_pb2.SteeringOperation(layers=ALL)


def refusal(call, *arguments):
    with pytest.raises(Failure) as caught:
        call(*arguments)
    return caught.value


BAD_SPECS = {
    "id": (inference_pb2.RequestSpec(request_id="-x"), "INVALID_FIELD", {"field": "request_id"}),
    "long id": (inference_pb2.RequestSpec(request_id="x" * 129), "INVALID_FIELD", {"field": "request_id"}),
    "model": (inference_pb2.RequestSpec(model="huge"), "UNKNOWN_MODEL", {"model": "huge", "serving": "tiny"}),
    "layer": (capturing(layer_list(0, 4)), "UNKNOWN_LAYER", {"layer": "4", "layers": "4"}),
    "no layer": (capturing(layer_list()), "INVALID_FIELD", {"field": "capture.layers"}),
    "layers unset": (capturing(None), "INVALID_FIELD", {"field": "capture.layers"}),
    "layers not all": (
        capturing(selection_pb2.LayerSelection(all=False)),
        "INVALID_FIELD",
        {"field": "capture.layers"},
    ),
    "layers descend": (capturing(layer_list(2, 1)), "INVALID_FIELD", {"field": "capture.layers"}),
    "layer twice": (capturing(layer_list(1, 1)), "INVALID_FIELD", {"field": "capture.layers"}),
    "site not enabled": (
        capturing(sites=[capture_pb2.SITE_MLP_OUT]),
        "UNKNOWN_SITE",
        {"site": "SITE_MLP_OUT", "armed": "SITE_RESID_POST,SITE_ATTN_OUT"},
    ),
    "unknown site": (capturing(sites=[77]), "UNKNOWN_SITE", {"site": "77", "armed": "SITE_RESID_POST,SITE_ATTN_OUT"}),
    "site twice": (
        capturing(sites=[capture_pb2.SITE_RESID_POST] * 2),
        "INVALID_FIELD",
        {"field": "capture.sites"},
    ),
    "layers of more sites": (
        capturing(None, site_layers=[layer_list(1), layer_list(2)]),
        "INVALID_FIELD",
        {"field": "capture.site_layers"},
    ),
    "a site without layers": (
        capturing(None, site_layers=[layer_list()]),
        "INVALID_FIELD",
        {"field": "capture.site_layers"},
    ),
    "a site's layer": (capturing(None, site_layers=[layer_list(4)]), "UNKNOWN_LAYER", {"layer": "4", "layers": "4"}),
    "layers without a site's": (
        capturing(layer_list(1), site_layers=[layer_list(1, 2)]),
        "INVALID_FIELD",
        {"field": "capture.layers"},
    ),
    "encoding": (capturing(encoding=99), "INVALID_FIELD", {"field": "capture.encoding"}),
    "labels": (
        capturing(labels=[capture_pb2.Label(name="a b", integer=1)]),
        "INVALID_FIELD",
        {"field": "capture.labels"},
    ),
    "overflow": (capturing(overflow=9), "INVALID_FIELD", {"field": "capture.overflow"}),
    "phase": (capturing(positions=select(phases=[0])), "INVALID_FIELD", {"field": "capture.positions"}),
    "empty range": (capturing(positions=select((5, 4))), "INVALID_FIELD", {"field": "capture.positions"}),
    "empty range from the end": (
        capturing(positions=select((-4, -5))),
        "INVALID_FIELD",
        {"field": "capture.positions"},
    ),
    "ranges": (
        capturing(positions=select(*[(0, None)] * (MAX_RANGES + 1))),
        "INVALID_FIELD",
        {"field": "capture.positions"},
    ),
    "operation": (
        steered(add(), operation_without_kind()),
        "UNKNOWN_OPERATION",
        {"field": "steering.operations[1]"},
    ),
    "operations": (steered(*[add()] * (MAX_OPERATIONS + 1)), "INVALID_FIELD", {"field": "steering.operations"}),
    "operation's layer": (steered(add(layers=layer_list(9))), "UNKNOWN_LAYER", {"layer": "9", "layers": "4"}),
    "operation's layers": (
        steered(add(layers=layer_list())),
        "INVALID_FIELD",
        {"field": "steering.operations[0].layers"},
    ),
    "operation's positions": (
        steered(add(positions=select((5, 4)))),
        "INVALID_FIELD",
        {"field": "steering.operations[0].positions"},
    ),
    "digest": (steered(add(digest=b"short")), "INVALID_FIELD", {"field": "steering.operations[0].add.digest"}),
    "scale": (steered(add(scale=math.nan)), "INVALID_FIELD", {"field": "steering.operations[0].add.scale"}),
    "infinite scale": (
        steered(ablate(scale=math.inf)),
        "INVALID_FIELD",
        {"field": "steering.operations[0].ablate.scale"},
    ),
    "no bound": (steered(cap()), "INVALID_FIELD", {"field": "steering.operations[0].cap"}),
    "bound": (steered(cap(min=math.nan)), "INVALID_FIELD", {"field": "steering.operations[0].cap"}),
    "infinite bound": (steered(cap(min=math.inf)), "INVALID_FIELD", {"field": "steering.operations[0].cap"}),
    "bounds": (steered(cap(min=1.0, max=0.0)), "INVALID_FIELD", {"field": "steering.operations[0].cap"}),
}


@pytest.mark.parametrize(("spec", "reason", "metadata"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_bad_specs_are_refused(spec, reason, metadata):
    failure = refusal(resolve_spec, spec, FACTS)
    assert (failure.reason_name, failure.metadata) == (reason, metadata)


def test_errors_name_the_valid_values():
    message = refusal(resolve_spec, capturing(layer_list(7)), FACTS).message
    assert "There is no layer 7: tiny has 4 layers, 0 to 3" in message


def test_the_empty_spec_is_valid():
    resolved = resolve_spec(inference_pb2.RequestSpec(), FACTS)
    assert (resolved.request_id, resolved.capture, resolved.steering, resolved.shared.digests) == ("", None, None, [])


@pytest.mark.parametrize(("model", "adapter"), [("", ""), ("tiny", ""), ("joy", "joy"), ("calm", "calm")])
def test_a_model_is_the_served_one_or_a_lora_adapter(model, adapter):
    assert resolve_spec(inference_pb2.RequestSpec(model=model), FACTS).adapter == adapter


@pytest.mark.parametrize(
    ("adapters", "told"),
    [
        ((), "This server serves tiny, not x. Name one of these, or leave model out."),
        (("joy", "calm"), "This server serves tiny and its LoRA adapters joy, calm, not x. Name one of these"),
        ([f"a{number}" for number in range(40)], "a30, a31 and 8 more, not x."),
    ],
)
def test_another_model_is_refused_with_the_names_of_the_served_ones(adapters, told):
    facts = SimpleNamespace(**{**vars(FACTS), "adapters": adapters})
    message = refusal(resolve_spec, inference_pb2.RequestSpec(model="x"), facts).message
    assert told in message
    assert "--lora-modules" in message


def test_a_long_name_of_a_model_is_truncated_in_the_answer():
    failure = refusal(resolve_spec, inference_pb2.RequestSpec(model="x" * 100_000), FACTS)
    assert len(failure.message) < 1000
    assert failure.metadata["model"] == "x" * 128


def test_a_captures_defaults_are_filled_in():
    assert resolve_spec(capturing(), FACTS).capture == capture_pb2.CaptureSpec(
        layers=layer_list(0, 1, 2, 3),
        sites=[capture_pb2.SITE_RESID_POST],
        encoding=capture_pb2.ENCODING_RAW,
        overflow=capture_pb2.OVERFLOW_POLICY_WAIT,
        reduction=capture_pb2.REDUCTION_NONE,
        flush_interval=32,
    )


@pytest.mark.parametrize("layers", [None, layer_list(0, 1, 3), ALL], ids=["unset", "the union", "all"])
def test_each_site_may_have_layers_of_its_own(layers):
    sites = [capture_pb2.SITE_ATTN_OUT, capture_pb2.SITE_RESID_POST]
    given = [ALL if layers is ALL else layer_list(0, 1), layer_list(3)]
    resolved = resolve_spec(capturing(layers, sites=sites, site_layers=given), FACTS).capture
    assert list(resolved.site_layers) == [layer_list(*range(4)) if layers is ALL else given[0], given[1]]
    assert resolved.layers == (layer_list(*range(4)) if layers is ALL else layer_list(0, 1, 3))


HYBRID = SimpleNamespace(
    **{
        **vars(FACTS),
        "sites": (capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Q),
        "steering_sites": (capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Q),
        "layers_at": lambda site: (1, 3) if site == capture_pb2.SITE_Q else (0, 1, 2, 3),
    }
)
"""A model that has queries in some layers only."""
BOTH = [capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Q]


def test_all_layers_are_those_that_have_the_site():
    resolved = resolve_spec(capturing(ALL, sites=BOTH), HYBRID).capture
    assert list(resolved.site_layers) == [layer_list(0, 1, 2, 3), layer_list(1, 3)]
    assert resolve_spec(capturing(layer_list(3), sites=BOTH), HYBRID).capture.layers == layer_list(3)
    alone = resolve_spec(capturing(ALL, sites=BOTH[1:]), HYBRID).capture
    assert (alone.layers, list(alone.site_layers)) == (layer_list(1, 3), [])
    points = resolve_spec(capturing(ALL, sites=BOTH, site_layers=[layer_list(0), ALL]), HYBRID).capture
    assert (points.layers, list(points.site_layers)) == (layer_list(0, 1, 3), [layer_list(0), layer_list(1, 3)])
    operation = add(layers=ALL)
    operation.site = capture_pb2.SITE_Q
    assert resolve_spec(steered(operation), HYBRID).steering.operations[0].layers == layer_list(1, 3)


def test_a_layer_without_the_site_is_refused_by_name():
    operation = add(layers=layer_list(0, 1))
    operation.site = capture_pb2.SITE_Q
    for spec in (
        capturing(layer_list(0, 1), sites=BOTH),
        capturing(None, sites=BOTH, site_layers=[layer_list(2), layer_list(0)]),
        steered(operation),
    ):
        failure = refusal(resolve_spec, spec, HYBRID)
        assert failure.reason_name == "UNKNOWN_LAYER"
        assert failure.message == (
            "Layer 0 of tiny has no SITE_Q. The layers that do are 1, 3. Select these, or all. The sites of layer 0 on "
            "this server are SITE_RESID_POST."
        )


def test_the_same_layers_at_all_sites_are_the_captures_layers():
    sites = [capture_pb2.SITE_ATTN_OUT, capture_pb2.SITE_RESID_POST]
    resolved = resolve_spec(capturing(None, sites=sites, site_layers=[ALL, layer_list(0, 1, 2, 3)]), FACTS).capture
    assert resolved == resolve_spec(capturing(ALL, sites=sites), FACTS).capture
    one = resolve_spec(capturing(None, site_layers=[layer_list(2)]), FACTS).capture
    assert one == resolve_spec(capturing(layer_list(2)), FACTS).capture


def test_a_flush_interval_out_of_range_is_refused():
    failure = refusal(resolve_spec, capturing(flush_interval=33), FACTS)
    assert (failure.reason_name, failure.metadata) == ("INVALID_FIELD", {"field": "capture.flush_interval"})


def test_explicit_capture_fields_are_kept():
    spec = capture_pb2.CaptureSpec(
        layers=layer_list(1, 3),
        sites=[capture_pb2.SITE_RESID_POST],
        positions=select((-3, None), phases=[PROMPT], every=2),
        encoding=capture_pb2.ENCODING_RAW,
        overflow=capture_pb2.OVERFLOW_POLICY_SHED,
        before_steering=True,
        reduction=capture_pb2.REDUCTION_MEAN,
        flush_interval=5,
    )
    assert resolve_spec(inference_pb2.RequestSpec(capture=spec), FACTS).capture == spec


def test_an_operations_layers_become_a_list():
    (operation,) = resolve_spec(steered(add()), FACTS).steering.operations
    assert operation == add(layers=layer_list(0, 1, 2, 3))


def test_steering_without_operations_is_none():
    assert resolve_spec(steered(), FACTS).steering is None


def test_the_clients_spec_is_not_changed():
    spec = capturing()
    resolve_spec(spec, FACTS)
    assert spec == capturing()


def test_each_vector_is_needed_once_and_in_order():
    resolved = resolve_spec(steered(add(B), ablate(A), add(B)), FACTS)
    assert resolved.shared.digests == [B, A]


def test_vectors_that_need_a_direction_are_known():
    resolved = resolve_spec(steered(add(b"c" * 32), ablate(A), cap(B, max=1.0), add(A)), FACTS)
    assert directions_of(resolved.steering) == {A, B}


def salt(*operations, prompt_tokens=10):
    return resolve_spec(steered(*operations), FACTS).shared.cache_salt(prompt_tokens)


def test_requests_that_are_not_steered_share_their_cache():
    assert salt() is None
    assert resolve_spec(capturing(), FACTS).shared.cache_salt(10) is None


def test_equal_steering_shares_its_cache():
    assert salt(add(), cap(max=2.0)) == salt(add(), cap(max=2.0))
    assert salt(add(layers=ALL)) == salt(add(layers=layer_list(0, 1, 2, 3)))


@pytest.mark.parametrize(
    "other",
    [
        [add(B)],
        [add(scale=1.5)],
        [add(layers=layer_list(1))],
        [add(positions=select((3, None)))],
        [ablate(scale=1.0)],
        [add(), add()],
    ],
    ids=["digest", "scale", "layers", "positions", "kind", "number"],
)
def test_other_steering_has_another_cache(other):
    assert salt(*other) != salt(add())


def test_the_order_of_operations_counts():
    assert salt(add(), ablate()) != salt(ablate(), add())


@pytest.mark.parametrize("positions", [None, select((0, 7)), select((3, None), every=2)])
def test_the_prompts_length_does_not_matter_to_absolute_positions(positions):
    assert salt(add(positions=positions), prompt_tokens=10) == salt(add(positions=positions), prompt_tokens=11)


@pytest.mark.parametrize(
    "positions",
    [select((-1, None)), select((0, -2)), select(phases=[PROMPT]), select(phases=[GENERATED])],
    ids=["last token", "all but the last", "prompt", "generated"],
)
def test_the_prompts_length_matters_to_positions_relative_to_its_end(positions):
    """The second turn of a chat starts with the tokens of the first, but steers other positions of them."""
    first, second = (salt(add(), add(positions=positions), prompt_tokens=tokens) for tokens in (10, 11))
    assert first != second


def bias(token_id, value=1.0):
    return inference_pb2.LogitBias(token_id=token_id, bias=value)


BAD_SAMPLING = {
    "temperature": {"temperature": 2.5},
    "top_p": {"top_p": 0.0},
    "stop": {"stop": ["x"] * 17},
    "num_sequences": {"num_sequences": 0},
    "min_tokens": {"min_tokens": 17},
    "seed": {"seed": 1 << 63},
    "top_k": {"top_k": 1 << 31},
}
OTHER_BAD_SAMPLING = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": math.nan}),
    ("stop", {"stop": ["x", ""]}),
    ("num_sequences", {"num_sequences": 65}),
    ("min_tokens", {"min_tokens": 4, "max_tokens": 3}),
    ("min_tokens", {"min_tokens": 1, "max_tokens": 0}),
    ("stop_token_ids", {"stop_token_ids": [FACTS.vocab_size]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}),
    ("min_p", {"min_p": 1.5}),
    ("min_p", {"min_p": math.nan}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("presence_penalty", {"presence_penalty": math.nan}),
    ("frequency_penalty", {"frequency_penalty": 2.1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("repetition_penalty", {"repetition_penalty": math.nan}),
    ("logit_bias", {"logit_bias": [bias(FACTS.vocab_size)]}),
    ("logit_bias", {"logit_bias": [bias(1, math.inf)]}),
    ("logit_bias", {"logit_bias": [bias(1), bias(1)]}),
    ("bad_words", {"bad_words": [" "]}),
    ("bad_words", {"bad_words": ["x"] * 129}),
    ("logprobs", {"logprobs": FACTS.max_logprobs + 1}),
    ("prompt_logprobs", {"prompt_logprobs": FACTS.max_logprobs + 1}),
    ("json_schema", {"json_schema": ""}),
    ("json_schema", {"json_schema": "{"}),
    ("json_schema", {"json_schema": "[" * 60000}),
    ("json_schema", {"json_schema": "[1]"}),
    ("json_schema", {"json_schema": "{" + " " * 65536 + "}"}),
    ("regex", {"regex": ""}),
    ("regex", {"regex": "a\0"}),
    ("regex", {"regex": "ä" * 32769}),
]


@pytest.mark.parametrize(("field", "parameters"), [*BAD_SAMPLING.items(), *OTHER_BAD_SAMPLING])
def test_sampling_out_of_range_is_refused(field, parameters):
    failure = refusal(check_sampling, inference_pb2.SamplingParameters(**parameters), FACTS)
    assert (failure.reason_name, failure.metadata) == ("INVALID_FIELD", {"field": f"sampling.{field}"})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 2.1}, "temperature must be from 0 to 2, not 2.1."),
        ({"top_p": 1.0000001}, "top_p must be above 0 and at most 1, not 1.0000001."),
        ({"seed": 1 << 63}, "seed must be at most 9223372036854775807, not 9223372036854775808."),
        ({"min_p": math.nan}, "min_p must be from 0 to 1, not nan."),
        ({"stop": ["x"] * 17}, "stop must be at most 16 strings, none empty."),
    ],
)
def test_a_refusal_names_the_number(parameters, message):
    assert refusal(check_sampling, inference_pb2.SamplingParameters(**parameters), FACTS).message == message


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0},
        {"max_tokens": 1, "min_tokens": 1, "temperature": 2.0, "num_sequences": 64, "stop": ["x"] * 16},
        {"seed": (1 << 63) - 1, "min_tokens": 16},
        {"max_tokens": 0},
        {
            "stop_token_ids": [FACTS.vocab_size - 1] * 64,
            "min_p": 1.0,
            "presence_penalty": -2.0,
            "frequency_penalty": 2.0,
        },
        {"repetition_penalty": 0.01, "logit_bias": [bias(FACTS.vocab_size - 1, -1e30)], "bad_words": ["x"] * 128},
        {"logprobs": FACTS.max_logprobs, "prompt_logprobs": 0, "json_schema": "{}"},
        {"regex": "ä" * 32768},
    ],
)
def test_sampling_in_range_is_valid(parameters):
    check_sampling(inference_pb2.SamplingParameters(**parameters), FACTS)


def test_a_prompt_needs_tokens():
    assert refusal(check_prompt, [], inference_pb2.SamplingParameters(), FACTS).reason_name == "EMPTY_PROMPT"


@pytest.mark.parametrize(("tokens", "parameters"), [(17, {}), (30, {"max_tokens": 3}), (32, {"max_tokens": 0})])
def test_prompt_and_reply_must_fit_the_context(tokens, parameters):
    failure = refusal(check_prompt, [1] * tokens, inference_pb2.SamplingParameters(**parameters), FACTS)
    assert (failure.reason_name, failure.metadata) == (
        "PROMPT_TOO_LONG",
        {"prompt_tokens": str(tokens), "limit": "32"},
    )


@pytest.mark.parametrize(("tokens", "parameters"), [(16, {}), (31, {"max_tokens": 1}), (31, {"max_tokens": 0})])
def test_prompt_and_reply_may_fill_the_context(tokens, parameters):
    check_prompt([1] * tokens, inference_pb2.SamplingParameters(**parameters), FACTS)


def test_a_capture_whose_manifest_would_not_fit_is_refused():
    many = inference_pb2.SamplingParameters(num_sequences=64, max_tokens=4096)
    failure = refusal(check_capture_size, capture_pb2.CaptureSpec(), 1000, many)
    assert (failure.reason_name, failure.metadata["field"]) == ("INVALID_FIELD", "sampling.num_sequences")
    check_capture_size(None, 1000, many)
    check_capture_size(capture_pb2.CaptureSpec(), 1000, inference_pb2.SamplingParameters(max_tokens=4096))
    at_seven = capture_pb2.CaptureSpec(sites=range(1, 8))
    long = inference_pb2.SamplingParameters(max_tokens=100_000)
    assert "at 7 sites has at most 74898 tokens" in str(refusal(check_capture_size, at_seven, 1000, long))
    check_capture_size(capture_pb2.CaptureSpec(sites=range(1, 5)), 1000, long)


SCORED = SimpleNamespace(**vars(FACTS), probe_sites=(capture_pb2.SITE_RESID_POST,))


def asking(**parts):
    return inference_pb2.RequestSpec(capture=capturing().capture, **parts)


PROBES = probe_pb2.ProbeSpec(
    probes=[probe_pb2.Probe(name="p", layer=1, outputs=[probe_pb2.ProbeOutput(digest=bytes(32), bias=0.5)])],
    rules=[rule_pb2.Rule(name="r", probe="p", above=0.5)],
)


@pytest.mark.parametrize(
    "spec",
    [
        inference_pb2.RequestSpec(),
        capturing(),
        capturing(layer_list(1, 3)),
        capturing(labels=[label("a", "b")], flush_interval=3),
        asking(steering=steering_pb2.SteeringSpec(updatable=True)),
        asking(steering=steering_pb2.SteeringSpec(operations=[add()]), probes=PROBES),
    ],
)
def test_a_spec_that_is_resolved_again_is_the_same_and_shares_all_but_what_is_its_own(spec):
    resolver, wanted = SpecResolver(SCORED), resolve_spec(spec, SCORED)
    first = resolver.resolve(spec)
    other = inference_pb2.RequestSpec()
    other.CopyFrom(spec)
    other.request_id = "other"
    if other.HasField("capture"):
        other.capture.labels.add(name="number", integer=7)
    for _ in range(3):
        assert resolver.resolve(spec) == wanted
        assert resolver.resolve(spec).shared is first.shared
        found = resolver.resolve(other)
        assert found.shared is first.shared
        assert found.request_id == "other"
        assert replace(found, request_id="third").shared is first.shared, "vllm serve changes the ID"
        if found.capture is not None:
            assert list(found.capture.labels) == list(other.capture.labels)
            assert not found.shared.capture.labels


def test_an_empty_capture_is_not_taken_for_none():
    resolver = SpecResolver(SCORED)
    assert resolver.resolve(inference_pb2.RequestSpec()).capture is None
    with pytest.raises(Failure, match="name at least one layer"):
        resolver.resolve(inference_pb2.RequestSpec(capture=capture_pb2.CaptureSpec()))


def test_an_invalid_spec_is_refused_each_time():
    resolver = SpecResolver(SCORED)
    for _ in range(2):
        with pytest.raises(Failure, match="layer"):
            resolver.resolve(capturing(layer_list(4)))
        with pytest.raises(Failure, match="label"):
            resolver.resolve(capturing(labels=[label("a b", "c")]))


def test_parts_are_kept_whatever_the_others_and_the_labels_are(monkeypatch):
    calls = []
    for name in ("resolve_capture", "resolve_steering", "resolve_probes"):
        plain = getattr(specs, name)
        monkeypatch.setattr(specs, name, lambda *given, name=name, plain=plain: calls.append(name) or plain(*given))
    resolver = SpecResolver(SCORED)
    for number in range(20):
        spec = capturing(labels=[label("number", str(number))])
        spec.steering.operations.add().CopyFrom(add(scale=1.0 + number))
        spec.probes.CopyFrom(PROBES)
        assert resolver.resolve(spec).capture.labels == spec.capture.labels
    assert (calls.count("resolve_capture"), calls.count("resolve_probes")) == (1, 1)
    assert calls.count("resolve_steering") == 20


def test_the_parts_used_last_are_kept_up_to_a_number_and_a_size():
    made = []
    kept = KeptParts(lambda *parts: made.append(parts) or object())
    first = kept(b"first", None)
    for number in range(200):
        assert kept(bytes([number]), None) is kept(bytes([number]), None)
        assert kept(bytes([number]), b"") is not kept(bytes([number]), None)
        assert kept(b"first", None) is first, "it is used"
    assert len(kept._kept) == 64
    kept(bytes([0]), None)
    assert made.count((bytes([0]), None)) == 2
    large = [bytes(1 << 20) + bytes([number]) for number in range(4)]
    for part in large:
        assert kept(part) is kept(part)
    assert list(kept._kept) == [(part,) for part in large[1:]]
    assert kept._bytes == sum(map(len, large[1:]))
    kept(bytes(5 << 20))
    assert list(kept._kept) == [(part,) for part in large[1:]], "what is never kept displaces nothing"


def test_what_is_derived_from_a_spec_is_kept_with_it_up_to_a_number():
    spec, made = SharedSpec(), []
    for number in range(40):
        for _ in range(2):
            assert spec.derived(number, lambda number=number: made.append(number) or number) == number
        assert spec.derived("used", lambda: made.append("used")) is None
    assert made == [0, "used", *range(1, 40)]
    assert len(spec._derived) == 16
    assert spec == SharedSpec()
