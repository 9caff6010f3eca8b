"""Rows of which each rank has a part: one rank gets a request's whole rows, whatever the requests do."""

from __future__ import annotations

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.joining_sink import JoiningSink, WholeRows
from inference_svc.taps.plan import Capture, RequestPlan, RowEncoding
from inference_svc.taps.points import RowShape
from inference_svc.taps.steps.capturing_ranks import CapturingRanks
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.steps.runtimes import TapRuntimes
from inference_svc.taps.vllm.capture_path import CapturePath, points_of
from residuum.v1 import capture_pb2
from tests.inference.taps_support import CPU, select

POST, K, Z = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_K, capture_pb2.SITE_Z
HIDDEN, LAYERS, MAX_TOKENS = 8, 2, 96
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(dtype=torch.float32),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=4),
)


class Group:
    """The ranks of a tensor-parallel group, each in its own thread, which exchange tensors as vLLM's ranks do."""

    def __init__(self, folder, shapes, capturing=None):
        """`capturing`: the ranks that can capture; by default, all of them."""
        self.shapes, self.ranks = shapes, max(shape.ranks for shape in shapes.values())
        self.points = points_of(0, LAYERS, shapes)
        self._parts, self._barrier = [None] * self.ranks, threading.Barrier(self.ranks, timeout=20)
        self._threads = ThreadPoolExecutor(self.ranks)
        group_shapes = [RowShape(HIDDEN), *(shapes[group.inner[0]] for group in self.points.groups[1:])]
        self.paths = [
            CapturePath(CONFIG, CPU, self.points, group_shapes, dict.fromkeys([POST, *shapes], range(LAYERS)), 1)
            for _ in range(self.ranks)
        ]
        self.capturing = list(range(self.ranks)) if capturing is None else capturing
        for rank in self.capturing:
            self.paths[rank].make_ring(str(folder / f"ring{rank}"), 1 << 20, [""])
        self._taps = [path.make_taps()[0] for path in self.paths]
        self._runtimes = [self._runtime(rank) for rank in range(self.ranks)]

    def _runtime(self, rank):
        ranks = CapturingRanks(self.capturing, rank)
        runtimes = self.paths[rank].runtimes(self._taps[rank], functools.partial(self._join, rank), ranks)
        return TapRuntimes(runtimes, ranks=ranks)

    def close(self):
        for rank in self.capturing:
            self.paths[rank].producer.close()
        self._threads.shutdown()

    def _join(self, rank, parts, shape, *, keep):
        self._parts[rank] = parts.clone()
        self._barrier.wait()
        joined = torch.cat(self._parts[:: shape.copies], dim=-1) if keep else None
        self._barrier.wait()
        return joined

    def step(self, rows, computed, *, admitted=(), finished=()):
        """Run a step on all ranks: `computed` are the whole rows by (site, layer)."""

        def run(rank):
            runtime = self._runtimes[rank]
            # Every rank gets the finished requests in an order of its own.
            runtime.begin_step(finished if rank % 2 else finished[::-1], admitted)
            if rows:
                runtime.place(lambda: StepRows(*map(list, zip(*rows, strict=True))))
                for group, tap in zip(self.points.groups, self._taps[rank], strict=True):
                    for (site, layer), values in computed.items():
                        if group.sees(site):
                            part = self._part(rank, values, self.shapes.get(site))
                            tap.tap(part, None, group.of(site, layer))
            runtime.finish_step()

        list(self._threads.map(run, range(self.ranks)))

    def _part(self, rank, values, shape):
        if shape is None or not shape.is_divided:
            return values.clone()
        first = rank // shape.copies * shape.width
        return values[:, first : first + shape.width].clone()


@pytest.fixture
def group(tmp_path, request):
    made = Group(tmp_path, *request.param)
    yield made
    made.close()


class Calls:
    """A sink that notes what it is told."""

    def __init__(self):
        self.made = []

    def begin(self, plan):
        self.made.append(("begin", plan.capture.capture_id))

    def lose(self, capture, positions, reason, detail):
        self.made.append(("lose", capture.capture_id))

    def end(self, capture):
        self.made.append(("end", capture.capture_id))


def test_a_rank_follows_only_its_own_captures():
    calls = Calls()
    sink = JoiningSink(None, RowShape(3, 2), None, WholeRows(None, calls))
    for name, is_own in (("own", True), ("another's", False)):
        capture = Capture(name, 0, (0,), select(), (Z,), is_own=is_own)
        sink.begin(RequestPlan(1, capture))
        sink.lose(capture, [0], capture_pb2.INCOMPLETE_REASON_WRITE_FAILED, "skipped")
        sink.end(capture)
    assert calls.made == [(call, "own") for call in ("begin", "lose", "end")]


