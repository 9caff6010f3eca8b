"""The taps of a worker as a whole, compared with a slow model of the expected results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.plan import STEERING_KINDS, Kind, Operation, RequestPlan
from tests.inference.taps_support import ATTN, DTYPES, GENERATED, MLP, POST, PRE, PROMPT, Model, Worker, capture, select

HIDDEN = 6
MODEL_LAYERS = range(5)
VECTORS = np.random.default_rng(1).standard_normal((4, HIDDEN)).astype(np.float32)
MAX_CHUNK = 70


@st.composite
def selections(draw):
    ranges = []
    for _ in range(draw(st.integers(0, 2))):
        first = draw(st.integers(-40, 80))
        last = draw(st.none() | st.integers(first, 80 if first >= 0 else -1))
        ranges.append((first, last))
    phases = draw(st.lists(st.sampled_from([PROMPT, GENERATED]), unique=True))
    return select(*ranges, phases=phases, every=draw(st.sampled_from([0, 0, 1, 2, 7])))


def layer_sets():
    """Few, so that requests often share a program."""
    return st.sampled_from([tuple(MODEL_LAYERS), (0, 4), (1, 2, 3), (2,)])


@st.composite
def operations(draw):
    bounds = sorted(draw(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=2)))
    return Operation(
        kind=draw(st.sampled_from(STEERING_KINDS)),
        row=draw(st.integers(0, len(VECTORS) - 1)),
        layers=draw(layer_sets()),
        positions=draw(selections()),
        scale=draw(st.floats(-4, 4, width=32)),
        low=draw(st.sampled_from([bounds[0], float("-inf")])),
        high=draw(st.sampled_from([bounds[1], float("inf")])),
    )


@st.composite
def plans(draw, name):
    """A plan, or None for a request without work for the taps."""
    wanted = draw(
        st.none()
        | st.builds(
            capture,
            st.just(f"capture of {name}"),
            layer_sets(),
            selections(),
            sites=st.sampled_from([(POST,), (POST,), (PRE,), (POST, PRE), (ATTN, MLP), (POST, PRE, ATTN, MLP)]),
            before_steering=st.booleans(),
            flush_interval=st.sampled_from([1, 3, 32]),
        )
    )
    steering = tuple(draw(st.lists(operations(), max_size=3)))
    if not wanted and not steering:
        return None
    return RequestPlan(draw(st.integers(1, 100)), wanted, steering)


@dataclass
class Request:
    """A request as a scheduler sees it."""

    name: str
    plan: RequestPlan | None
    prompt: int
    known: int
    """Tokens of the prompt and of the reply so far."""
    computed: int
    """Tokens in the KV cache. More than 0 at the start if the prefix cache had the prompt's first tokens."""
    admitted: bool = False


@dataclass
class Step:
    """The arguments of `Worker.step`."""

    rows: list
    admitted: list
    finished: list
    padding: int


@st.composite
def schedules(draw):
    """Steps as vLLM makes them: chunked prefill, decodes, preemption and ends at any time, rows in any order."""
    random = draw(st.randoms(use_true_random=False))
    waiting = [_request(draw, f"r{number}") for number in range(draw(st.integers(1, 4)))]
    running, steps, ended = [], [], []
    while (waiting or running or ended) and len(steps) < 60:
        if waiting and (not running or random.random() < 0.5):
            running.append(waiting.pop())
        step = Step([], [], ended + ["nobody"] * (random.random() < 0.1), random.choice([0, 0, 3]))
        ended = []
        for request in list(running):
            _schedule(random, request, step)
            if request.admitted and random.random() < 0.08:
                running.remove(request)
                ended.append(request.name)
        random.shuffle(step.rows)
        steps.append(step)
    steps.append(Step([], [], ended + [request.name for request in running], 0))
    return steps


def _request(draw, name):
    plan = draw(plans(name))
    prompt = plan.prompt_tokens if plan else draw(st.integers(1, 100))
    cached = draw(st.just(0) | st.integers(0, prompt - 1))
    return Request(name, plan, prompt, prompt, cached)


