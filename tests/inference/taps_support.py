"""Shared by the tests of the taps: short constructors, a ring in this process, and a model of the expected results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch

from inference_svc.shipping.ring import Extent
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.cpu.tap import CpuTap
from inference_svc.taps.plan import Capture, Kind, Measure, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.sink import BlockSink, ModelRows
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from residuum.v1 import capture_pb2, selection_pb2, tensor_pb2

DTYPES = {
    torch.float32: (np.dtype("<f4"), tensor_pb2.DATA_TYPE_FLOAT32),
    torch.bfloat16: (np.dtype(ml_dtypes.bfloat16), tensor_pb2.DATA_TYPE_BFLOAT16),
}
POST, PRE = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE
ATTN, MLP = capture_pb2.SITE_ATTN_OUT, capture_pb2.SITE_MLP_OUT
PROMPT, GENERATED = selection_pb2.PHASE_PROMPT, selection_pb2.PHASE_GENERATED
CPU = torch.device("cpu")


def select(*ranges, phases=(), every=0):
    """A position selection; a range is (first, last), with None for "to the end"."""
    return selection_pb2.PositionSelection(
        phases=phases,
        ranges=[selection_pb2.PositionRange(first=first, last=last) for first, last in ranges],
        every=every,
    )


def capture(capture_id="capture", layers=(0,), positions=None, **options):
    return Capture(capture_id, 0, tuple(layers), positions or select(), **options)


def is_wanted(selection, prompt_tokens, position):
    """The rule of selection.proto for one position."""
    if selection.phases and (PROMPT if position < prompt_tokens else GENERATED) not in selection.phases:
        return False
    if selection.every > 1 and position % selection.every:
        return False
    for item in selection.ranges:
        first = item.first if item.first >= 0 else item.first + prompt_tokens
        last = item.last if item.last >= 0 else item.last + prompt_tokens
        if first <= position and (position <= last or not item.HasField("last")):
            return True
    return not selection.ranges


def steer(x, operation, vectors):
    """The formulas of steering.proto for one row, in float64. `vectors` is the bank."""
    moved = _moved(x, operation, vectors[operation.row].astype(np.float64))
    if operation.kind == Kind.CLAMP:
        value = feature_of(x, operation.gate, vectors)
        clamped = min(max(value, operation.low), operation.high)
        moved = x + (clamped - value) * vectors[operation.row].astype(np.float64)
    elif operation.gate is not None:
        opening = open_gate(x, operation.gate, vectors)
        if not opening:
            return x
        moved = x + opening * (moved - x)
    norm = np.linalg.norm(moved)
    return moved * (np.linalg.norm(x) / norm) if operation.keep_norm and norm else moved


def open_gate(x, gate, vectors):
    """How far a gate is open for a row, from 0 to 1, in float64."""
    above = measured(x, gate, vectors) - gate.threshold
    if math.isinf(gate.sharpness):
        return float(above > 0) if gate.sharpness > 0 else float(above < 0)
    return 0.0 if math.isnan(above) else 1 / (1 + math.exp(min(-gate.sharpness * above, 700.0)))


def feature_of(x, gate, vectors):
    """The value of a feature, in float64."""
    value = x @ vectors[gate.row].astype(np.float64) + gate.sharpness
    return value if value > gate.threshold else 0.0


def measured(x, gate, vectors):
    """What a gate measures of a row, in float64."""
    vector = vectors[gate.row].astype(np.float64)
    length = {Measure.INNER_PRODUCT: 1.0, Measure.PROJECTION: np.linalg.norm(vector)}.get(
        gate.measure, np.linalg.norm(vector) * np.linalg.norm(x)
    )
    return x @ vector / length if length else math.nan


def _moved(x, operation, vector):
    if operation.kind == Kind.SET:
        return vector.astype(np.float64)
    if operation.kind == Kind.MULTIPLY:
        return x * vector
    if operation.kind == Kind.ADD:
        return x + operation.scale * vector
    unit = vector / np.linalg.norm(vector)
    projection = x @ unit
    if operation.kind == Kind.ABLATE:
        return x - operation.scale * projection * unit
    return x + (min(max(projection, operation.low), operation.high) - projection) * unit


@dataclass
class Chunk:
    """The rows of one published header, copied when it was published."""

    capture_id: str
    header: object
    rows: np.ndarray
    """[layers, positions, hidden]"""

    @property
    def positions(self):
        return list(self.header.positions)


class Ring:
    """Replaces RingProducer and keeps what is published. `free` limits the bytes to acquire; None: no limit."""

    def __init__(self, free=None):
        self.free = free
        self.chunks = []
        self.losses = []
        self._taken = {}

    def acquire(self, nbytes, block, capture_id="", *, at_once=False):
        if self.free is not None and self.free < nbytes:
            assert not block, "a real producer would wait for the store here"
            return None
        if self.free is not None:
            self.free -= nbytes
        extent = Extent(len(self.chunks) + len(self._taken), nbytes)
        self._taken[extent] = np.full(nbytes, 0xEE, dtype=np.uint8)
        return extent

    def view(self, extent):
        return self._taken[extent]

    def publish_all(self, filled):
        for extent, capture_id, headers, num_bytes in filled:
            assert num_bytes == extent.nbytes
            self.publish(extent, capture_id, [capture_pb2.ChunkHeader.FromString(header) for header in headers])

    def publish(self, extent, capture_id, headers):
        data, at = self._taken.pop(extent), 0
        for header in headers:
            dtype = next(numpy_type for numpy_type, wire in DTYPES.values() if wire == header.dtype)
            shape = (len(header.layers), len(header.positions), header.width)
            size = int(np.prod(shape)) * dtype.itemsize
            self.chunks.append(Chunk(capture_id, header, data[at : at + size].view(dtype).reshape(shape)))
            at += size
        assert at == len(data), "the headers describe all bytes"

    def release(self, extent):
        if self.free is not None:
            self.free += len(self._taken[extent])
        del self._taken[extent]

    def report_loss(self, capture_id, loss):
        self.losses.append((capture_id, loss))

    def take(self):
        """Return the chunks published since the last call."""
        chunks, self.chunks = self.chunks, []
        return chunks


class Worker:
    """The taps of a worker process, without an engine: the test calls each step."""

    def __init__(
        self,
        *,
        hidden=8,
        layers=range(2),
        dtype=torch.float32,
        rows=16 * 2 * 32,
        largest_block=0,
        vectors=(),
        ring_bytes=None,
        captures=True,
    ):
        self.dtype = dtype
        self.layers = layers
        self.points = TapPoints(layers[0], len(layers))
        self.bank = VectorBank(max(len(vectors), 1), hidden, CPU)
        self.bank.load((row, np.asarray(vector, dtype="<f4").tobytes()) for row, vector in enumerate(vectors))
        self.pool = BlockPool(rows, hidden, dtype, CPU, largest_block) if captures else None
        self.ring = Ring(ring_bytes) if captures else None
        self.sink = BlockSink(self.pool, ModelRows(hidden, DTYPES[dtype][1]), self.ring) if captures else None
        self.tap = CpuTap(self.bank, self.pool, self.points)
        self.runtime = TapRuntime(self.points, self.tap, self.pool, self.sink)
        self.hidden = hidden

    def step(self, rows, *, admitted=(), finished=(), preempted=(), tensors=None):
        """Run one step.

        Args:
            rows: (request ID, first position, count) for each request, in the order of the batch.
            admitted: (request ID, plan or None) of new requests.
            finished: IDs of requests that ended.
            preempted: IDs of requests that wait to be computed again.
            tensors: For each layer, or (site, layer), (hidden, residual or None), changed in place. None: zeros.
        """
        self.runtime.begin_step(finished, admitted, preempted)
        if rows:
            told = StepRows(*(list(column) for column in zip(*rows, strict=True)))
            self.runtime.place(lambda: told)
            total = sum(count for _, _, count in rows)
            tensors = tensors or {
                layer: (torch.zeros(total, self.hidden, dtype=self.dtype), None) for layer in self.layers
            }
            for where, (hidden, residual) in tensors.items():
                self.tap.tap(hidden, residual, self.points.of(*(where if isinstance(where, tuple) else (POST, where))))
        self.runtime.finish_step()


@dataclass
class Tracked:
    """What the model knows of one request."""

    plan: RequestPlan
    next_position: int = 0
    pending: list = field(default_factory=list)
    """Positions that were captured and not sent yet."""
    capacity: int = 0
    """The capacity of the pending block, in positions."""
    first_generated: int = 32
    """The capacity of the first block of generated positions."""
    limit: int = 32
    """The number of positions at which the pending block is sent."""


class Model:
    """The expected results of the taps, computed in the slow way: row by row, with lists and float64."""

    def __init__(self, layers, vectors, largest_block=0):
        self.layers = layers
        self.largest_block = largest_block
        self.vectors = [np.asarray(vector, dtype=np.float64) for vector in vectors]
        self.requests = {}
        self.admitted = 0
        self.rows = {}
        """(capture id, site, layer, position) -> the row that must be shipped."""
        self.lost = set()
        """(capture id, site, layer, position)"""

    def begin_step(self, finished, admitted):
        """Take finished and admitted requests; return the blocks that are sent: (capture ID, positions)."""
        left = []
        for name in finished:
            request = self.requests.pop(name, None)
            if request and request.pending:
                left.append((request.plan.capture.capture_id, request.pending))
        for name, plan in admitted:
            if plan and name not in self.requests and self._has_work(plan):
                self.admitted += 1
                self.requests[name] = Tracked(plan, first_generated=32 - self.admitted * 13 % 32)
        return left

    def _has_work(self, plan):
        captures = plan.capture is not None and set(plan.capture.layers) & set(self.layers)
        return captures or plan.operations or plan.name

    def steered(self, name, position, layer, hidden, residual):
        """Return the expected `hidden` after the tap, float64; None if it must not change."""
        request = self.requests.get(name)
        operations = [
            operation
            for operation in (request.plan.operations if request else ())
            if layer in operation.layers and is_wanted(operation.positions, request.plan.prompt_tokens, position)
        ]
        if not operations:
            return None
        delayed = 0.0 if residual is None else residual.astype(np.float64)
        x = hidden.astype(np.float64) + delayed
        for operation in operations:
            x = steer(x, operation, self.vectors)
        return x - delayed

    def run(self, rows, before, after):
        """Take a step's rows; return the blocks that are sent with it: (capture ID, positions).

        Args:
            rows: As for `Worker.step`.
            before: For each (site, layer), the sums hidden + residual before the tap, [rows, hidden].
            after: The same sums after the tap.
        """
        left, row = [], 0
        for name, first, count in rows:
            request = self.requests.get(name)
            if request and request.plan.capture:
                left += self._capture(request, row, first, count, before, after)
            row += count
        return left

    def _capture(self, request, row, first, count, before, after):
        wanted, prompt = request.plan.capture, request.plan.prompt_tokens
        source = before if wanted.before_steering else after
        left = []
        for position in range(request.next_position, first):
            if is_wanted(wanted.positions, prompt, position):
                self.lost |= {(wanted.capture_id, site, layer, position) for site, layer in self._own(wanted)}
        reached = max(request.next_position, first + count)
        if request.next_position < prompt <= first and request.pending:
            left.append(self._leave(request))
        for position in range(max(first, request.next_position), first + count):
            if is_wanted(wanted.positions, prompt, position):
                if not request.pending:
                    request.capacity = self._capacity(request, position, first + count)
                    request.limit = min(
                        request.capacity, wanted.flush_interval if position >= prompt else request.capacity
                    )
                request.pending.append(position)
                for site, layer in self._own(wanted):
                    key = (POST, layer - 1) if site == PRE and layer - 1 in self.layers else (site, layer)
                    self.rows[wanted.capture_id, site, layer, position] = source[key][row + position - first]
            if request.pending and (len(request.pending) == request.limit or position == prompt - 1):
                left.append(self._leave(request))
        request.next_position = reached
        return left

    def _leave(self, request):
        block, request.pending = (request.plan.capture.capture_id, request.pending), []
        return block

    def _capacity(self, request, position, stop):
        """Return a block's capacity: the positions that this step computes of its phase, within the limits, or 32."""
        wanted, prompt, least = request.plan.capture, request.plan.prompt_tokens, 32
        if position >= prompt:
            least, request.first_generated = request.first_generated, 32
        stop = min(stop, prompt) if position < prompt else stop
        at_hand = sum(is_wanted(wanted.positions, prompt, other) for other in range(position, stop))
        return max(least, min(at_hand, self.largest_block // max(len(self._own(wanted)), 1)))

    def _own(self, wanted):
        return [(site, layer) for site in wanted.sites for layer in wanted.layers if layer in self.layers]
