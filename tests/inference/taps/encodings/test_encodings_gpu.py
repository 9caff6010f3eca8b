"""The encoders on a GPU agree with the reference in numpy, through pinned memory as in the service.

Runs only on a machine with a GPU. test_encodings.py runs the same kernels in Triton's interpreter.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from inference_svc.shipping.ring import Extent
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.encodings.check import bytes_of
from inference_svc.taps.encodings.sae_encoder import WORKING_BYTES, encoder_of
from inference_svc.taps.encodings.signs import SignCache
from inference_svc.taps.gpu import host_copies
from inference_svc.taps.gpu.encoder import OUTPUT_BYTES, STAGED_BYTES, GpuEncoder
from inference_svc.taps.gpu.host_copies import HostCopies
from inference_svc.taps.gpu.streamed_sink import StreamedSink
from inference_svc.taps.plan import Capture, RequestPlan, RowEncoding
from inference_svc.taps.sink import ModelRows
from residuum.v1 import capture_pb2
from residuum.wire.rows.encodings import ENCODINGS, PROJECT, RANDOM_PROJECTIONS, SAE, SIZED, RowFormat
from residuum.wire.sae import JUMP_RELU, TOP_K
from tests import encoding_cases
from tests.encoding_cases import B16, F16, F32
from tests.inference.taps.encodings.encoder_cases import DTYPES, cases
from tests.inference.taps_support import select

DEVICE = torch.device("cuda")
WIDTHS = ((70, 7), (576, 512), (2048, 512), (2560, 100), (11008, 128), (28672, 300))
UNITS, POSITIONS = 3, 70


@pytest.fixture(scope="module")
def memory():
    """Host memory that the device can reach."""
    array = np.zeros(64 << 20, dtype=np.uint8)
    assert int(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)) == 0
    yield array
    torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)


def encoder_with(staged_bytes, sum_bytes=STAGED_BYTES):
    return GpuEncoder(DEVICE, HostCopies(), staged_bytes, sum_bytes)


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("shape", [(36, 300, 2048), (2, 9000, 1000), (7, 1, 9)], ids=str)
def test_rows_of_many_pieces_arrive(memory, monkeypatch, shape, gap):
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 1 << 20)
    units, positions, width = shape
    rows = torch.randn(units, positions + gap, width, device=DEVICE).to(torch.bfloat16)[:, :positions]
    expected = rows.contiguous().cpu().view(torch.uint8).numpy().reshape(-1)
    size = 2 * rows.numel()
    assert size <= memory.nbytes - 128
    copies = HostCopies()
    for _ in range(2):
        memory[:] = 0xEE
        copies.copy(rows, memory.ctypes.data + 64)
        torch.cuda.synchronize()
        assert np.array_equal(memory[64 : 64 + size], expected)
        assert (memory[:64] == 0xEE).all()
        assert (memory[64 + size :] == 0xEE).all()


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_are_encoded_as_the_contract_says(memory, widths):
    whole, small = encoder_with(STAGED_BYTES), encoder_with(1 << 17)
    for case in cases((widths,)):
        rows = torch.empty(3, 9, widths[0], dtype=case.rows.dtype, device=DEVICE)[:, :5]  # with gaps, as in a block
        rows.copy_(case.rows)
        size = case.form.payload_bytes(3, 5)
        for encoder in (whole,) if case.form.prefix_bytes else (whole, small):
            memory[: size + 128] = 0xEE
            encoder.encode(rows, case.form, case.basis("cuda"), memory.ctypes.data + 64)
            torch.cuda.synchronize()
            assert (memory[:64] == 0xEE).all()
            assert (memory[64 + size : size + 128] == 0xEE).all()
            case.check(memory[64 : 64 + size].copy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoding_a_block_of_a_piece_does_not_wait_for_the_device(memory, dtype):
    """Encoding only enqueues work: it returns while the stream is busy."""
    encoder, width, positions = encoder_with(STAGED_BYTES), 2048, 32
    rows = torch.randn(36, positions, width, dtype=dtype, device=DEVICE)
    assert 4 * rows.numel() <= host_copies.PIECE_BYTES
    vectors = torch.randn(8, width, device=DEVICE)
    signs = SignCache(width, DEVICE)
    for encoding in ENCODINGS.values():
        if encoding == SAE:
            continue  # below
        size = 8 if encoding == PROJECT else 512 if encoding in SIZED else 0
        form = RowFormat(encoding, width, WIRE_TYPES[dtype], size)
        basis = signs.get(0, size, dtype) if encoding in RANDOM_PROJECTIONS else vectors
        encoder.encode(rows, form, basis, memory.ctypes.data)  # compiles the kernels
        encoder._copies.wait()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda._sleep(1 << 30)  # keeps the stream busy for hundreds of milliseconds
        held = torch.cuda.Event()
        held.record()
        encoder.encode(rows, form, basis, memory.ctypes.data)
        assert not held.query(), f"{form} waits for the device"
        torch.cuda.synchronize()
        grown = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
        assert dtype == torch.float32 or not grown, f"{form} allocates memory"


@pytest.mark.parametrize(
    ("width", "features", "units", "positions"), [(2048, 16384, 2, 512), (28672, 64, 1, 2048)], ids=["", "wide rows"]
)
@pytest.mark.parametrize("is_chosen", [False, True], ids=["strongest", "chosen"])
@pytest.mark.parametrize("weights", [F32, B16, F16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"activation": JUMP_RELU}, {"activation": TOP_K, "active": 40}], ids=str)
def test_features_need_bounded_memory_and_do_not_wait_for_the_device(
    memory, options, dtype, weights, is_chosen, width, features, units, positions
):
    encoder, chosen = encoder_with(STAGED_BYTES, OUTPUT_BYTES), (3, features - 1, 0) if is_chosen else ()
    one = encoding_cases.encoder(features, width, dtype=weights, **options)
    whole = encoder_of(torch.from_numpy(bytes_of(one)).to(DEVICE), one.shape)
    rows = torch.randn(units, positions, width, device=DEVICE).to(dtype)
    form = RowFormat(SAE, width, WIRE_TYPES[dtype], len(chosen) or 32, features=features)
    encoder.encode(rows, form, whole.choosing(chosen), memory.ctypes.data)  # prepares what torch makes once
    encoder._copies.wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(1 << 30)
    held = torch.cuda.Event()
    held.record()
    encoder.encode(rows, form, whole.choosing(chosen), memory.ctypes.data)
    assert not held.query(), "it waits for the device"
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= WORKING_BYTES
    exact = one.values(rows.double().cpu().numpy())
    values = form.split(memory[: form.payload_bytes(units, positions)], units, positions)[1]["value"]
    wanted = exact[..., list(chosen)] if chosen else -np.sort(-exact, axis=-1)[..., :32]
    near = _near_a_step(one, rows, chosen) if chosen else False
    bound = 1e-6 * np.sqrt(width) * np.abs(exact).max()
    assert (near | (np.abs(values - wanted) <= bound)).all()


def _near_a_step(one, rows, chosen):
    """Return which chosen features may be 0 or not, because sums in another order are on the other side of a step."""
    x = rows.double().cpu().numpy()
    outputs = x @ one.weights.T.astype(np.float64) + one.biases
    step = one.threshold if one.threshold is not None else -np.sort(-outputs, axis=-1)[..., 39:40]
    near = np.abs(outputs - step) <= 1e-6 * np.sqrt(x.shape[-1]) * np.abs(outputs).max()
    return near[..., list(chosen)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features_and_projections_do_not_depend_on_the_precision_of_torchs_products(memory, dtype):
    """VLLM_FLOAT32_MATMUL_PRECISION=high has torch round float32 factors to TF32."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        for case in cases(((2048, 512),)):
            if case.form.encoding in {SAE, *RANDOM_PROJECTIONS} and case.rows.dtype == dtype:
                encoder = encoder_with(STAGED_BYTES)
                encoder.encode(case.rows.to(DEVICE), case.form, case.basis("cuda"), memory.ctypes.data)
                torch.cuda.synchronize()
                case.check(memory[: case.form.payload_bytes(3, 5)].copy())
    finally:
        torch.set_float32_matmul_precision(before)