def _schedule(random, request, step):
    """Let one request compute in a step, or wait, or be preempted."""
    fate = random.random()
    if request.admitted and fate < 0.08:
        request.computed = 0
        return
    if request.admitted and fate < 0.2:
        return
    if not request.admitted or (request.computed == 0 and random.random() < 0.5):
        step.admitted.append((request.name, request.plan))  # a preempted request may be reported as new
        request.admitted = True
    count = random.randint(1, min(request.known - request.computed, MAX_CHUNK))
    step.rows.append((request.name, request.computed, count))
    request.computed += count
    request.known += request.computed == request.known


def make_tensors(step, number, layers, dtype, with_residual):
    total = sum(count for _, _, count in step.rows) + step.padding
    random = torch.Generator().manual_seed(number)
    places = [(PRE, layers[0])] + [(site, layer) for layer in layers for site in (ATTN, MLP, POST)]
    return {
        place: tuple(
            torch.randn(total, HIDDEN, generator=random).to(dtype) if wanted else None
            for wanted in (True, with_residual and place[0] not in (ATTN, MLP))
        )
        for place in places
    }


def as_numpy(tensor, dtype):
    kind = DTYPES[dtype][0]
    return None if tensor is None else tensor.view(torch.uint8).numpy().copy().view(kind)


def sums(tensors, dtype):
    """The rows at each place, rounded to the model's dtype."""
    result = {}
    for place, (hidden, residual) in tensors.items():
        total = as_numpy(hidden, dtype)
        result[place] = total if residual is None else total + as_numpy(residual, dtype)
    return result


def check_steering(model, step, tensors, originals, dtype):
    owners = [(name, first + at) for name, first, count in step.rows for at in range(count)]
    owners += [("padding", 0)] * step.padding
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    for place, (hidden, residual) in tensors.items():
        now, delayed = as_numpy(hidden, dtype), as_numpy(residual, dtype)
        for row, (name, position) in enumerate(owners):
            before = originals[place][row]
            is_after, layer = place[0] == POST, place[1]
            wanted = model.steered(name, position, layer, before, None if delayed is None else delayed[row])
            wanted = wanted if is_after else None
            if wanted is None:
                assert now[row].tobytes() == before.tobytes(), f"{name}'s row was changed"
            else:
                np.testing.assert_allclose(now[row].astype(np.float64), wanted, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=150, deadline=None)
@given(
    steps=schedules(),
    stage=st.sampled_from([range(5), range(1, 4)]),
    with_residual=st.booleans(),
    largest_block=st.sampled_from([0, 200, 1000]),
)
def test_taps_agree_with_the_model(dtype, steps, stage, with_residual, largest_block):
    size = pool_size(steps, len(stage))
    worker = Worker(hidden=HIDDEN, layers=stage, dtype=dtype, rows=size, largest_block=largest_block, vectors=VECTORS)
    model = Model(stage, VECTORS, largest_block)
    for number, step in enumerate(steps):
        tensors = make_tensors(step, number, stage, dtype, with_residual)
        originals = {place: as_numpy(hidden, dtype) for place, (hidden, _) in tensors.items()}
        before = sums(tensors, dtype)
        worker.step(step.rows, admitted=step.admitted, finished=step.finished, tensors=tensors)
        left = model.begin_step(step.finished, step.admitted)
        check_steering(model, step, tensors, originals, dtype)
        left += model.run(step.rows, before, sums(tensors, dtype))
        check_shipped(model, worker.ring.take(), left)
        assert worker.pool.free_rows == size - sum(rows_held(model, request) for request in model.requests.values())
    assert lost_rows(worker) == model.lost
    assert not model.rows, "wanted rows were not shipped"
    assert worker.pool.free_rows == size
    assert worker.runtime.open_requests == 0


def rows_held(model, request):
    return request.capacity * len(model._own(request.plan.capture)) if request.pending else 0


