"""The bound on a request's room in the program tables: no request exceeds it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.gpu.tables import ProgramTable
from inference_svc.taps.plan import Gate, Kind, Operation, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.demand import demand_of
from inference_svc.taps.steps.layout import RequestState, StepPlanner
from tests.inference.taps_support import CPU, GENERATED, PROMPT, capture, select

LAYERS = 4
selections = st.builds(
    lambda ranges, phases, every: select(*ranges, phases=phases, every=every),
    st.lists(st.tuples(st.integers(0, 60), st.integers(60, 90)), max_size=3),
    st.sampled_from([(), (PROMPT,), (GENERATED,)]),
    st.sampled_from([0, 0, 1, 2, 3]),
)
operations = st.builds(
    lambda row, layers, positions, gate: Operation(Kind.ADD, row, tuple(sorted(layers)), positions, gate=gate),
    st.integers(0, 3),
    st.sets(st.integers(0, LAYERS - 1), min_size=1),
    selections,
    st.sampled_from([None, Gate(1, 2.0)]),
)


@settings(deadline=None)
@given(st.lists(operations, max_size=6), st.none() | selections)
def test_no_request_takes_more_room_than_its_bound(steering, captured):
    wanted = capture(layers=range(LAYERS), positions=captured) if captured else None
    plan = RequestPlan(40, wanted, tuple(steering))
    demand = demand_of([(item.layers, item.positions, item.gate is not None) for item in steering], captured)
    planner = StepPlanner(None)  # steering only: captured positions are divided in the same way
    planner.add_request(RequestState(RequestPlan(40, None, plan.operations)), 0, 0, 100)
    layout = planner.finish()
    assert len(layout.programs) <= demand.programs
    table = ProgramTable(max(demand.programs, 1), demand.entries, TapPoints(0, LAYERS), CPU)
    numbers = table.place(layout.programs)  # raises TablesFullError if they do not fit
    assert len(set(numbers.tolist())) == len(numbers)


def test_common_requests_have_a_small_demand():
    every_layer = [((layer,), select(), False) for layer in range(36)]
    assert demand_of(every_layer, select()) == (1, 36)
    assert demand_of([(range(36), select(), False)] * 256, None) == (1, 256)
    assert demand_of([(range(36), select(), True)] * 256, None) == (1, 512)
    assert demand_of(every_layer, select(phases=(GENERATED,))) == (2, 72)
    assert demand_of([], select(*[(2 * at, 2 * at) for at in range(64)])) == (2, 0)


def test_fragmented_table_room_is_reclaimed():
    from inference_svc.taps.steps.programs import Program, Step

    def program(first, count):
        return Program.make(steps=[Step(Kind.ADD, row, (0,), 1.0, 0.0, 0.0) for row in range(first, first + count)])

    table = ProgramTable(8, 8, TapPoints(0, 1), CPU)
    kept = [program(at, 2) for at in (0, 10, 20, 30)]
    table.place(kept)
    wanted = [kept[1], program(40, 6)]  # before and after the entries of the kept program, 2 and 4 are free
    numbers = table.place(wanted)
    first, count = table.lines[numbers[1], 1, :2].tolist()
    assert table.entries[first : first + count, 0].tolist() == list(range(40, 46))  # ADD is 0, so these are vectors
