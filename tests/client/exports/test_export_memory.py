"""Exports of a large capture need no more memory than those of a small one, and can be interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

from residuum.rpc.channels import open_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from residuum.wire.rows.frames import checksum
from tests.client.support.opened import OPENERS
from tests.client.support.running_store import RunningStore
from tests.client.support.shell import command, environment

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, TOKENS = 8, 2048, {"small": 2000, "large": 10_000}
LARGE_BYTES, SMALL_BYTES = (LAYERS * HIDDEN * TOKENS[name] * 2 for name in ("large", "small"))  # 328 MB and 66 MB
MORE_BYTES = 96_000_000  # gRPC's buffers, and pages that the allocator keeps
POSITIONS = 400  # in a chunk: 1.6 MB

EXPORT = """
import sys, residuum
store, kind, folder = sys.argv[1:]

def peak():  # of this process only; getrusage would include that of its parent
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

with residuum.Client("127.0.0.1:1", store=store) as client:
    client.export("small", f"{folder}/small.{kind}")
    before = peak()
    client.export("large", f"{folder}/large.{kind}")
    print(peak() - before)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    running = RunningStore(tmp_path_factory.mktemp("large"), max_bytes="2GiB")
    with open_channel(running.endpoint) as channel:
        for name, tokens in TOKENS.items():
            fill(store_pb2_grpc.StoreServiceStub(channel), name, tokens)
    yield running
    running.stop()


def quiet(endpoint):
    """An environment without glibc's arenas for each thread, whose size varies randomly with gRPC's threads."""
    return {**environment(endpoint), "MALLOC_ARENA_MAX": "1"}


def value(layer, positions):
    """The first element of rows: exact in float16."""
    return np.float32(layer + 1) * 100 + (np.asarray(positions) // POSITIONS)


def fill(stub, name, tokens):
    description = capture_pb2.CaptureDescription(
        capture_id=name, model="large", hidden_size=HIDDEN, num_layers=LAYERS, dtype=tensor_pb2.DATA_TYPE_FLOAT16,
        prompt_token_ids=range(tokens), num_sequences=1,
    )  # fmt: skip
    description.spec.layers.list.layers.extend(range(LAYERS))
    description.spec.sites.append(capture_pb2.SITE_RESID_POST)
    description.spec.encoding = capture_pb2.ENCODING_RAW
    stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description), timeout=30)
    list(stub.AppendChunks(messages(name, tokens), timeout=120))
    seal = store_pb2.SealCaptureRequest(capture_id=name, outcome=capture_pb2.CAPTURE_STATE_COMPLETE)
    seal.sequences.add(generated_token_ids=[1], finish_reason="length")
    stub.SealCapture(seal, timeout=30)


def messages(name, tokens):
    noise = np.random.default_rng(0).standard_normal((POSITIONS, HIDDEN)).astype(np.float16)
    number = 0
    for start in range(0, tokens, POSITIONS):
        positions = range(start, min(start + POSITIONS, tokens))
        for layer in range(LAYERS):
            rows = noise[: len(positions)].copy()
            rows[:, 0] = value(layer, positions)
            header = capture_pb2.ChunkHeader(
                site=capture_pb2.SITE_RESID_POST, layers=[layer], positions=positions,
                dtype=tensor_pb2.DATA_TYPE_FLOAT16, width=HIDDEN, encoding=capture_pb2.ENCODING_RAW,
            )  # fmt: skip
            payload = rows.tobytes()
            chunk = capture_pb2.Chunk(header=header, crc32c=checksum(payload), payload=payload)
            number += 1
            yield store_pb2.AppendChunksRequest(number=number, capture_id=name, chunk=chunk)


@pytest.mark.parametrize("kind", list(OPENERS))
def test_the_memory_of_an_export_does_not_grow_with_the_capture(store, tmp_path, kind):
    program = [sys.executable, "-c", EXPORT, store.endpoint, kind, str(tmp_path)]
    done = subprocess.run(program, env=quiet(store.endpoint), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(item.name for item in tmp_path.iterdir()) == [f"large.{kind}", f"small.{kind}"]
    assert LARGE_BYTES - SMALL_BYTES > 2.5 * MORE_BYTES
    assert int(done.stdout) < MORE_BYTES
    if kind in {"npz", "safetensors"}:
        one = OPENERS[kind](tmp_path / f"large.{kind}")[0]["resid_post"]
        for layer, rows in one.rows.items():
            assert np.array_equal(rows[:, 0], value(layer, range(TOKENS["large"])))


@pytest.mark.parametrize("kind", list(OPENERS))
def test_an_interrupted_export_leaves_nothing(store, tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    arguments = ["pull", "large", "--endpoint", "127.0.0.1:1", "--store", store.endpoint, "--out", str(path)]
    with subprocess.Popen(command(*arguments), env=environment(store.endpoint), stderr=subprocess.PIPE) as process:
        while not list(tmp_path.glob("*.part/result")):  # the export has begun to write
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    told = b"residuum: interrupted. Nothing was written. Again: residuum pull large\n"
    assert (process.returncode, err) == (130, told)
    assert not list(tmp_path.iterdir())


STREAM = """
import sys
from residuum.torch import ActivationDataset

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

peaks, rows = [], []
for name in ("small", "large"):
    data = ActivationDataset("127.0.0.1:1", [name], store=sys.argv[1], batch_size=512, shuffle_buffer=4096)
    rows.append(sum(len(batch.activations) for batch in data))
    peaks.append(peak())
print(*rows, peaks[1] - peaks[0])
"""


def test_a_training_loop_needs_memory_only_for_its_buffer(store):
    pytest.importorskip("torch")
    program = [sys.executable, "-c", STREAM, store.endpoint]
    done = subprocess.run(program, env=quiet(store.endpoint), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large, more = map(int, done.stdout.split())
    assert (small, large) == (LAYERS * TOKENS["small"], LAYERS * TOKENS["large"])
    assert more < MORE_BYTES
