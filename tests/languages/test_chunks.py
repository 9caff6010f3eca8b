"""Chunks in each language: every 16-bit number, any order and split, and chunks that must be refused.

The services are scripted, because a real store never sends most of these chunks. They use no TLS, like `make serve`.
"""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest

from residuum.v1 import capture_pb2, tensor_pb2
from residuum.wire.placement import ranks
from tests.languages.programs import Outcome
from tests.languages.scripted import CAPTURE_ID, LAYERS, Script, chunk, every_pattern, serving

pytestmark = pytest.mark.timeout(600)  # the first test builds the example

CAPTURED = (LAYERS // 2, LAYERS - 1)
RAW = capture_pb2.ENCODING_RAW
WIDTH, POSITIONS = 256, 128


@pytest.fixture
def run(program, tmp_path):
    """Runs the example against scripted services; returns the completed process and the output folder."""

    def run_with(script, *more, names=("holder",), vector_width=None, **environment):
        path, out = tmp_path / "vector.f32", tmp_path / "out"
        path.write_bytes(bytes(4 * (vector_width or script.width)))
        with serving(script, names) as endpoint:
            done = program.round(path, out, *more, **{"RESIDUUM_ENDPOINT": endpoint} | environment)
        return done, out

    return run_with


def spread(elements, **header):
    """Return chunks of [layers, positions, width] elements: split by layers and by positions, last positions first."""
    layers, positions, width = elements.shape
    out = [chunk([CAPTURED[1]], [*range(0, 96, 2)], elements[1, 0:96:2].tobytes(), width=width, **header)]
    out.append(chunk(CAPTURED, [*range(96, positions)], elements[:, 96:].tobytes(), width=width, **header))
    out.append(chunk([CAPTURED[0]], [*range(96)], elements[0, :96].tobytes(), width=width, **header))
    out.append(chunk([CAPTURED[1]], [*range(1, 96, 2)], elements[1, 1:96:2].tobytes(), width=width, **header))
    # Rows past the request's last token, which the manifest does not count.
    beyond = np.zeros_like(elements[:, :3])
    out.insert(1, chunk(CAPTURED, [positions, positions + 1, positions + 2], beyond.tobytes(), width=width, **header))
    assert layers == len(CAPTURED)
    return out


def good(width=8):
    """Return one chunk with all rows that count."""
    rows = np.arange(2 * 2 * width, dtype=np.float32)
    return chunk(CAPTURED, [0, 1], rows.tobytes(), encoding=capture_pb2.ENCODING_FP32, width=width)


@pytest.mark.parametrize(
    ("dtype", "element_type", "encoding"),
    [
        ("bfloat16", tensor_pb2.DATA_TYPE_BFLOAT16, RAW),
        ("float16", tensor_pb2.DATA_TYPE_FLOAT16, RAW),
        ("float16", tensor_pb2.DATA_TYPE_BFLOAT16, capture_pb2.ENCODING_FP16),
    ],
)
def test_every_number_of_16_bits_is_decoded(run, dtype, element_type, encoding, count):
    bits = every_pattern(dtype).reshape(2, POSITIONS, WIDTH)
    script = Script(WIDTH, POSITIONS, spread(bits, dtype=element_type, encoding=encoding))
    outcome = Outcome.of(*run(script))
    if dtype == "bfloat16":
        expected = (bits.astype(np.uint32) << 16).tobytes()
    else:
        expected = bits.view(np.float16).astype(np.float32).tobytes()
    assert outcome.rows == expected
    assert outcome.followed == expected
    assert (outcome.summary["generated_token_ids"], outcome.summary["text"]) == ([7, 8, 9], " so it is")
    assert outcome.summary["positions"] == list(range(POSITIONS))
    count.update(decoded=outcome.array.size)


def test_float32_rows_are_read_unchanged(run, count):
    values = np.random.default_rng(0).integers(0, 1 << 32, (2, POSITIONS, WIDTH), dtype=np.uint64).astype("<u4")
    values |= np.where((values & 0x7F800000) == 0x7F800000, 0x400000, 0).astype("<u4")  # NaNs become quiet
    for number, special in enumerate((0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x7FC00000)):
        values[0, 0, number] = special  # -0, the least subnormal, the infinities, NaN
    header = {"dtype": tensor_pb2.DATA_TYPE_FLOAT32, "encoding": RAW}
    outcome = Outcome.of(*run(Script(WIDTH, POSITIONS, spread(values, **header))))
    assert outcome.rows == outcome.followed == values.tobytes()
    count.update(decoded=outcome.array.size)


def test_stores_are_asked_in_the_order_of_their_ranks(run):
    names = ranks(["a", "b", "c", "store.example:50052"], CAPTURE_ID)
    outcome = Outcome.of(*run(Script(8, 2, [good()]), names=names))
    assert outcome.summary["asked"] == names
    assert outcome.summary["store"] == names[-1]


def test_calls_carry_the_token(run):
    script = Script(8, 2, [good()])
    Outcome.of(*run(script, RESIDUUM_TOKEN="rsd_secret"))
    assert script.asked == ["Bearer rsd_secret"]


class TestRefusals:
    @pytest.fixture
    def refused(self, run, count):
        """Runs the example, which must fail; returns its error output."""

        def check(script, *more, **options):
            done, out = run(script, *more, **options)
            assert done.returncode == 1, done.stdout + done.stderr
            assert not (out / "capture.json").exists()
            assert len(done.stderr.splitlines()) == 1, "one line, no stack trace"
            count.update(refusals=1)
            return done.stderr

        return check

    def test_a_damaged_chunk_is_an_error(self, refused):
        script = Script(8, 2, [chunk(CAPTURED, [0, 1], bytes(128), encoding=capture_pb2.ENCODING_FP32, width=8, crc=1)])
        assert "CRC-32C" in refused(script)

    def test_the_generation_is_stopped_when_its_capture_cannot_be_followed(self, refused):
        damaged = chunk(CAPTURED, [0, 1], bytes(128), encoding=capture_pb2.ENCODING_FP32, width=8, crc=1)
        script = Script(8, 2, [damaged], endless=True)
        assert "CRC-32C" in refused(script), "the cause, not that the generation was cancelled"
        assert script.cancelled.wait(30)

    def test_a_payload_of_another_size_is_an_error(self, refused):
        for size in (124, 126, 132):
            damaged = chunk(CAPTURED, [0, 1], bytes(size), encoding=capture_pb2.ENCODING_FP32, width=8)
            refused(Script(8, 2, [damaged]))

    def test_a_missing_row_is_an_error(self, refused):
        half = chunk(CAPTURED, [0], bytes(64), encoding=capture_pb2.ENCODING_FP32, width=8)
        refused(Script(8, 2, [half]))

    def test_an_unsupported_encoding_is_an_error(self, refused):
        script = Script(8, 2, [chunk(CAPTURED, [0, 1], bytes(64), encoding=capture_pb2.ENCODING_FULL8, width=8)])
        assert "FULL8" in refused(script)

    def test_an_incomplete_capture_is_an_error(self, refused):
        said = refused(Script(8, 2, [good()], state=capture_pb2.CAPTURE_STATE_INCOMPLETE))
        assert "INCOMPLETE" in said
        assert "the engine died" in said

    def test_an_unknown_capture_is_an_error(self, refused):
        said = refused(Script(8, 2, [good()], holds=False))
        assert "UNKNOWN_CAPTURE" in said
        assert "There is no such capture." in said

    def test_a_vector_of_another_width_is_an_error(self, refused):
        said = refused(Script(8, 2, [good()]), vector_width=7)
        assert "28 bytes" in said
        assert "32 bytes" in said

    def test_an_unreachable_service_is_an_error(self, refused):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, but not listening
            assert refused(Script(8, 2, []), RESIDUUM_ENDPOINT=f"127.0.0.1:{taken.getsockname()[1]}")

    @pytest.mark.parametrize("host", ["192.0.2.1", "127.0.0.1.invalid", "127.invalid"])
    def test_a_token_never_goes_to_another_machine_in_plain_text(self, refused, host):
        said = refused(Script(8, 2, []), RESIDUUM_ENDPOINT=f"{host}:50051", RESIDUUM_TOKEN="rsd_secret")
        assert "plain text" in said
        assert "RESIDUUM_TLS_CA" in said

    @pytest.mark.parametrize("more", [["fp8"], ["raw", "raw"]])
    def test_wrong_arguments_print_the_usage(self, run, more):
        done, _ = run(Script(8, 2, []), *more)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: ")


def test_the_written_files_are_as_documented(run):
    done, out = run(Script(8, 2, [good()]))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["capture.json", "followed.f32", "rows.f32"]
    said = json.loads((out / "capture.json").read_text())
    names = ["request_id", "store", "asked", "state", "digest", "vectors_sent", "prompt_token_ids"]
    names += ["generated_token_ids", "text", "rows_before_end", "layers", "positions", "width"]
    assert list(said) == names
    assert (out / "rows.f32").stat().st_size == 4 * len(said["layers"]) * len(said["positions"]) * said["width"]
