"""Request plans: from a checked spec, through vLLM's serialisation, to the worker."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.admission.specs import SpecResolver
from inference_svc.requests.plans import make_plan
from inference_svc.requests.registry import Running
from inference_svc.taps.plan import KEY, Capture, Gate, Kind, Measure, Operation, RequestPlan, SharedPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.treatments import Steering
from residuum.v1 import capture_pb2, inference_pb2, selection_pb2, steering_pb2
from tests.inference.service_support import FACTS
from tests.inference.spec_support import spec_of
from tests.inference.taps_support import GENERATED, PROMPT, select

selections = st.builds(
    lambda first, every, phases: select((first, None), phases=phases, every=every),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(), (PROMPT,)]),
)
layers = st.lists(st.integers(0, 200), unique=True, min_size=1).map(sorted).map(tuple)
plans = st.builds(
    RequestPlan,
    st.integers(1, 2**31),
    st.none()
    | st.builds(
        Capture,
        st.text(),
        st.integers(0, 63),
        layers,
        selections,
        st.lists(st.sampled_from([1, 2, 3, 4]), unique=True, min_size=1).map(tuple),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        flush_interval=st.integers(1, 32),
    ),
    st.lists(
        st.builds(
            Operation,
            st.sampled_from(Kind),
            st.integers(0, 255),
            layers,
            selections,
            st.floats(allow_nan=False),
            st.floats(allow_nan=False),
            st.floats(allow_nan=False),
            gate=st.none()
            | st.builds(
                Gate,
                st.integers(0, 255),
                st.floats(allow_nan=False),
                st.floats(allow_nan=False),
                st.sampled_from(Measure),
            ),
        )
    ).map(tuple),
)


@settings(deadline=None)
@given(plans)
def test_a_plan_survives_the_way_to_the_worker(plan):
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_extra_args()))
    assert RequestPlan.from_extra_args(carried) == plan


def test_a_restored_operation_has_a_kind_and_not_a_number():
    plan = RequestPlan(1, None, (Operation(Kind.CAP, 0, (0,), select()),))
    (operation,) = RequestPlan.from_extra_args(plan.to_extra_args()).operations
    assert operation.kind is Kind.CAP


@pytest.mark.parametrize("extra_args", [None, {}, {"somebody": "else"}])
def test_a_request_without_a_plan_has_none(extra_args):
    assert RequestPlan.from_extra_args(extra_args) is None


def test_other_users_of_extra_args_are_ignored():
    plan = RequestPlan(3)
    assert RequestPlan.from_extra_args({"other": 1, **plan.to_extra_args()}) == plan
    assert list(plan.to_extra_args()) == [KEY]


def running(capture=None, *operations):
    steering = steering_pb2.SteeringSpec(operations=operations) if operations else None
    return Running("request", spec_of("request", capture, steering), was_registered=False)


def layer_list(*numbers):
    return selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=numbers))


A, B = b"a" * 32, b"b" * 32


def test_nothing_to_do_needs_no_plan():
    assert make_plan(running(), 0, 5, {}) is None


def test_a_capture_goes_by_the_requests_name_and_the_sequence():
    spec = capture_pb2.CaptureSpec(
        layers=layer_list(0, 3),
        sites=[capture_pb2.SITE_MLP_OUT, capture_pb2.SITE_RESID_PRE],
        positions=select((-1, None)),
        overflow=capture_pb2.OVERFLOW_POLICY_SHED,
        before_steering=True,
    )
    plan = make_plan(running(spec), 2, 5, {})
    sites = (capture_pb2.SITE_RESID_PRE, capture_pb2.SITE_MLP_OUT)
    wanted = Capture("request", 2, (0, 3), select((-1, None)), sites, sheds=True, before_steering=True)
    assert plan == RequestPlan(5, wanted)


def test_a_rank_captures_the_layers_of_its_stage_and_only_if_it_captures():
    plan = RequestPlan(5, Capture("request", 0, (0, 3, 4), select()), (Operation(Kind.ADD, 0, (0,), select()),))
    second = TapPoints(first_layer=3, num_layers=3)
    assert plan.for_points(second, captures=True).capture.layers == (3, 4)
    assert plan.for_points(TapPoints(6, 2), captures=True) == RequestPlan(5, None, plan.operations)
    assert plan.for_points(second, captures=False) == RequestPlan(5, None, plan.operations)


def test_scores_are_computed_whether_or_not_a_rank_captures():
    score, add = Operation(Kind.SCORE, 0, (0,), select()), Operation(Kind.ADD, 0, (0,), select())
    plan, points = RequestPlan(5, Capture("request", 0, (0,), select()), (score, add)), TapPoints(0, 1)
    assert plan.for_points(points, captures=False, scores=True).operations == (score, add)
    assert plan.for_points(points, captures=True, scores=False).operations == (add,)


def test_each_site_has_its_layers():
    spec = capture_pb2.CaptureSpec(
        layers=layer_list(0, 3, 4),
        sites=[capture_pb2.SITE_K, capture_pb2.SITE_MLP_OUT, capture_pb2.SITE_RESID_POST],
        site_layers=[layer_list(0, 4), layer_list(4), layer_list(0, 3)],
    )
    plan = make_plan(running(spec), 0, 5, {})
    post, out, k = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT, capture_pb2.SITE_K
    assert plan.capture.places == ((post, (0, 3)), (out, (4,)), (k, (0, 4)))
    assert plan.capture.units == 5
    assert RequestPlan.from_extra_args(msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_extra_args()))) == plan

    def places(points):
        part = plan.for_points(points, captures=True)
        return part and part.capture.places

    assert places(TapPoints(0, 3)) == ((post, (0,)),)
    assert places(TapPoints(3, 2)) == ((post, (3,)), (out, (4,)))
    assert places(TapPoints(3, 2, (k,))) == ((k, (4,)),)
    assert places(TapPoints(1, 2)) is None


@pytest.mark.parametrize(("asked", "interval"), [(0, 32), (1, 1), (32, 32)])
def test_a_capture_leaves_as_often_as_it_asks(asked, interval):
    spec = capture_pb2.CaptureSpec(layers=layer_list(0), flush_interval=asked)
    assert make_plan(running(spec), 0, 5, {}).capture.flush_interval == interval


def test_a_capture_waits_unless_it_may_shed():
    spec = capture_pb2.CaptureSpec(layers=layer_list(0), overflow=capture_pb2.OVERFLOW_POLICY_WAIT)
    assert not make_plan(running(spec), 0, 5, {}).capture.sheds


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add": steering_pb2.Add(digest=B, scale=2.5)}, (Kind.ADD, 2.5, -math.inf, math.inf)),
        ({"ablate": steering_pb2.Ablate(digest=B)}, (Kind.ABLATE, 1.0, -math.inf, math.inf)),
        ({"ablate": steering_pb2.Ablate(digest=B, scale=0.0)}, (Kind.ABLATE, 0.0, -math.inf, math.inf)),
        ({"set": steering_pb2.Set(digest=B)}, (Kind.SET, 1.0, -math.inf, math.inf)),
        ({"multiply": steering_pb2.Multiply(digest=B)}, (Kind.MULTIPLY, 1.0, -math.inf, math.inf)),
        ({"cap": steering_pb2.Cap(digest=B, max=0.0)}, (Kind.CAP, 1.0, -math.inf, 0.0)),
        ({"cap": steering_pb2.Cap(digest=B, min=-2.0)}, (Kind.CAP, 1.0, -2.0, math.inf)),
    ],
    ids=["add", "ablate", "ablate nothing", "set", "multiply", "cap above", "cap below"],
)
def test_an_operation_is_resolved_to_the_banks_row(fields, expected):
    item = steering_pb2.SteeringOperation(layers=layer_list(1, 2), positions=select(every=3), **fields)
    (operation,) = make_plan(running(None, item), 0, 5, {A: 0, B: 7}).operations
    assert (operation.kind, operation.scale, operation.low, operation.high) == expected
    assert (operation.row, operation.layers, operation.positions) == (7, (1, 2), select(every=3))


def test_operations_keep_their_order():
    items = [
        steering_pb2.SteeringOperation(layers=layer_list(0), add=steering_pb2.Add(digest=digest, scale=1.0))
        for digest in (A, B, A)
    ]
    plan = make_plan(running(None, *items), 0, 5, {A: 3, B: 1})
    assert [operation.row for operation in plan.operations] == [3, 1, 3]


@pytest.mark.parametrize(
    ("positions", "needs"),
    [
        (select(), True),
        (select(phases=(PROMPT,)), True),
        (select(phases=(GENERATED,)), False),
        (select((-1, -1)), False),
        (select((-1, None)), False),
        (select((-2, None)), True),
        (select((8, 8)), True),
        (select((9, 50)), False),
        (select(phases=(PROMPT,), every=9), True),
    ],
    ids=lambda value: " ".join(str(value).split()),
)
def test_a_capture_of_more_than_the_prompts_last_token_needs_the_whole_prompt(positions, needs):
    """The engine always computes the last token, here at position 9."""
    assert RequestPlan(10, Capture("a", 0, (1,), positions)).needs_whole_prompt is needs


def test_a_prompt_of_one_token_is_always_computed():
    assert not RequestPlan(1, Capture("a", 0, (1,), select())).needs_whole_prompt
    assert not RequestPlan(10).needs_whole_prompt


def carried(plan):
    return RequestPlan.from_extra_args(msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_extra_args())))


RESOLVER = SpecResolver(FACTS)


def labelled(name, *operations):
    labels = [capture_pb2.Label(name="document", text=name)]
    capture = capture_pb2.CaptureSpec(layers=layer_list(0, 2), positions=select((-1, None)), labels=labels)
    steering = steering_pb2.SteeringSpec(operations=operations)
    spec = inference_pb2.RequestSpec(request_id=name, capture=capture, steering=steering)
    return Running(name, RESOLVER.resolve(spec), was_registered=False)


def test_requests_that_differ_in_name_labels_and_prompt_share_the_rest_on_both_sides():
    add = steering_pb2.SteeringOperation(layers=layer_list(1), add=steering_pb2.Add(digest=A, scale=2))
    first, second = (make_plan(labelled(name, add), 0, 5, {A: 3}) for name in ("a", "b"))
    assert first.shared is second.shared
    assert carried(first).shared is carried(second).shared
    assert [carried(plan).capture.capture_id for plan in (first, second)] == ["a", "b"]
    assert make_plan(labelled("a"), 0, 5, {}).shared is not first.shared
    assert make_plan(labelled("a", add), 0, 5, {A: 4}).shared is not first.shared, "the vector moved in the bank"


def test_a_changed_plan_does_not_keep_what_it_was_taken_from():
    plan = make_plan(labelled("a"), 0, 5, {})
    changed = replace(plan, capture=replace(plan.capture, layers=(2,)))
    assert changed.shared is None
    assert carried(changed).capture.layers == (2,)


def test_a_named_capture_has_a_header_of_its_own():
    capture = SharedPlan(Capture("", 0, (0,), select())).capture
    first = capture.named("a", 1)
    parts = first.header_parts
    second = first.named("b", 2)
    assert second == Capture("b", 2, (0,), select())
    assert second.header_parts != parts
    assert first.header_parts == parts


def test_requests_that_do_the_same_share_the_treatments_of_one_prompt_length():
    shared = SharedPlan(None, (Operation(Kind.ADD, 0, (0,), select((-1, None))),))
    first, second, longer = (RequestPlan.of(shared, length, "", 0) for length in (5, 5, 6))
    assert Steering.of(first) is Steering.of(second)
    assert Steering.of(first).stretches(0, 5) != Steering.of(longer).stretches(0, 5), "the last token is elsewhere"
    assert Steering.of(replace(first)) is not Steering.of(first)
