"""Part `kernel`: steers the rows of many requests on a GPU, with the taps' kernel and with alternatives.

It runs in a separate process; see `bench.child`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.output import Bar, table
from bench.plain import restore
from bench.steering import timing, ways
from bench.steering.floor import move
from bench.steering.ways import Batch, Expected
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.gpu.tap import CudaTap
from inference_svc.taps.plan import STEERING_KINDS, Gate, Kind, Operation, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from residuum.v1 import selection_pb2

_DTYPE = torch.bfloat16
_ITEM_BYTES = 2
_EPSILON = 1e-6
_LIGHT_LAUNCHES, _HEAVY_LAUNCHES = 56, 4
"""Launches in a graph: for a single kernel, and for a way that launches hundreds of kernels."""
_CACHES = 3
"""How many times the launches fill the L2 cache before the same rows are used again."""
_USUAL_L2_BYTES = 50 << 20
_COPY_BYTES = 1 << 30

TAP, TAP_SUM, TAP_NORM = "tap", "tap, one tensor", "tap + norm"
LOOP, COMPILED, GATHER, UNIFORM = "loop", "compiled loop", "gather/scatter", "one operation"
FUSED, COMPILED_NORM = "vLLM's add + norm", "compiled add + norm"
MOVE, MOVE_NORM = "move the bytes", "move the bytes of add + norm"
OURS = (TAP, TAP_SUM, TAP_NORM)
IDLE = "idle"

LAYERS = 28
_EVERYWHERE = selection_pb2.PositionSelection()

GATED = "gated add"
"""An Add with a gate, which has a vector of its own."""

_BAR_HIDDEN, _BAR_US, _BAR_SPREAD, _BAR_GATE_US = 2560, 13.0, 1.25, 1.5


@dataclass(frozen=True)
class KernelJob:
    """What to measure."""

    hidden: tuple[int, ...] = (2560, 4096)
    unique: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of unique operations in a batch."""
    requests: int = 32
    rows_each: int = 64
    compile_seconds: float = 60.0
    """Compiling loops stops after this many seconds; 0 to compile none."""


class Rows(NamedTuple):
    """The tensors of one launch."""

    hidden: Tensor
    residual: Tensor

    def copy(self) -> Rows:
        """Return a copy in other memory."""
        return Rows(self.hidden.clone(), self.residual.clone())


@dataclass(frozen=True)
class Way:
    """One way to steer a batch, or a reference to compare with."""

    name: str
    launch: Callable[[Rows, int], tuple[Tensor, ...]]
    """Launches it once, given the number of the launch; returns the tensors that it made or changed."""
    expected: Callable[[Rows], tuple[Expected, ...]]
    """Returns the expected tensors, given the original rows."""
    exact: bool = True
    """Whether it computes in float32 and rounds once."""
    launches: int = _LIGHT_LAUNCHES


@dataclass
class Measurement:
    """The measurement of a way at one size."""

    hidden: int
    operation: str
    """The operation's name, "gated add" or "idle"."""
    unique: int
    way: str
    failed: str = ""
    """The reason if there are no figures; otherwise empty."""
    error: float = 0.0
    """The error of the result as a multiple of the allowed error."""
    times: dict[str, Any] = field(default_factory=dict)
    """Microseconds: "memory" in a CUDA graph with rows that are not in the cache, "cache" in a CUDA graph with the same
    rows each time, "launched" by the host one by one."""

    @property
    def key(self) -> tuple[int, str, int, str]:
        """The key of the measurement."""
        return self.hidden, self.operation, self.unique, self.way

    def us(self, how: str) -> float | None:
        """Return the median in microseconds; None if there is none."""
        return float(self.times[how]["us"]) if how in self.times else None


class ArmedTap:
    """A worker's tap in the step that computes a batch's prompts. All requests are steered after every layer."""

    def __init__(self, batch: Batch) -> None:
        """Load the bank, admit the requests, and place their rows."""
        rows = batch.requests * batch.rows_each
        points = TapPoints(0, LAYERS)
        vectors = batch.vectors if batch.gates is None else torch.cat([batch.vectors, batch.gates])
        bank = VectorBank(len(vectors), vectors.shape[1], vectors.device)
        bank.load([(row, vector.cpu().numpy().astype("<f4").tobytes()) for row, vector in enumerate(vectors)])
        self.tap = CudaTap(bank, None, points, rows, batch.requests)
        runtime = TapRuntime(points, self.tap, None, None)
        names = [f"request-{index}" for index in range(batch.requests)]
        runtime.begin_step((), [(name, plan_of(batch, index)) for index, name in enumerate(names)])
        runtime.place(lambda: StepRows(names, [0] * batch.requests, [batch.rows_each] * batch.requests))
        self._points = [points.after(layer) for layer in range(LAYERS)]

    def point(self, number: int) -> int:
        """Return the tap point of each layer in rotation."""
        return self._points[number % LAYERS]