def pool_size(steps, layers):
    """The pool size that a worker would choose for the largest step and the most requests of this schedule."""
    alive, most = set(), 1
    for step in steps:
        alive = (alive - set(step.finished)) | {name for name, _ in step.admitted}
        most = max(most, len(alive))
    return BlockPool.rows_needed(max(sum(count for _, _, count in step.rows) for step in steps), most, 4 * layers)


def check_shipped(model, chunks, left):
    """Check that these chunks are exactly the expected blocks, and remove their rows from the model."""
    own = {name: sorted({key[1:3] for key in model.rows if key[0] == name}) for name, _ in left}
    expected = Counter(
        (name, site, tuple(positions)) for name, positions in left for site in {site for site, _ in own[name]}
    )
    assert Counter((chunk.capture_id, chunk.header.site, tuple(chunk.positions)) for chunk in chunks) == expected
    for chunk in chunks:
        site = chunk.header.site
        assert [(site, layer) for layer in chunk.header.layers] == [
            key for key in own[chunk.capture_id] if key[0] == site
        ]
        for layer, rows in zip(chunk.header.layers, chunk.rows, strict=True):
            for position, row in zip(chunk.positions, rows, strict=True):
                assert row.tobytes() == model.rows.pop((chunk.capture_id, site, layer, position)).tobytes()


def lost_rows(worker):
    return {
        (capture_id, site, layer, position)
        for capture_id, loss in worker.ring.losses
        for site in loss.sites
        for layer in loss.layers
        for position in loss.positions
    }


def test_requests_are_steered_only_by_their_own_vectors():
    """The rows of a request have the same bits, whatever other requests do."""

    def run(neighbours_row):
        worker = Worker(hidden=HIDDEN, vectors=VECTORS)
        mine = RequestPlan(8, None, (Operation(Kind.ABLATE, 0, (1,), select()),))
        theirs = RequestPlan(8, None, (Operation(Kind.ADD, neighbours_row, (1,), select(), scale=3.0),))
        tensors = {1: (torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(0)), None)}
        worker.step(
            [("theirs", 0, 4), ("mine", 0, 8), ("others", 0, 4)],
            admitted=[("mine", mine), ("theirs", theirs), ("others", theirs)],
            tensors=tensors,
        )
        return tensors[1][0]

    one, other = run(1), run(2)
    assert torch.equal(one[4:12], other[4:12])
    assert not torch.equal(one[:4], other[:4])


def test_operations_on_a_layer_round_once():
    """The second operation gets the first one's float32 result, not its rounding to bfloat16."""
    vectors = [[1.0, 0.0, 0.0, 0.0]]
    add_and_back = tuple(Operation(Kind.ADD, 0, (0,), select(), scale=scale) for scale in (1000.0, -1000.0))
    worker = Worker(hidden=4, dtype=torch.bfloat16, vectors=vectors)
    hidden = torch.full((1, 4), 0.75, dtype=torch.bfloat16)
    worker.step([("a", 0, 1)], admitted=[("a", RequestPlan(1, None, add_and_back))], tensors={0: (hidden, None)})
    assert hidden.tolist() == [[0.75] * 4]


@pytest.mark.parametrize(
    "idle",
    [
        Operation(Kind.ADD, 0, (0,), select(), scale=0.0),
        Operation(Kind.ABLATE, 0, (0,), select(), scale=0.0),
        Operation(Kind.CAP, 0, (0,), select(), low=-1e9, high=1e9),
    ],
    ids=["add", "ablate", "cap"],
)
def test_an_operation_that_moves_nothing_keeps_every_bit_of_the_row(idle):
    """Even with a residual so large that adding and subtracting it would lose digits."""
    worker = Worker(hidden=HIDDEN, vectors=VECTORS)
    hidden, residual = torch.full((1, HIDDEN), 0.1), torch.full((1, HIDDEN), 1e4)
    worker.step([("a", 0, 1)], admitted=[("a", RequestPlan(1, None, (idle,)))], tensors={0: (hidden, residual)})
    assert torch.equal(hidden, torch.full((1, HIDDEN), 0.1))


