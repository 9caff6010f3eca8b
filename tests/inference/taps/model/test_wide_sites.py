"""Sites whose rows have a width of their own: how they are found, numbered, and captured beside the stream."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from inference_svc.taps import op
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.model.hooked_runs import CannotTapError
from inference_svc.taps.model.insertion import layers_of_sites, put_taps, row_shapes, steering_sites
from inference_svc.taps.model.parts_check import other_projections
from inference_svc.taps.model.structure import observe
from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan
from inference_svc.taps.points import FINAL_NORM, INNER_SITES, WIDE_SITES, RowShape, TapPoints
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from inference_svc.taps.steps.runtimes import TapRuntimes
from inference_svc.taps.vllm.capture_path import CapturePath, points_of
from residuum.v1 import capture_pb2
from tests.inference.taps_support import CPU, select

POST, PRE = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE
*OF_ALL, ROUTER, _, Q_PRE, K_PRE = WIDE_SITES
Q, K, V, Z, ACT = OF_ALL
WIDTHS = {Q: 8, K: 4, V: 4, Z: 8, ACT: 6}
SHAPES = {site: RowShape(width) for site, width in WIDTHS.items()}


class Heads(nn.Module):
    """The part of the attention that combines tokens."""

    def forward(self, query, key, value):
        return query * torch.cat([key + value] * (query.shape[1] // key.shape[1]), dim=1)


class Attention(nn.Module):
    def __init__(self, queries=8, keys=4, values=4):
        super().__init__()
        self.sizes = [queries, keys, values]
        self.qkv, self.heads, self.o_proj = nn.Linear(4, sum(self.sizes)), Heads(), nn.Linear(queries, 4)

    def forward(self, hidden):
        return self.o_proj(self.heads(*self.qkv(hidden).split(self.sizes, dim=-1)))


class Turned(Attention):
    """Normalises the queries, and turns queries and keys in place, as a rotary embedding does."""

    order = (0, 1, 2)

    def __init__(self, queries=8, keys=4, values=4):
        super().__init__(queries, keys, values)
        self.norm = nn.LayerNorm(queries)

    def forward(self, hidden):
        parts = self.qkv(hidden).split(self.sizes, dim=-1)
        query, key, value = (parts[index] for index in self.order)
        turned = self.norm(query)
        key.mul_(torch.arange(1.0, 1.0 + key.shape[-1])).add_(1.0)
        return self.o_proj(self.heads(turned.flip(-1), key, value))


class Swapped(Turned):
    """Has the keys before the queries."""

    order = (1, 0, 2)

    def __init__(self):
        super().__init__(4, 4, 4)


class Normed(Turned):
    """Normalises the values."""

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).split(self.sizes, dim=-1)
        return self.o_proj(self.heads(query, key, value / 2))


class MLP(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, hidden):
        return self.down(self.up(hidden).relu())


class Experts(nn.Module):
    """One module that takes what the MLP takes, and returns what it returns."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Linear(4, 4)

    def forward(self, hidden):
        return self.experts(hidden)


class Mixture(nn.Module):
    """A router, and experts beside it."""

    def __init__(self, gate=None):
        super().__init__()
        self.gate, self.experts = gate or nn.Linear(4, 3), nn.Linear(4, 3 * 4)

    def forward(self, hidden):
        weights = self.gate(hidden).softmax(-1)
        return (weights[:, :, None] * self.experts(hidden).view(-1, 3, 4)).sum(1)


class Layer(nn.Module):
    def __init__(self, attention=None, mlp=None):
        super().__init__()
        self.attn, self.mlp = attention or Attention(), mlp or MLP()

    def forward(self, hidden):
        hidden = hidden + self.attn(hidden)
        return hidden + self.mlp(hidden)


def is_heads(module):
    return isinstance(module, Heads)


def structure_of(*layers, num_experts=0):
    model, tokens = nn.Sequential(*layers), torch.randn(3, 4)

    def run():
        with torch.no_grad():
            return model(tokens.clone())

    numbered = dict(enumerate(layers))
    return numbered, observe(model, numbered, is_heads, run, num_experts), run


def shapes(layers, structure, sites):
    return row_shapes(layers, structure, sites, lambda _, entry: RowShape(entry.width))


def tap_calling(see):
    """Return a tap that calls a function with the rows and the point, and changes nothing."""

    def tap(hidden, residual, point):
        see(hidden, point)

    def tap_copy(hidden, point):
        see(hidden, point)
        return hidden.clone()

    return SimpleNamespace(tap=tap, tap_copy=tap_copy)