def plan_of(batch: Batch, index: int) -> RequestPlan:
    """Return the plan of a request of a batch."""
    low, high = (ways.CAP_LOW, ways.CAP_HIGH) if batch.kind is Kind.CAP else (float("-inf"), float("inf"))
    row, scale = index % batch.unique, ways.SCALES[batch.kind]
    gate = None if batch.gates is None else Gate(batch.unique + row, 0.0, ways.GATE_SHARPNESS)
    operation = Operation(batch.kind, row, tuple(range(LAYERS)), _EVERYWHERE, scale, low, high, gate=gate)
    return RequestPlan(prompt_tokens=batch.rows_each, operations=(operation,))


class WrongResultError(RuntimeError):
    """A way computes a wrong result."""


def main() -> None:
    """Run the job in the first file, and write its measurements to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(measure(restore(KernelJob, json.loads(job_file.read_text())))))


def measure(job: KernelJob) -> dict[str, Any]:
    """Measure everything on this machine's GPU; return the part of the result."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    timing.warm_up()
    properties = torch.cuda.get_device_properties(device)
    l2_bytes = int(getattr(properties, "L2_cache_size", _USUAL_L2_BYTES))  # older torch does not have it
    bandwidth = copy_bandwidth()
    bench = Bench(job, device, l2_bytes)
    bench.measure_all()
    return {
        "parameters": {**asdict(job), "rows": job.requests * job.rows_each, "dtype": "bfloat16"},
        "device": properties.name,
        "l2_bytes": l2_bytes,
        "copy_bytes_per_second": bandwidth,
        "compile_seconds": bench.compile_seconds,
        "measurements": [asdict(item) for item in bench.measurements],
    }


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a copy that does not fit any cache."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = timing.sampled(lambda: target.copy_(source), 1)
    return 2 * _COPY_BYTES / (times.median / 1e6)


class Bench:
    """Measures each way at each size."""

    def __init__(self, job: KernelJob, device: torch.device, l2_bytes: int) -> None:
        self._job = job
        self._device = device
        self._l2_bytes = l2_bytes
        self.measurements: list[Measurement] = []
        self.compile_seconds: dict[str, float] = {}

    def measure_all(self) -> None:
        """Measure everything. A way that fails is recorded, and the next way is measured."""
        job = self._job
        for hidden in job.hidden:
            sets = self._sets(hidden)
            for way in reference_ways(self.batch(Kind.ADD, 1, hidden)):
                self._measure(hidden, IDLE, 0, way, sets)
            for kind in STEERING_KINDS:
                for unique in job.unique:
                    batch = self.batch(kind, unique, hidden)
                    for way in steering_ways(batch):
                        self._measure(hidden, kind.name.lower(), unique, way, sets)
            for unique in job.unique:
                batch = self.batch(Kind.ADD, unique, hidden)
                gated = replace(batch, gates=torch.randn_like(batch.vectors))
                for way in tap_ways(gated):
                    self._measure(hidden, GATED, unique, way, sets)
        for kind in STEERING_KINDS:
            spent = sum(self.compile_seconds.values())
            if spent < job.compile_seconds:
                self._measure_compiled(kind)

    def batch(self, kind: Kind, unique: int, hidden: int) -> Batch:
        """Return a batch with random vectors."""
        vectors = torch.randn(unique, hidden, device=self._device)
        return Batch(kind, self._job.requests, self._job.rows_each, vectors)

    def rows(self, hidden: int) -> Rows:
        """Return random rows."""
        shape = (self._job.requests * self._job.rows_each, hidden)
        return Rows(*(torch.randn(shape, device=self._device).to(_DTYPE) for _ in range(2)))

    def _sets(self, hidden: int) -> list[Rows]:
        first = self.rows(hidden)
        count = math.ceil(_CACHES * self._l2_bytes / first.hidden.nbytes)
        return [first, *(self.rows(hidden) for _ in range(count - 1))]

    def _measure_compiled(self, kind: Kind) -> None:
        run = torch.compile(ways.loop(kind, self._job.rows_each), dynamic=True)
        for hidden in self._job.hidden:
            sets = self._sets(hidden)
            for unique in self._job.unique:
                batch = self.batch(kind, unique, hidden)
                started = time.perf_counter()
                self._measure(hidden, kind.name.lower(), unique, loop_way(COMPILED, batch, run), sets)
                if (hidden, unique) == (self._job.hidden[0], self._job.unique[0]):
                    self.compile_seconds[kind.name.lower()] = round(time.perf_counter() - started, 1)

    def _measure(self, hidden: int, operation: str, unique: int, way: Way, sets: Sequence[Rows]) -> None:
        measured = Measurement(hidden, operation, unique, way.name)
        self.measurements.append(measured)
        try:
            measured.error = check(way, sets[0])
            measured.times = {name: times.to_json() for name, times in times_of(way, sets)}
        except Exception as error:  # noqa: BLE001 - if a way fails, only its figure is missing
            measured.failed = f"{type(error).__name__}: {error}"[:500]