def test_a_rank_that_only_steers_captures_nothing():
    worker = Worker(hidden=HIDDEN, vectors=VECTORS, captures=False)
    plan = RequestPlan(2, capture(), (Operation(Kind.ADD, 0, (0,), select()),))
    hidden = torch.zeros(2, HIDDEN)
    worker.step([("a", 0, 2)], admitted=[("a", plan)], tensors={0: (hidden, None)})
    worker.step([], finished=["a"])
    np.testing.assert_array_equal(hidden, np.stack([VECTORS[0]] * 2))


def test_the_tap_is_idle_in_a_step_without_tapped_requests():
    worker = Worker(hidden=HIDDEN, vectors=VECTORS)
    plan = RequestPlan(1, capture(), (Operation(Kind.ADD, 0, (0,), select()),))
    worker.step([("a", 0, 1)], admitted=[("a", plan)])
    hidden = torch.zeros(1, HIDDEN)
    worker.step([("b", 0, 1)], finished=["a"], admitted=[("b", None)], tensors={0: (hidden, None)})
    assert not hidden.any()
    assert len(worker.ring.take()) == 1


def test_the_pool_has_room_for_the_worst_step():
    """Every request ends its prompt in this step, with two rows: one fills a block, the other needs a new block."""
    names = ["a", "b", "c", "d"]
    worker = Worker(rows=BlockPool.rows_needed(2 * len(names), len(names), 2))
    plans = [(name, RequestPlan(33, capture(name))) for name in names]
    worker.step([(name, 0, 1) for name in names], admitted=plans)
    for first in range(1, 33, 2):
        worker.step([(name, first, 2) for name in names])
    assert [chunk.positions for chunk in worker.ring.take()] == [[*range(32)], [32]] * len(names)


def test_any_number_of_preempted_requests_may_wait():
    """vLLM may begin a request before those that it preempted: by their priority, for example."""
    worker = Worker(layers=range(1), rows=BlockPool.rows_needed(step_tokens=4, requests=2, units=1))
    free, names = worker.pool.free_rows, [f"r{at}" for at in range(20)]
    for name in names:
        worker.step([(name, 0, 3)], admitted=[(name, RequestPlan(4, capture(name)))])
        worker.step([(name, 3, 1)])
        for position in (4, 5):  # from the second one on in a steady batch
            worker.step([(name, position, 1)])
        worker.step([], preempted=[name])
        assert worker.pool.free_rows == free, "a request that waits takes no room"
    for name in names:
        worker.step([(name, 0, 4)])
        worker.step([(name, 4, 4)])
        worker.step([], finished=[name])
    stored = [(chunk.capture_id, position) for chunk in worker.ring.take() for position in chunk.positions]
    assert sorted(stored) == sorted((name, position) for name in names for position in range(8)), "each row once"


def test_one_block_never_holds_prompt_and_generated_rows():
    """Not even when a step computes rows on both sides of the border."""
    worker = Worker()
    worker.step([("a", 0, 30)], admitted=[("a", RequestPlan(20, capture(layers=(0, 1))))])
    worker.step([], finished=["a"])
    assert [chunk.positions for chunk in worker.ring.take()] == [[*range(20)], [*range(20, 30)]]


def test_rows_that_the_engine_skipped_are_reported_as_lost():
    """A gap around the prompt's end: the prompt's rows are sent, the gap is lost, and the rest is captured."""
    worker = Worker()
    plan = RequestPlan(20, capture(layers=(0, 1), positions=select(every=2)))
    worker.step([("a", 0, 10)], admitted=[("a", plan)])
    worker.step([("a", 23, 2)])
    worker.step([], finished=["a"])
    assert [chunk.positions for chunk in worker.ring.take()] == [[0, 2, 4, 6, 8], [24]]
    ((capture_id, loss),) = worker.ring.losses
    assert capture_id == "capture"
    assert list(loss.positions) == [10, 12, 14, 16, 18, 20, 22]
    assert list(loss.layers) == [0, 1]
    assert "cache" in loss.detail