def test_heads_and_neurons_are_found_and_tapped(monkeypatch):
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    numbered, structure, run = structure_of(Layer(), Layer(), Layer())
    assert shapes(numbered, structure, [POST, *OF_ALL]) == SHAPES
    points, seen = points_of(0, 3, SHAPES), {}
    groups = [
        tap_calling(lambda hidden, point, group=group: seen.update({(group, point): hidden.clone()}))
        for group in range(len(points.groups))
    ]
    op.install(groups, points.firsts)
    put_taps(numbered, points, structure, [POST, *OF_ALL], lambda norm, point: False)
    run()
    rows = {
        (site, layer): seen[group, own.of(site, layer)]
        for group, own in enumerate(points.groups)
        for site in OF_ALL
        if own.sees(site)
        for layer in numbered
    }
    with torch.no_grad():
        for index, layer in numbered.items():
            query, key, value, z, act = (rows[site, index] for site in OF_ALL)
            assert all(rows[site, index].shape == (3, WIDTHS[site]) for site in OF_ALL)
            torch.testing.assert_close(z, layer.attn.heads(query, key, value))
            before = seen[0, points.groups[0].after(index - 1)] if index else None
            after = seen[0, points.groups[0].after(index)]
            if before is not None:
                torch.testing.assert_close(torch.cat([query, key, value], 1), layer.attn.qkv(before))
                middle = before + nn.functional.linear(z, layer.attn.o_proj.weight, layer.attn.o_proj.bias)
                added = nn.functional.linear(act, layer.mlp.down.weight, layer.mlp.down.bias)
                torch.testing.assert_close(after, middle + added)


def test_queries_and_keys_are_tapped_as_their_projection_returns_them(monkeypatch):
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    numbered, structure, run = structure_of(Layer(Turned()), Layer(Turned()))
    assert not other_projections(nn.Sequential(*numbered.values()), is_heads, structure, run)
    found = shapes(numbered, structure, [POST, K, Q_PRE, K_PRE])
    assert found == {Q_PRE: RowShape(8), K: RowShape(4), K_PRE: RowShape(4)}
    points, seen, projected = points_of(0, 2, found), {}, {}
    groups = [
        tap_calling(lambda hidden, point, group=group: seen.update({(group, point): hidden.clone()}))
        for group in range(len(points.groups))
    ]
    for index, layer in numbered.items():
        layer.attn.qkv.register_forward_hook(lambda *call, index=index: projected.update({index: call[-1].clone()}))
    op.install(groups, points.firsts)
    expected = run()
    put_taps(numbered, points, structure, [POST, K, Q_PRE, K_PRE], lambda norm, point: False)
    assert torch.equal(run(), expected)
    for group, own in enumerate(points.groups[1:], start=1):
        for layer in numbered:
            if own.sees(Q_PRE):
                assert torch.equal(seen[group, own.of(Q_PRE, layer)], projected[layer][:, :8])
            else:
                assert torch.equal(seen[group, own.of(K_PRE, layer)], projected[layer][:, 8:12])
                assert not torch.equal(seen[group, own.of(K, layer)], projected[layer][:, 8:12])
    assert steering_sites([Q_PRE, K_PRE], structure, found) == [POST]


def test_what_is_not_the_projection_of_queries_and_keys_is_not_taken_for_it():
    layers = [Layer(Turned(4, 4, 4)), Layer(Swapped())]
    _, structure, run = structure_of(*layers)
    assert structure.wide[Q_PRE].keys() == {0, 1}
    assert other_projections(nn.Sequential(*layers), is_heads, structure, run) == [1]
    with pytest.raises(CannotTapError, match=r"^q_pre and k_pre cannot be captured: looked in Layer"):
        shapes(*structure_of(Layer(Normed()))[:2], [Q_PRE, K_PRE])


@pytest.mark.parametrize(
    ("layers", "sites", "told"),
    [
        (
            [Layer(mlp=Experts())] * 1,
            [Z, ACT],
            r"^mlp_act cannot be captured: looked in Layer .* \(layers \[0\]\).* has q, k, v, z, q_pre and k_pre",
        ),
        ([Layer(Attention(8, 4, 8).requires_grad_())] * 1, [K, V], r"^k and v cannot be captured"),
        ([Layer(Attention(6, 4, 4)), Layer(Attention(6, 4, 4))], [Q, ACT], r"^q cannot be captured"),
        ([Layer(), Layer(mlp=MLP(8))], [ACT], r"^mlp_act cannot be captured: .* have 6 or 8 elements"),
    ],
    ids=["experts", "values of another width", "queries that are no multiple", "another width in a layer"],
)
def test_what_a_model_lacks_is_refused_by_name(monkeypatch, layers, sites, told):
    def combine(module, query, key, value):
        return query * (key.sum(-1) + value.sum(-1))[:, None]

    monkeypatch.setattr(Heads, "forward", combine)
    numbered, structure, _ = structure_of(*layers)
    with pytest.raises(CannotTapError, match=told):
        shapes(numbered, structure, sites)


