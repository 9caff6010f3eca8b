"""`residuum extract --ray`: flags that would be ignored are refused. tests/ray has the jobs."""

from __future__ import annotations

import pytest

from residuum.cli import main


@pytest.fixture
def refusal(capsys, tmp_path):
    """Return what the command says of flags that it refuses, before it reads anything."""

    def refusal(*flags):
        with pytest.raises(SystemExit) as caught:
            main(["extract", "in.jsonl", "--output", str(tmp_path / "rows"), "--capture", "1", *flags])
        assert caught.value.code == 2
        return capsys.readouterr().err

    return refusal


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--shuffle", "0"), ("--shuffle", "7"), ("--separator", "eos"), ("--separator", "0"), ("--shard-bytes", "1"),
     ("--tokenizer", "folder"), ("--export", "tar:rows"), ("--dry-run", None), ("--keep-captures", None)],
)  # fmt: skip
def test_flags_that_ray_would_ignore(refusal, flag, value):
    assert f"{flag} cannot be used with --ray" in refusal("--ray", "local", flag, *([value] if value else []))


@pytest.mark.parametrize("flags", [("--actors", "8")])
def test_flags_that_need_ray(refusal, flags):
    assert f"{flags[0]} needs --ray" in refusal(*flags)


@pytest.mark.parametrize("flags", [("--services", "2"), ("--gpus", "0"), ("--serve-flags", "--x"), ("--python", "p")])
def test_flags_that_need_serve(refusal, flags):
    assert f"{flags[0]} needs --serve" in refusal("--ray", "local", f"{flags[0]}={flags[1]}")