def test_each_step_publishes_on_ranks_that_capture():
    published = []
    whole = WholeRows(None, SimpleNamespace(publish=lambda **how: published.append(how)))
    for may_be_last in (False, True):
        JoiningSink(None, RowShape(3, 2), None, whole).publish(may_be_last=may_be_last)
        JoiningSink(None, RowShape(3, 2), None, None).publish(may_be_last=may_be_last)
    assert published == [{"may_be_last": False}, {"may_be_last": True}]


TWO = {K: RowShape(4), Z: RowShape(3, 2)}
FOUR = {K: RowShape(2, 4, 2), Z: RowShape(3, 4)}


class Request:
    """A request that captures everything, and the rows that were computed for it."""

    def __init__(self, name, sites, prompt, generated):
        self.name, self.prompt, self.end = name, prompt, prompt + generated
        # Some parts are narrower than what the encoding keeps of a whole row. A probe's rows are not encoded.
        encoding = RowEncoding(capture_pb2.ENCODING_TOPK, dimensions=4)
        layers = tuple(range(LAYERS))
        self.plan = RequestPlan(prompt, Capture(name, 0, layers, select(), sites, is_probe=True, encoding=encoding))
        self.position, self.computed = 0, []

    def next_count(self, room):
        left = self.prompt - self.position if self.position < self.prompt else int(self.position < self.end)
        return min(left, room)

    def take(self, rows):
        self.position += len(next(iter(rows.values())))
        self.computed.append(rows)


def serve(group, requests, everywhere):
    """Run the requests together, as an engine does."""
    admitted, finished, widths = requests, [], {POST: HIDDEN, **{at: row.whole for at, row in group.shapes.items()}}
    while True:
        batch, room = [], MAX_TOKENS
        for request in requests:
            batch.append((request, request.next_count(room)))
            room -= batch[-1][1]
        batch = [(request, count) for request, count in batch if count]
        values = {where: torch.randn(MAX_TOKENS - room, widths[where[0]]) for where in everywhere}
        group.step(
            [(request.name, request.position, count) for request, count in batch],
            values,
            admitted=[(request.name, request.plan) for request in admitted],
            finished=[request.name for request in finished],
        )
        if not batch:
            return
        for (request, count), at in zip(
            batch, itertools.accumulate((count for _, count in batch), initial=0), strict=False
        ):
            request.take({where: rows[at : at + count] for where, rows in values.items()})
        admitted, finished = [], [request for request, _ in batch if request.position == request.end]


def captured(path, name):
    """Return the rows that a rank captured: by (site, layer), by position."""
    found = {}
    for probe in path.take_probe(name):
        units = [(site, layer) for site, layers in probe.capture.places for layer in layers]
        for unit, rows in zip(units, probe.rows, strict=True):
            found.setdefault(unit, {}).update(zip(probe.positions, rows, strict=True))
    return found


@pytest.mark.parametrize(
    "group",
    [(TWO,), (TWO, [1]), (FOUR,), (FOUR, [0, 2, 3])],
    indirect=True,
    ids=["two ranks", "one of two captures", "four ranks, keys twice", "three of four capture"],
)
def test_one_rank_gets_the_whole_rows_of_a_request(group):
    numbers, sites, turns = itertools.count(), (POST, *group.shapes), itertools.cycle(group.capturing)
    everywhere = [(site, layer) for site in sites for layer in range(LAYERS)]

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from([1, 30, 70]), st.sampled_from([1, 20, 41])), min_size=1, max_size=3))
    def check(lengths):
        requests = [Request(f"r{next(numbers)}", sites, *length) for length in lengths]
        serve(group, requests, everywhere)
        pools = [rows.parts for path in group.paths for rows in path._all if rows.parts]
        assert all(pool.free_rows == len(pool.memory) for pool in pools)
        for request in requests:
            by_rank = {rank: found for rank, path in enumerate(group.paths) if (found := captured(path, request.name))}
            ((rank, found),) = by_rank.items()
            assert rank == next(turns)
            for where in everywhere:
                expected = torch.cat([rows[where] for rows in request.computed])
                assert torch.equal(torch.stack([found[where][at] for at in range(request.end)]), expected)

    check()