def test_the_attention_takes_the_copies_of_heads(monkeypatch):
    """Otherwise the compiler would drop the op."""
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    numbered, structure, run = structure_of(Layer())
    plain, points = run(), points_of(0, 1, {V: SHAPES[V]})
    taps = [SimpleNamespace(tap=lambda *_: None, tap_copy=lambda hidden, point: hidden + scale) for _ in points.groups]
    op.install(taps, points.firsts)
    put_taps(numbered, points, structure, [V], lambda norm, point: False)
    scale = 0.0
    assert torch.equal(run(), plain)
    scale = 1.0
    assert not torch.equal(run(), plain)


def test_layers_without_a_site_are_left_out(monkeypatch):
    """As in a model with state spaces in some layers, or experts in place of the MLP in some."""
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    monkeypatch.setattr(
        Heads, "forward", lambda module, query, key, value: query * (key.sum(-1) + value.sum(-1))[:, None]
    )
    numbered, structure, run = structure_of(Layer(), Layer(Attention(6, 4, 4), Experts()), Layer(mlp=Experts()))
    sites = [POST, Q, ACT]
    assert shapes(numbered, structure, sites) == {Q: SHAPES[Q], ACT: SHAPES[ACT]}
    assert layers_of_sites(numbered, structure, sites) == [[0, 1, 2], [0, 2], [0]]
    points, seen = points_of(0, 3, {Q: SHAPES[Q], ACT: SHAPES[ACT]}), []
    taps = [tap_calling(lambda hidden, point, group=group: seen.extend(group.sites(point))) for group in points.groups]
    op.install(taps, points.firsts)
    put_taps(numbered, points, structure, sites, lambda norm, point: False)
    run()
    assert [place for place in seen if place[0] in (Q, ACT)] == [(Q, 0), (ACT, 0), (Q, 2)]


