"""`residuum serve` in a shell: a tiny model, real services, one prompt, its rows, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import residuum
from tests import one_process
from tests.reference.tiny import HIDDEN

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_tiny_model_is_served_and_stopped(tiny_llama: Path, tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "residuum", "serve", "--model", tiny_llama, "--data", "kept"]
    command += ["--enforce-eager", "--dtype", "float32", "--kv-cache-gib", "0.25", "--max-num-batched-tokens", "64"]
    command.append(one_process.FLAG)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            told = dict(line.split(maxsplit=1) for line in (process.stdout.readline() for _ in range(3)))
            assert told["captures"].strip() == f"kept in {tmp_path / 'kept'}"
            with residuum.Client(told["inference"].strip()) as client:
                reply = client.generate([5, 6, 7], max_tokens=3, capture=residuum.Capture(layers=[0]))
                assert client.activations(reply)[0].shape == (5, HIDDEN)
            process.send_signal(signal.SIGINT)
            assert process.wait(90) == 0
        finally:
            if process.poll() is None:
                process.terminate()
        assert process.stderr.read().endswith("stopped\n")
    assert (tmp_path / "kept/data").is_dir()