def check(way: Way, rows: Rows) -> float:
    """Return the error of a way as a multiple of the allowed error. On a GPU, a CUDA graph runs it.

    Raises:
        WrongResultError: The error is above 1.
    """
    fresh = rows.copy()
    expected = way.expected(rows.copy())
    if rows.hidden.is_cuda:
        graph, (returned,) = timing.capture(lambda _: way.launch(fresh, 0), 1)
        for changed, original in zip(fresh, rows, strict=True):
            changed.copy_(original)
        graph.replay()
        torch.cuda.synchronize()
    else:
        returned = way.launch(fresh, 0)
    off = max(ways.worst(got, want, exact=way.exact) for got, want in zip(returned, expected, strict=True))
    if not off <= 1.0:  # also true for NaN
        raise WrongResultError(f"the error is {off:.3g} times the allowed error")
    return off


def times_of(way: Way, sets: Sequence[Rows]) -> Iterator[tuple[str, timing.Times]]:
    """Yield the times of a way, each with its name. This destroys the rows' values; only their location matters."""
    used = [rows.copy() for rows in sets]

    def one_after_the_other(number: int) -> object:
        return way.launch(used[number % len(used)], number)

    def the_same(number: int) -> object:
        return way.launch(used[0], number)

    rounds = max(1, way.launches // len(used))
    yield "memory", timing.in_graph(one_after_the_other, rounds * len(used), keep=True)
    yield "cache", timing.in_graph(the_same, way.launches, keep=False)
    yield "launched", timing.launched(one_after_the_other)


def steering_ways(batch: Batch) -> Iterator[Way]:
    """Yield the ways to steer a batch, except the compiled loop, which is compiled once for all batches."""
    yield from tap_ways(batch)
    yield loop_way(LOOP, batch, ways.loop(batch.kind, batch.rows_each))
    run, groups = ways.gather_scatter(batch.kind), ways.groups_of(batch, _DTYPE)  # grouping is not measured
    yield plain_way(GATHER, batch, lambda hidden: run(hidden, groups))
    if batch.unique == 1:
        apply, vector = ways.operation(batch.kind), ways.vector_for(batch.kind, batch.vectors[0], _DTYPE)
        yield plain_way(UNIFORM, batch, lambda hidden: hidden.copy_(apply(hidden, vector)), _LIGHT_LAUNCHES)


def tap_ways(batch: Batch) -> Iterator[Way]:
    """Yield the taps' kernels, which steer a batch."""
    armed = ArmedTap(batch)
    yield tap_way(armed, lambda rows: ways.expect(batch, rows.hidden, rows.residual))
    yield tap_way(armed, lambda rows: ways.expect(batch, rows.hidden), TAP_SUM)
    yield tap_norm_way(armed, batch, batch.vectors.shape[1], batch.vectors.device)


def tap_way(armed: ArmedTap, expected: Callable[[Rows], Expected], name: str = TAP) -> Way:
    """Return the taps' kernel, for one tensor or for both."""

    def launch(rows: Rows, number: int) -> tuple[Tensor, ...]:
        armed.tap.tap(rows.hidden, None if name == TAP_SUM else rows.residual, armed.point(number))
        return (rows.hidden,)

    return Way(name, launch, lambda rows: (expected(rows),))


def plain_way(name: str, batch: Batch, change: Callable[[Tensor], object], launches: int = _HEAVY_LAUNCHES) -> Way:
    """Return a way that changes rows in place and computes in bfloat16."""

    def launch(rows: Rows, _: int) -> tuple[Tensor, ...]:
        change(rows.hidden)
        return (rows.hidden,)

    return Way(name, launch, lambda rows: (ways.expect(batch, rows.hidden),), exact=False, launches=launches)


def loop_way(name: str, batch: Batch, run: Callable[[Tensor, Sequence[Tensor]], None]) -> Way:
    """Return the loop over requests, each with its own copy of a vector, as in its request."""
    vectors = [
        ways.vector_for(batch.kind, batch.vectors[index % batch.unique], _DTYPE) for index in range(batch.requests)
    ]
    return plain_way(name, batch, lambda hidden: run(hidden, vectors))


def reference_ways(batch: Batch) -> Iterator[Way]:
    """Yield the references without steering: idle taps, a model's add and norm without taps, and moving the bytes."""
    hidden, device = batch.vectors.shape[1], batch.vectors.device
    idle = ArmedTap(batch)
    idle.tap.disarm()
    yield tap_way(idle, lambda rows: _unchanged(rows.hidden))
    yield tap_norm_way(idle, None, hidden, device)
    yield from norm_ways(hidden, device)

    def move_tap(rows: Rows, _: int) -> tuple[Tensor, ...]:
        move(rows.hidden, rows.residual, rows.hidden)
        return (rows.hidden,)

    def move_norm(rows: Rows, _: int) -> tuple[Tensor, ...]:
        first, second = torch.empty_like(rows.hidden), torch.empty_like(rows.hidden)
        move(rows.hidden, rows.residual, first, second)
        return first, second

    def expected(rows: Rows) -> tuple[Expected, ...]:
        first, second = rows.hidden.double(), rows.residual.double()
        return _sum_of(first + second), _sum_of(first - second)

    yield Way(MOVE, move_tap, lambda rows: expected(rows)[:1])
    yield Way(MOVE_NORM, move_norm, expected)


def _unchanged(tensor: Tensor) -> Expected:
    value = tensor.double()
    nothing = torch.full_like(value, 1e-30)
    return Expected(value, nothing, nothing)


def _sum_of(value: Tensor) -> Expected:
    bound = 1.01 * ways.ROUNDING * value.abs() + 1e-6
    return Expected(value, bound, bound)


def tap_norm_way(armed: ArmedTap, batch: Batch | None, hidden: int, device: torch.device) -> Way:
    """Return the tap that is folded into the norm. It is idle if `batch` is None."""
    weight = _weight(hidden, device)

    def launch(rows: Rows, number: int) -> tuple[Tensor, ...]:
        return armed.tap.tap_norm(
            rows.hidden, rows.residual, weight, _EPSILON, armed.point(number), plus_one=False
        )  # fmt: skip

    return Way(TAP_NORM, launch, lambda rows: _expect_add_norm(batch, rows, weight))


def norm_ways(hidden: int, device: torch.device) -> Iterator[Way]:
    """Yield the add and norm of a model without taps: vLLM's kernel, and the compiled one, which is vLLM's default."""
    weight = _weight(hidden, device)

    def compilable(states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = states.float() + residual.float()
        normed = stream * torch.rsqrt(stream.square().mean(dim=-1, keepdim=True) + _EPSILON)
        return normed.to(states.dtype) * weight, stream.to(states.dtype)

    def expected(rows: Rows) -> tuple[Expected, ...]:
        return _expect_add_norm(None, rows, weight)

    if device.type != "cuda":
        yield Way(COMPILED_NORM, lambda rows, _: compilable(*rows), expected, exact=False)
        return
    compiled = torch.compile(compilable, dynamic=False)
    yield Way(COMPILED_NORM, lambda rows, _: compiled(*rows), expected, exact=False)

    def fused(rows: Rows, _: int) -> tuple[Tensor, ...]:
        from vllm import _custom_ops

        _custom_ops.fused_add_rms_norm(rows.hidden, rows.residual, weight, _EPSILON)
        return rows.hidden, rows.residual

    yield Way(FUSED, fused, expected, exact=False)


def _weight(hidden: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(hidden)
    return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(device, _DTYPE)


def _expect_add_norm(batch: Batch | None, rows: Rows, weight: Tensor) -> tuple[Expected, ...]:
    stream = ways.expect_sum(batch, rows.hidden, rows.residual)
    return ways.expect_norm(stream.value, weight, _EPSILON), stream


def bars(measurements: Sequence[Measurement]) -> list[Bar]:
    """Return the bars for the taps' kernel. A missing figure fails its bar."""
    found = []
    sizes = sorted({item.hidden for item in measurements})
    taps = [item for item in measurements if item.way == TAP and item.operation not in {IDLE, GATED}]
    for how, where in (("memory", "from memory"), ("cache", "from the cache")):
        if _BAR_HIDDEN in sizes:
            times = [item.us(how) for item in taps if item.hidden == _BAR_HIDDEN]
            slowest = max((math.inf if time is None else time for time in times), default=math.inf)
            found.append(Bar(f"tap at hidden {_BAR_HIDDEN}, slowest of all, in a graph, {where}: us", slowest, _BAR_US))
            for way in (TAP, TAP_NORM):
                name = f"{way} at hidden {_BAR_HIDDEN}, a gate on top of an add, in a graph, {where}: us"
                found.append(Bar(name, _gate_us(measurements, way, how), _BAR_GATE_US))
        for hidden in sizes:
            spread = max((_spread(taps, hidden, kind.name.lower(), how) for kind in STEERING_KINDS), default=math.inf)
            name = f"tap at hidden {hidden}, {where}: slowest over fastest number of unique operations"
            found.append(Bar(name, spread, _BAR_SPREAD))
    return found


def _gate_us(measurements: Sequence[Measurement], way: str, how: str) -> float:
    """Return how much longer a gated operation takes than the same without a gate, at most."""
    chosen = [item for item in measurements if (item.hidden, item.way) == (_BAR_HIDDEN, way)]
    plain = {item.unique: item.us(how) for item in chosen if item.operation == Kind.ADD.name.lower()}
    gated = {item.unique: item.us(how) for item in chosen if item.operation == GATED}
    pairs = [(gated.get(unique), plain.get(unique)) for unique in plain.keys() | gated.keys()]
    return max((math.inf if a is None or b is None else a - b for a, b in pairs), default=math.inf)


def _spread(taps: Sequence[Measurement], hidden: int, operation: str, how: str) -> float:
    times = [item.us(how) for item in taps if (item.hidden, item.operation) == (hidden, operation)]
    known = [time for time in times if time is not None]
    return max(known) / min(known) if known and len(known) == len(times) else math.inf


def tap_bytes(job: KernelJob, hidden: int, *, norm: bool) -> int:
    """Return the bytes of rows that a tap reads and writes: three tensors alone, four with its norm."""
    return (4 if norm else 3) * job.requests * job.rows_each * hidden * _ITEM_BYTES


def show(job: KernelJob, measurements: Sequence[Measurement], bandwidth: float) -> Iterator[str]:
    """Yield the tables: microseconds in a CUDA graph with rows from memory or cache, and launched by the host."""
    by_key = {item.key: item for item in measurements}
    names = list(dict.fromkeys(item.way for item in measurements if item.operation != IDLE))
    for hidden in job.hidden:
        floor = tap_bytes(job, hidden, norm=False) / bandwidth * 1e6
        norm_floor = tap_bytes(job, hidden, norm=True) / bandwidth * 1e6
        yield (
            f"hidden {hidden}: a tap's bytes take {floor:.1f} us at {bandwidth / 1e12:.2f} TB/s, with its norm "
            f"{norm_floor:.1f} us"
        )
        yield table(
            ["steering nothing, us", "memory", "cache", "launched"],
            [
                [item.way, *(_cell(item, how) for how in ("memory", "cache", "launched"))]
                for item in measurements
                if (item.hidden, item.operation) == (hidden, IDLE)
            ],
        )
        for how, title in (("memory", "graph, memory"), ("cache", "graph, cache"), ("launched", "launched")):
            rows = [
                [
                    operation,
                    str(unique),
                    *(_cell(by_key.get((hidden, operation, unique, name)), how) for name in names),
                    _ratio(by_key.get((hidden, operation, unique, TAP)), how, floor),
                    _ratio(by_key.get((hidden, operation, unique, TAP_NORM)), how, norm_floor),
                ]
                for operation in (*(kind.name.lower() for kind in STEERING_KINDS), GATED)
                for unique in job.unique
            ]
            yield table([f"{title}, us", "unique", *names, "tap/floor", "norm/floor"], rows)


def _cell(item: Measurement | None, how: str) -> str:
    time = item.us(how) if item else None
    if time is None:
        return "failed" if item and item.failed else "-"
    return f"{time:.1f}"


def _ratio(item: Measurement | None, how: str, floor: float) -> str:
    time = item.us(how) if item else None
    return "-" if time is None else f"{time / floor:.2f}"