class Gated(Layer):
    """A layer with a third part after its MLP, as in Gemma 4."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return hidden + self.gate(hidden)


class Unwrapped(nn.Module):
    """A layer whose MLP has no module of its own, as in OPT."""

    def __init__(self):
        super().__init__()
        self.attn, self.fc1, self.fc2 = Attention(), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, hidden):
        hidden = hidden + self.attn(hidden)
        return hidden + self.fc2(self.fc1(hidden).relu())


def test_neurons_are_those_of_the_mlp():
    for layer, projection in ((Gated(), lambda gated: gated.mlp.down), (Unwrapped(), lambda plain: plain.fc2)):
        _, structure, _ = structure_of(layer)
        found = structure.wide[ACT][0]
        assert found.module is projection(layer)
        assert found.width == 6


def test_the_router_of_a_mixture_of_experts_is_found_in_the_layers_that_have_one(monkeypatch):
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    gate = nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))
    numbered, structure, run = structure_of(Layer(), Layer(mlp=Mixture(gate)), num_experts=3)
    found, sites = shapes(numbered, structure, [POST, ROUTER]), [POST, ROUTER]
    assert (found, layers_of_sites(numbered, structure, sites)) == ({ROUTER: RowShape(3)}, [[0, 1], [1]])
    points, seen = points_of(0, 2, found), {}
    groups = [
        tap_calling(lambda hidden, point, group=group: seen.update({(group, point): hidden.clone()}))
        for group in range(len(points.groups))
    ]
    op.install(groups, points.firsts)
    taken = []
    numbered[1].mlp.register_forward_pre_hook(lambda module, arguments: taken.append(arguments[0].clone()))
    put_taps(numbered, points, structure, sites, lambda norm, point: False)
    run()
    logits = seen[1, points.groups[1].of(ROUTER, 1)]
    with torch.no_grad():
        torch.testing.assert_close(logits, gate[0](taken[0]))
    assert steering_sites(sites, structure, found) == [POST]
    with pytest.raises(CannotTapError, match=r"^router_logits cannot be captured: looked in Layer"):
        shapes(*structure_of(Layer(), Layer())[:2], sites)
    two = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    with pytest.raises(CannotTapError, match=r"^router_logits cannot be captured"):
        shapes(*structure_of(Layer(mlp=Mixture(two)), num_experts=3)[:2], sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_float32_are_captured_in_the_models_dtype(dtype):
    points, place = points_of(0, 1, {ROUTER: RowShape(3)}).groups[1], (ROUTER, 0)
    pool = BlockPool(32, 3, dtype, CPU, 0)
    tap = CpuTap(VectorBank(1, 3, CPU), pool, points)
    runtime = TapRuntime(points, tap, pool, None)
    runtime.begin_step([], [("r", RequestPlan(2, Capture("r", 0, (0,), select(), (ROUTER,))))])
    runtime.place(lambda: StepRows(["r"], [0], [2]))
    logits = torch.randn(2, 3)
    tap.tap(logits, None, points.of(*place))
    assert torch.equal(pool.memory[:2], logits.to(dtype))


def test_rows_that_ranks_divide_are_not_steered_and_refused_if_it_is_not_known_how():
    numbered, structure, _ = structure_of(Layer())
    halves = {Q: RowShape(8, 2), Z: RowShape(8, 2), K: RowShape(4), ACT: RowShape(6)}
    found = row_shapes(numbered, structure, [POST, Q, Z, K, ACT], lambda site, _: halves[site])
    assert found == halves
    assert {site: shape.whole for site, shape in found.items()} == {Q: 16, Z: 16, K: 4, ACT: 6}
    assert steering_sites([POST, Q, Z, ACT], structure, found) == [POST, ACT]
    points = points_of(0, 1, found)
    assert [(group.inner, group.can_steer) for group in points.groups[1:]] == [
        ((K,), False),
        ((ACT,), True),
        ((Q, Z), False),
    ]
    with pytest.raises(
        CannotTapError, match=r"^z cannot be captured with tensor parallelism: .* found only that Linear"
    ):
        row_shapes(numbered, structure, [Z, POST, Q], lambda site, _: halves[site] if site == Q else None)


def test_every_place_has_a_number_of_its_own():
    points = points_of(2, 3, SHAPES)
    assert [group.inner for group in points.groups] == [INNER_SITES, (K, V), (ACT,), (Q, Z)]
    numbers = [points.of(site, layer) for site in (POST, *INNER_SITES, *OF_ALL) for layer in (2, 3, 4)]
    numbers.append(points.of(FINAL_NORM, 4))
    assert len(set(numbers)) == len(numbers)
    assert points.groups[0].sites(points.of(FINAL_NORM, 4)) == ((FINAL_NORM, 4),)
    assert points_of(2, 3, {}).groups == (TapPoints(2, 3),)
    for group, first in zip(points.groups, points.firsts, strict=True):
        for point in range(1 + group.num_layers, group.count - 1):  # the last one is after the final norm
            ((site, layer),) = group.sites(point)
            assert points.of(site, layer) == first + point


def test_a_plan_is_divided_by_the_widths_of_its_sites():
    stream, keys, neurons, _ = points_of(0, 2, SHAPES).groups
    operation, wide = Operation(Kind.ADD, 0, (0,), select()), Operation(Kind.SET, 1, (1,), select(), site=ACT)
    plan = RequestPlan(5, Capture("r", 0, (0, 1), select(), (POST, K)), (operation, wide), name="r#0")
    assert plan.for_points(stream, captures=True).capture.sites == (POST,)
    part = plan.for_points(keys, captures=True)
    assert (part.capture.sites, part.operations, part.name) == ((K,), (), "")
    assert plan.for_points(neurons, captures=True) == RequestPlan(5, None, (wide,), name="r#0")
    assert plan.for_points(keys, captures=False) is None
    divided = replace(keys, is_divided=True)  # this rank's parts are needed, whichever rank captures
    assert plan.for_points(divided, captures=False).capture == replace(part.capture, is_own=False)
    assert plan.for_points(divided, captures=True) == part
    assert plan.for_points(stream, captures=False) == RequestPlan(5, None, (operation,), name="r#0")


def test_points_without_work_get_no_plan_unless_its_steering_may_change():
    stream, keys, neurons, heads = points_of(0, 2, SHAPES).groups
    plan = RequestPlan(5, Capture("r", 0, (0, 1), select(), (K,)))
    assert [plan.for_points(group, captures=True) is None for group in (stream, neurons, heads)] == [True] * 3
    named = RequestPlan(5, plan.capture, name="r#0")
    assert [named.for_points(group, captures=True).name for group in (stream, keys, neurons)] == ["r#0", "", "r#0"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The whole path of a rank with rows of three widths; without a store, so only probes capture."""
    monkeypatch.setattr(op._Current, "taps", (), raising=False)
    monkeypatch.setattr(op._Current, "firsts", (), raising=False)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
    )
    points = points_of(0, 2, {K: RowShape(4), ACT: RowShape(6)})
    made = CapturePath(
        config, CPU, points, [RowShape(8), RowShape(4), RowShape(6)], dict.fromkeys([POST, K, ACT], (0, 1)), 4
    )
    made.make_ring(str(tmp_path / "ring"), 1 << 20, [""])
    taps, _ = made.make_taps()
    op.install(taps, points.firsts)
    made.runtime, made.points, made.bank = TapRuntimes(made.runtimes(taps, None)), points, made._all[0].bank
    yield made
    made.producer.close()


