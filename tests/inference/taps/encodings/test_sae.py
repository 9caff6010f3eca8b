"""Encoders of sparse autoencoders in a worker: their arithmetic, their memory, and captures of features."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inference_svc.taps.encodings import sae_cache, sae_encoder, work_stream
from inference_svc.taps.encodings.check import bytes_of
from inference_svc.taps.encodings.sae_cache import SAECache, WantedSAE
from inference_svc.taps.encodings.sae_encoder import encoder_of
from inference_svc.taps.gpu.host_copies import HostCopies
from inference_svc.taps.plan import Capture, RequestPlan, RowEncoding
from residuum.v1 import capture_pb2, sae_pb2
from residuum.wire.rows.encodings import SAE
from residuum.wire.sae import JUMP_RELU, LAYER_NORM, RELU, TOP_K, EncoderShape
from tests.encoding_cases import B16, F16, F32, encoder
from tests.inference.taps.encodings.test_encoding_sink import HIDDEN, MLP, POST, Engine
from tests.inference.taps_support import select
from tests.waiting import wait_for

CPU = torch.device("cpu")
FEATURES, WIDTH = 150, 48

KINDS = {
    "relu": {"activation": RELU},
    "jumprelu": {"activation": JUMP_RELU},
    "topk": {"activation": TOP_K, "active": 9},
    "layer norm": {"activation": RELU, "norm": LAYER_NORM},
    "bfloat16": {"activation": JUMP_RELU, "dtype": B16},
    "float16": {"activation": TOP_K, "active": 40, "dtype": F16},
}


def on_device(one):
    return encoder_of(torch.from_numpy(bytes_of(one)), one.shape).choosing(one.chosen)


def kept(one, rows, count, space=None):
    out = torch.zeros(len(rows), 2, count, dtype=torch.int32)
    on_device(one).encode(rows, out, space)
    numbers, values = out[:, 0], out[:, 1].clone().view(torch.float32)
    return numbers.numpy().astype(np.int64), values.numpy()


@pytest.mark.parametrize("chosen", [(), (3, 149, 0)], ids=["strongest", "chosen"])
@pytest.mark.parametrize("count", [1, 20, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_float64(kind, dtype, count, chosen, monkeypatch):
    monkeypatch.setattr(sae_encoder, "GROUP_ELEMENTS", 4 * FEATURES)  # several groups of rows
    monkeypatch.setattr(sae_encoder, "_CONVERTED_BYTES", 4 * WIDTH * 64)
    one = encoder(FEATURES, WIDTH, chosen=chosen, **KINDS[kind])
    count = len(chosen) or count
    torch.manual_seed(0)
    rows = (torch.randn(11, WIDTH) * 2 + 0.3).to(dtype)
    before = rows.clone()
    numbers, values = kept(one, rows, count, torch.empty(3 * FEATURES + 1) if count > 1 else None)
    assert torch.equal(rows, before), "the rows are the capture's own"
    exact = one.values(rows.double().numpy())
    bound = 1e-6 * np.sqrt(WIDTH) * np.abs(exact).max()
    if chosen:
        assert (numbers == chosen).all()
        assert np.abs(values - exact[:, list(chosen)]).max() <= bound
        return
    assert np.abs(values + np.sort(-exact, axis=1)[:, :count]).max() <= bound
    padded = np.concatenate([exact, np.zeros((11, 1))], axis=1)
    assert np.abs(np.take_along_axis(padded, numbers, axis=1) - values).max() <= bound
    assert ((numbers == FEATURES) == (values == 0)).all()
    assert all(len({*row[row < FEATURES]}) == np.count_nonzero(row < FEATURES) for row in numbers)


class Operations(TorchDispatchMode):
    """Notes the operations that compute something: views are none."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        if not operation.is_view:
            self.names.append(operation.__name__)
        return result