class Producer:
    """A ring of pinned memory that keeps the published extents, in order."""

    def __init__(self):
        self.memory = np.zeros(64 << 20, dtype=np.uint8)
        self.is_pinned = False
        self.published, self.losses = [], []
        self._at, self._lock = 0, threading.Lock()

    def acquire(self, nbytes, block, capture_id, *, at_once=False):
        with self._lock:
            extent, self._at = Extent(self._at, nbytes), self._at + -(-nbytes // 256) * 256
            return extent

    def publish_all(self, filled):
        for extent, capture_id, headers, _ in filled:
            at = extent.offset
            for header in map(capture_pb2.ChunkHeader.FromString, headers):
                form = RowFormat.of(header)
                size = form.payload_bytes(len(header.layers), len(header.positions))
                self.published.append((capture_id, header, form, self.memory[at : at + size].copy()))
                at += size

    def release(self, extent):
        pass

    def report_loss(self, capture_id, loss):
        self.losses.append((capture_id, loss))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_all_encodings_and_reductions_pass_the_sink(dtype):
    """All at once through one sink, whose blocks are overwritten as soon as they are free."""
    width, rng = 1024, np.random.default_rng(0)
    pool = BlockPool(UNITS * 40 * 96, width, dtype, DEVICE, largest_block=UNITS * 300)
    bank = VectorBank(8, width, DEVICE)
    bank.load([(row, rng.standard_normal(width).astype("<f4").tobytes()) for row in range(8)])
    producer = Producer()
    sink = StreamedSink(pool, ModelRows(width, WIRE_TYPES[dtype]), producer, bank)
    sink.check_encodings()
    truth = {}
    for name, encoding in ENCODINGS.items():
        if encoding == SAE:
            continue  # test_sae.py has its sink
        for reduction in (capture_pb2.REDUCTION_NONE, capture_pb2.REDUCTION_MEAN, capture_pb2.REDUCTION_MAX):
            rows = (3, 1) if encoding == PROJECT else ()
            size = 2 if rows else 64 if encoding in SIZED else 0
            capture = Capture(
                f"{name} {reduction}", 0, (0, 1, 2), select(), encoding=RowEncoding(encoding, size, 5, rows=rows),
                reduction=reduction,
            )  # fmt: skip
            plan = RequestPlan(POSITIONS, capture)
            if capture.is_followed:
                sink.begin(plan)
            block = pool.take(capture, POSITIONS)
            block.positions.extend(range(POSITIONS))
            values = torch.randn(UNITS, POSITIONS, width, device=DEVICE).to(dtype)
            pool.rows(block).copy_(values)
            truth[capture.capture_id] = (capture, values.cpu())
            sink.send([block])
            if capture.is_followed:
                sink.end(capture)
    assert sink.flush(60)
    assert not producer.losses
    assert pool.free_rows == UNITS * 40 * 96
    assert len(producer.published) == len(truth)
    signs = SignCache(width, DEVICE).get(5, 64, dtype).cpu().double() / 8.0
    for capture_id, header, form, payload in producer.published:
        capture, values = truth[capture_id]
        assert list(header.positions) == ([POSITIONS - 1] if capture.is_reduced else [*range(POSITIONS)])
        exact = reduced(values.double(), capture.reduction)
        got = torch.from_numpy(form.decode(form.split(payload, UNITS, exact.shape[1])[1]).astype(np.float64))
        exact = projected(exact, got, form, signs, bank.vectors[[3, 1]].cpu().double())
        spread = (exact.amax(-1) - exact.amin(-1)).max().item()
        is_quantized = form.encoding in {ENCODINGS[name] for name in ("full8", "rp8", "topk8")}
        # bfloat16 has 8 significant bits: a value is off by at most 2**-8 of itself, however small the spread is.
        bound = spread / 255 * 0.6 if is_quantized else exact.abs().max().item() * 2**-8
        assert (got - exact).abs().max().item() <= bound, capture_id


@pytest.mark.parametrize("lost", [False, True], ids=["", "without memory"])
def test_features_of_several_blocks_are_encoded_together(monkeypatch, lost):
    """Each block gets the features of its own rows. Without memory for several, each is encoded alone, or is lost."""
    width, features, kept, blocks = 1024, 4096, 16, 40
    pool = BlockPool(1 << 14, width, torch.bfloat16, DEVICE, largest_block=1 << 12)
    producer = Producer()
    sink = StreamedSink(pool, ModelRows(width, WIRE_TYPES[torch.bfloat16]), producer)
    one = encoding_cases.encoder(features, width, dtype=B16)
    whole = encoder_of(torch.from_numpy(bytes_of(one)).to(DEVICE), one.shape)
    sink._bases._saes = SimpleNamespace(get=lambda name, chosen: whole.choosing(chosen))
    calls, keep = [], GpuEncoder._keep_features

    def counted(gpu, encoder, rows, out):
        calls.append(len(rows))
        if lost and len(calls) <= 2:  # a group, and its first block
            raise torch.OutOfMemoryError("no memory")
        keep(gpu, encoder, rows, out)

    monkeypatch.setattr(GpuEncoder, "_keep_features", counted)
    truth, sent = {}, []
    for number in range(blocks):
        positions = 400 if number == 10 else 1 + number % 32
        chosen = {"chosen": (7, 9)} if number == 30 else {}
        size = 2 if chosen else kept
        capture = Capture(
            f"{number}", 0, (0, 1), select(), encoding=RowEncoding(SAE, size, sae="a", features=features, **chosen)
        )
        plan = RequestPlan(positions, capture)
        sink.begin(plan)
        block = pool.take(capture, positions)
        block.positions.extend(range(positions))
        values = torch.randn(2, positions, width, device=DEVICE).to(torch.bfloat16)
        pool.rows(block).copy_(values)
        truth[capture.capture_id] = (values, (7, 9) if chosen else ())
        sent.append((block, capture))
    sink.send([block for block, _ in sent])
    assert sink.flush(60)
    for _, capture in sent:
        sink.end(capture)
    assert sink.flush(60)
    assert pool.free_rows == 1 << 14
    gone = {capture_id for capture_id, _ in producer.losses}
    assert bool(gone) == lost
    assert len(gone) <= 1
    assert {capture_id for capture_id, *_ in producer.published} == truth.keys() - gone
    assert max(calls) > 800, "several blocks together"
    assert lost or len(calls) < blocks / 2
    for capture_id, header, form, payload in producer.published:
        values, chosen = truth[capture_id]
        exact = one.values(values.double().cpu().numpy())
        got = form.split(payload, 2, len(header.positions))[1]["value"]
        strongest = exact[..., list(chosen)] if chosen else -np.sort(-exact, axis=-1)[..., :kept]
        assert np.abs(got - strongest).max() <= 1e-6 * np.sqrt(width) * np.abs(exact).max(), capture_id


def reduced(rows, reduction):
    if reduction == capture_pb2.REDUCTION_MEAN:
        return rows.mean(1, keepdim=True)
    return rows.amax(1, keepdim=True) if reduction == capture_pb2.REDUCTION_MAX else rows


def projected(exact, got, form, signs, vectors):
    if form.encoding in RANDOM_PROJECTIONS:
        return exact @ signs
    if form.encoding == PROJECT:
        return exact @ vectors.T
    # The check of the kept elements is above.
    return torch.where(got == 0, 0.0, exact) if form.encoding in SIZED else exact