def run_step(path, first, count, admitted=(), finished=()):
    """Run a step of one request; return what the model computed, by site and layer."""
    path.runtime.begin_step(list(finished), admitted)
    path.runtime.place(lambda: StepRows(["r"], [first], [count]))
    computed = {}
    for layer in (0, 1):
        for site, width in ((K, 4), (ACT, 6), (POST, 8)):
            rows = torch.randn(count, width)
            computed[site, layer] = rows.clone()
            op.call(rows, None, path.points.of(site, layer))
            computed[{POST: "steered", ACT: "neurons", K: "keys"}[site], layer] = rows
    path.runtime.finish_step()
    return computed


def test_rows_of_all_widths_arrive_and_only_the_stream_is_steered(path):
    capture = Capture("r", 0, (0, 1), select(), (POST, K, ACT), is_probe=True)
    path.bank.load([(1, torch.ones(8).numpy().tobytes())])
    plan = RequestPlan(3, capture, (Operation(Kind.ADD, 1, (1,), select(), scale=2.0),))
    steps = [run_step(path, 0, 3, [("r", plan)])]
    assert path.runtime.open_requests == 1
    steps += [run_step(path, position, 1) for position in (3, 4)]
    path.runtime.begin_step(["r"], [])
    assert path.runtime.open_requests == 0
    found = {}
    for probe in path.take_probe("r"):
        units = [(site, layer) for site, layers in probe.capture.places for layer in layers]
        for unit, rows in zip(units, probe.rows, strict=True):
            found.setdefault(unit, {}).update(zip(probe.positions, rows, strict=True))
    assert found.keys() == {(site, layer) for site in (POST, K, ACT) for layer in (0, 1)}
    for (site, layer), rows in found.items():
        expected = torch.cat([step["steered" if site == POST else site, layer] for step in steps])
        torch.testing.assert_close(torch.stack([rows[position] for position in range(5)]), expected)
    for step in steps:
        torch.testing.assert_close(step["steered", 1], step[POST, 1] + 2.0)
        torch.testing.assert_close(step["steered", 0], step[POST, 0])


def test_rows_of_a_width_of_their_own_are_steered(path):
    """First the neurons of one layer; then, after a change, the stream and the neurons of the other layer."""
    path.load_vectors([(1, torch.ones(8).numpy().tobytes()), (2, torch.arange(6.0).numpy().tobytes())])
    start = Operation(Kind.MULTIPLY, 2, (0,), select(), site=ACT)
    then = (Operation(Kind.ADD, 2, (1,), select(), scale=2.0, site=ACT), Operation(Kind.ADD, 1, (0,), select()))
    steps = [run_step(path, 0, 3, [("r", RequestPlan(3, None, (start,), name="r#0"))])]
    assert path.runtime.change_steering("r#0", then) == 3
    steps += [run_step(path, 3, 1)]
    assert path.runtime.change_steering("r#0", ()) == 4
    steps += [run_step(path, 4, 1)]
    neurons = torch.arange(6.0)
    for step, changes in zip(
        steps,
        [
            {("neurons", 0): lambda x: x * neurons},
            {("neurons", 1): lambda x: x + 2 * neurons, ("steered", 0): lambda x: x + 1},
            {},
        ],
        strict=True,
    ):
        for name, site in (("neurons", ACT), ("steered", POST)):
            for layer in (0, 1):
                expected = changes.get((name, layer), lambda x: x)(step[site, layer])
                torch.testing.assert_close(step[name, layer], expected)


def test_a_request_without_sites_of_a_width_costs_it_nothing(path):
    plan = RequestPlan(3, Capture("r", 0, (0, 1), select(), (K,), is_probe=True))
    path.runtime.begin_step([], [("r", plan)])
    asked = []

    def rows():
        asked.append(1)
        return StepRows(["r"], [0], [3])

    path.runtime.place(rows)
    assert len(asked) == 1, "the runtimes share what the runner says"
    path.runtime.finish_step()
    assert {site for probe in path.take_probe("r") for site in probe.capture.sites} == {K}