def test_the_strongest_features_take_few_operations():
    """On a CPU. A GPU has a kernel for all that follows the product."""
    one = on_device(encoder(FEATURES, WIDTH, activation=RELU))
    rows, out = torch.randn(32, WIDTH), torch.zeros(32, 2, 20, dtype=torch.int32)
    space = torch.empty(32 * FEATURES)
    with Operations() as operations:
        one.encode(rows, out, space)
    assert operations.names == [
        "mm.out", "add_.Tensor", "topk.default", "relu_.default", "eq.Scalar", "masked_fill_.Scalar", "copy_.default",
        "copy_.default",
    ]  # fmt: skip


def test_rows_that_are_not_finite_stay_visible():
    for options in KINDS.values():
        one = encoder(FEATURES, WIDTH, **options)
        rows = torch.ones(2, WIDTH)
        rows[1, 5] = torch.nan
        _, values = kept(one, rows, 4)
        assert np.isfinite(values[0]).all()
        assert np.isnan(values[1]).all()


class Peak(TorchDispatchMode):
    """Measures the most bytes that tensors made meanwhile take at once."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._made = []
        self._before = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [item for item in tree_leaves((args, kwargs or {})) if isinstance(item, torch.Tensor)]
        self._before |= {item.untyped_storage().data_ptr() for item in given} - self._storages().keys()
        result = func(*args, **kwargs or {})
        self._made += [weakref.ref(item) for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        sizes = self._storages()
        self.bytes = max(self.bytes, sum(sizes[address] for address in sizes.keys() - self._before))
        return result

    def _storages(self):
        self._made = [made for made in self._made if made() is not None]
        tensors = [tensor for made in self._made if (tensor := made()) is not None]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize(
    ("features", "width", "count", "chosen"),
    [(2000, 96, 256, ()), (96, 2000, 96, ()), (5000, 40, 3, (1, 2, 4999)), (3000, 500, 32, ())],
    ids=str,
)
@pytest.mark.parametrize("kind", [*KINDS, "all active"])
def test_memory_for_encoding_is_bounded(kind, features, width, count, chosen, monkeypatch):
    """Everything is a small part of what a service has, and rows are more than fit at once."""
    scale = 1 << 8
    monkeypatch.setattr(sae_encoder, "GROUP_ELEMENTS", sae_encoder.GROUP_ELEMENTS // scale)
    monkeypatch.setattr(sae_encoder, "_CONVERTED_BYTES", sae_encoder._CONVERTED_BYTES // scale)
    options = KINDS.get(kind, {"activation": TOP_K, "active": features})
    one = on_device(encoder(features, width, chosen=chosen, **options))
    rows = torch.randn(40, width).to(torch.bfloat16)
    out = torch.zeros(40, 2, count, dtype=torch.int32)
    with Peak() as peak:
        one.encode(rows, out)
    assert 1000 < peak.bytes <= sae_encoder.WORKING_BYTES // scale


@pytest.mark.parametrize("kind", KINDS)
def test_memory_for_wide_rows_with_few_features_is_bounded_on_a_gpu(kind, monkeypatch):
    """The sink's buffer holds the outputs of more rows than may be converted to float32 at once."""
    pytest.importorskip("triton")
    from inference_svc.taps.gpu import encoder as gpu_encoder

    scale, features, width, count = 1 << 8, 96, 2000, 32
    monkeypatch.setattr(gpu_encoder, "GROUP_ELEMENTS", sae_encoder.GROUP_ELEMENTS // scale)
    monkeypatch.setattr(sae_encoder, "_CONVERTED_BYTES", sae_encoder._CONVERTED_BYTES // scale)
    seen = []
    monkeypatch.setattr(gpu_encoder.features, "keep_strongest", lambda outputs, *_: seen.append(len(outputs)))
    one = on_device(encoder(features, width, **KINDS[kind]))
    gpu = gpu_encoder.GpuEncoder(CPU, HostCopies(), sum_bytes=gpu_encoder.OUTPUT_BYTES // scale)
    assert len(gpu._sums) // gpu_encoder.sums_of(one, count) > 100
    rows = torch.randn(300, width).to(torch.bfloat16)
    with Peak() as peak:
        gpu._keep_features(one, rows, torch.zeros(300, 2, count, dtype=torch.int32))
    assert sum(seen) == 300
    assert 1000 < peak.bytes <= sae_encoder.WORKING_BYTES // scale


def test_only_chosen_features_are_computed():
    one = on_device(encoder(20_000, 8, activation=JUMP_RELU, chosen=(5, 19_999)))
    out = torch.zeros(50, 2, 2, dtype=torch.int32)
    with Peak() as peak:
        one.encode(torch.randn(50, 8), out)
    assert peak.bytes < 20_000


# The cache


def wanted(tmp_path, name, one) -> WantedSAE:
    shape = one.shape
    header = sae_pb2.SAEHeader(
        features=shape.features, width=shape.width, dtype=shape.dtype, activation=shape.activation,
        active=shape.active, normalization=shape.normalization,
    )  # fmt: skip
    data = bytes_of(one).tobytes()
    sha = EncoderShape.of(header).begin_digest()
    sha.update(data)
    header.digest = sha.digest()
    path = tmp_path / name
    path.write_bytes(data)
    return WantedSAE(name, header.SerializeToString(), str(path), 1)


def until_ready(cache, items):
    done = threading.Event()
    for _ in range(1000):
        states = cache.keep(items)
        if all(states) or any(isinstance(state, str) for state in states):
            return states
        done.wait(0.01)
    raise AssertionError(f"not loaded: {states}")


@pytest.mark.parametrize("features", [FEATURES, 3])
@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
def test_an_encoder_is_loaded_in_pieces_and_dropped(tmp_path, monkeypatch, features, dtype):
    monkeypatch.setattr(sae_encoder, "_PIECE_BYTES", 1000)
    one = encoder(features, 47, activation=JUMP_RELU, dtype=dtype)  # an odd width: 16-bit weights end off a word
    cache = SAECache(one.shape.nbytes, CPU)
    item = wanted(tmp_path, "a", one)
    assert until_ready(cache, [item]) == [True]
    (tmp_path / "a").unlink()
    loaded = cache.get("a")
    assert loaded.nbytes == one.shape.nbytes
    assert loaded.weights.view(torch.uint8).numpy().tobytes() == one.weights.tobytes()
    assert np.array_equal(loaded.biases.numpy(), one.biases)
    assert np.array_equal(loaded.threshold.numpy(), one.threshold)
    assert cache.keep([item]) == [True]
    assert cache.keep([]) == []
    with pytest.raises(KeyError):
        cache.get("a")


def test_a_new_encoder_waits_for_the_memory_of_one_that_is_in_use(tmp_path):
    one, two = encoder(FEATURES, WIDTH, seed=1), encoder(FEATURES, WIDTH, seed=2)
    cache = SAECache(one.shape.nbytes * 3 // 2, CPU)
    assert until_ready(cache, [wanted(tmp_path, "a", one)]) == [True]
    held = cache.get("a", (1, 2))  # as a capture does whose last block has not left
    item = wanted(tmp_path, "b", two)
    for _ in range(10):
        assert cache.keep([item]) == [False]
    del held
    assert until_ready(cache, [item]) == [True]


def test_what_cannot_be_loaded_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sae_cache, "_LEAVING_SECONDS", 0.0)
    one = encoder(FEATURES, WIDTH)
    item = wanted(tmp_path, "a", one)
    small = SAECache(one.shape.nbytes - 1, CPU)
    assert until_ready(small, [item]) == ["MemoryError"]
    cache = SAECache(one.shape.nbytes, CPU)
    gone = item._replace(path=str(tmp_path / "none"))
    assert until_ready(cache, [gone]) == ["FileNotFoundError"]
    assert until_ready(cache, [item]) == [True]


def test_an_error_is_not_lost_to_the_call_of_another_upload(tmp_path, monkeypatch):
    """The calls of all uploads ask for all encoders that load, and each looks only at its own answer."""
    loads, load, goes_on = [], sae_cache.load_encoder, threading.Event()

    def counted(path, *arguments):
        loads.append(path.name)
        assert path.name == "none" or goes_on.wait(60)
        return load(path, *arguments)

    monkeypatch.setattr(sae_cache, "load_encoder", counted)
    one, two = (wanted(tmp_path, name, encoder(FEATURES, WIDTH, seed=seed)) for seed, name in enumerate("ab"))
    fails = two._replace(path=str(tmp_path / "none"))
    cache = SAECache(3 * encoder(FEATURES, WIDTH).shape.nbytes, CPU)
    assert until_ready(cache, [fails, one]) == ["FileNotFoundError", False]
    assert cache.keep([fails, one]) == ["FileNotFoundError", False]
    goes_on.set()
    until_idle(cache)
    assert cache.keep([fails, one]) == ["FileNotFoundError", True]
    assert loads == ["none", "a"]
    assert until_ready(cache, [two._replace(upload=2), one]) == [True, True]


def until_idle(cache):
    wait_for(lambda: cache._loader is None, "the thread that loads has ended")


def test_an_error_of_an_upload_that_was_given_up_is_not_that_of_the_next(tmp_path):
    one = encoder(FEATURES, WIDTH)
    item = wanted(tmp_path, "a", one)
    cache = SAECache(one.shape.nbytes, CPU)
    path = tmp_path / "a"
    path.rename(tmp_path / "later")
    assert cache.keep([item]) == [False]
    until_idle(cache)
    (tmp_path / "later").rename(path)
    assert until_ready(cache, [item._replace(upload=2)]) == [True]


def test_a_file_that_is_too_short_is_an_error(tmp_path):
    one = encoder(FEATURES, WIDTH)
    item = wanted(tmp_path, "a", one)
    with (tmp_path / "a").open("r+b") as file:
        file.truncate(one.shape.nbytes - 1)
    assert until_ready(SAECache(one.shape.nbytes, CPU), [item]) == ["OSError"]


def test_the_bytes_of_another_upload_are_not_loaded(tmp_path):
    """After an upload was given up, the number of its file may be that of another one, of another tenant perhaps."""
    one = encoder(FEATURES, WIDTH, seed=1)
    item = wanted(tmp_path, "a", one)
    (tmp_path / "a").write_bytes(bytes_of(encoder(FEATURES, WIDTH, seed=2)).tobytes())
    cache = SAECache(one.shape.nbytes, CPU)
    assert until_ready(cache, [item]) == ["OSError"]
    with pytest.raises(KeyError):
        cache.get("a")
    assert until_ready(cache, [wanted(tmp_path, "a", one)._replace(upload=2)]) == [True]


def test_memory_is_allocated_once_however_often_encoders_change(tmp_path):
    largest = encoder(FEATURES, WIDTH)
    cache = SAECache(largest.shape.nbytes, CPU)
    memory = cache._memory.untyped_storage().data_ptr()
    for features in (10, 40, FEATURES, 3, 70, FEATURES):
        item = wanted(tmp_path, str(features), encoder(features, WIDTH))
        assert until_ready(cache, [item]) == [True]
        loaded = cache.get(item.name)
        assert {part.untyped_storage().data_ptr() for part in (loaded.weights, loaded.biases)} == {memory}
        del loaded
    assert cache.nbytes == largest.shape.nbytes


def test_memory_in_pieces_is_reported_at_once(tmp_path):
    """Two of three encoders' places are free, but not side by side."""
    cache = SAECache(3 * 10240, CPU)
    small = [wanted(tmp_path, str(seed), encoder(50, WIDTH, seed=seed)) for seed in range(3)]  # 9800 bytes
    assert until_ready(cache, small) == [True] * 3
    large = wanted(tmp_path, "large", encoder(100, WIDTH))
    assert until_ready(cache, [small[1], large]) == [True, "MemoryError"]
    assert until_ready(cache, [large._replace(upload=2)]) == [True]
    assert until_ready(cache, [large, small[0]]) == [True, True]


def test_all_encoders_are_loaded_on_one_stream(monkeypatch):
    made = []

    class Stream:
        def __init__(self, device):
            made.append(self)
            self.waits = 0

        def synchronize(self):
            self.waits += 1

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    stream = work_stream.WorkStream(torch.device("cuda"))
    for _ in range(3):
        with stream.used():
            pass
    (one,) = made
    assert one.waits == 3


# Captures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_capture_keeps_features_until_its_last_block_has_left(tmp_path, dtype):
    torch.manual_seed(0)
    one = encoder(FEATURES, HIDDEN)
    engine = Engine(dtype)
    cache = SAECache(one.shape.nbytes, CPU)
    engine.worker.sink._bases._saes = cache
    assert until_ready(cache, [wanted(tmp_path, "a", one)]) == [True]
    encoding = RowEncoding(SAE, 12, sae="a", features=FEATURES)
    plan = RequestPlan(70, Capture("c", 0, (0, 1), select(), (POST, MLP), encoding=encoding))
    assert RequestPlan.from_extra_args(plan.to_extra_args()) == plan
    engine.run(plan, 110)
    assert len(engine.stored()) == 4 * 110
    for header, form, payload in engine.worker.ring.chunks:
        assert (form.features, form.dimensions, header.features) == (FEATURES, 12, FEATURES)
        rows = np.stack([engine.computed(header.site, layer, header.positions) for layer in header.layers])
        exact = one.values(torch.from_numpy(rows).to(dtype).double().numpy())
        values = form.split(payload, len(header.layers), len(header.positions))[1]["value"]
        bound = 1e-6 * np.sqrt(HIDDEN) * np.abs(exact).max()
        assert np.abs(values + np.sort(-exact, axis=-1)[..., :12]).max() <= bound


def test_a_capture_without_its_encoder_is_reported_as_lost():
    engine = Engine()
    engine.worker.sink._bases._saes = SAECache(1, CPU)
    encoding = RowEncoding(SAE, 12, sae="gone", features=FEATURES)
    engine.run(RequestPlan(3, Capture("c", 0, (0, 1), select(), (POST,), encoding=encoding)), 5)
    assert not engine.stored()
    assert {loss.reason for _, loss in engine.worker.ring.losses} == {capture_pb2.INCOMPLETE_REASON_WRITE_FAILED}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError()], ids=repr)
def test_without_memory_only_the_rows_that_are_encoded_are_lost(tmp_path, monkeypatch, error):
    one = encoder(FEATURES, HIDDEN)
    engine = Engine(ring_bytes=1 << 20)
    cache = SAECache(one.shape.nbytes, CPU)
    engine.worker.sink._bases._saes = cache
    assert until_ready(cache, [wanted(tmp_path, "a", one)]) == [True]
    plain, calls = sae_encoder.SAEEncoder.encode, []

    def encode(*args):
        calls.append(args)
        if len(calls) == 1:
            raise error
        plain(*args)

    monkeypatch.setattr(sae_encoder.SAEEncoder, "encode", encode)
    encoding = RowEncoding(SAE, 12, sae="a", features=FEATURES)
    engine.run(RequestPlan(70, Capture("c", 0, (0, 1), select(), (POST,), encoding=encoding)), 110)
    ((capture_id, loss),) = engine.worker.ring.losses
    assert (capture_id, loss.reason) == ("c", capture_pb2.INCOMPLETE_REASON_WRITE_FAILED)
    assert f"could not encode these rows ({type(error).__name__})" in loss.detail
    assert len(engine.stored()) == 2 * (110 - len(loss.positions))
    ring = engine.worker.ring
    assert ring.free + sum(len(payload) for _, _, payload in ring.chunks) == 1 << 20, "the extent is free again"
