import json

import pytest

from bench.parts import Part
from bench.processes import RunFailedError
from bench.steering.__main__ import MEASURES, engine_job, main, parse
from bench.steering.engine import Case


def test_configurations_fit_the_batch(capsys):
    assert parse([], has_gpu=True).configurations == [0, 1, 8, 32, 64, 128, 256]
    assert parse(["--batch-size", "16"], has_gpu=True).configurations == [0, 1, 8]
    with pytest.raises(SystemExit):
        parse(["--batch-size", "16", "--configurations", "17"], has_gpu=True)
    assert "--configurations" in capsys.readouterr().err


def test_a_part_that_fails_does_not_affect_the_others(tmp_path, monkeypatch):
    def fails(options):
        raise RunFailedError("no GPU")

    monkeypatch.setitem(MEASURES, "kernel", fails)
    monkeypatch.setitem(MEASURES, "rpc", lambda options: Part({"a": 1}, failures=["one figure"]))
    with pytest.raises(SystemExit, match="BENCH FAILED: kernel: no GPU\nBENCH FAILED: rpc: one figure"):
        main(["--parts", "kernel,rpc", "--output", str(tmp_path / "x.json")])
    parts = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert list(parts) == ["rpc"]
    assert parts["rpc"]["a"] == 1


def test_unsteered_is_measured_once():
    options = parse(["--batch-size", "8", "--configurations", "0,8", "--per-layer-vectors"], has_gpu=True)
    assert engine_job(options).cases == (Case(0), Case(8), Case(8, per_layer=True))
