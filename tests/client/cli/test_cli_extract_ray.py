"""`residuum extract --ray`: flags that would be ignored are refused. tests/ray has the jobs."""

from __future__ import annotations

import pytest

from residuum.cli import main
from residuum.cli.generation.extract_ray import with_flags
from residuum.cli.main import make_parser


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


@pytest.mark.parametrize("flags", [("--actors", "8"), ("--batch-size", "64")])
def test_flags_that_need_ray(refusal, flags):
    assert f"{flags[0]} needs --ray" in refusal(*flags)


@pytest.mark.parametrize("flags", [("--services", "2"), ("--gpus", "0"), ("--serve-flags", "--x"), ("--python", "p"),
                                   ("--node-timeout", "9"), ("--max-restarts", "-1")])  # fmt: skip
def test_flags_that_need_serve(refusal, flags):
    assert f"{flags[0]} needs --serve" in refusal("--ray", "local", f"{flags[0]}={flags[1]}")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tls", None), ("--insecure", None), ("--tls-ca", "ca.crt"), ("--tls-server-name", "name"),
     ("--client-cert", "c.crt"), ("--client-key", "c.key")],
)  # fmt: skip
def test_credentials_that_serve_chooses(refusal, flag, value):
    flags = ["--ray", "local", "--serve", "model", flag, *([value] if value else [])]
    assert f"{flag} cannot be used with --serve" in refusal(*flags)


@pytest.mark.parametrize("number", ["-2", "x", "1.5"])
def test_numbers_of_restarts_that_there_are_not(refusal, number):
    assert "is not a whole number of at least -1" in refusal("--ray", "local", "--serve", "m", "--max-restarts", number)


def test_numbers_of_restarts():
    for number in (-1, 0, 7):
        options = make_parser().parse_args(["extract", "in.jsonl", "--max-restarts", str(number)])
        assert options.max_restarts == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Name it with column=, others with keep=.", "Name it with --column, others with --keep."),
        ("Correct the cause, or use on_error='skip'.", "Correct the cause, or use --on-error skip."),
        ("Start fewer services (services=); to serve on CPUs, use num_gpus=0.",
         "Start fewer services (--services); to serve on CPUs, use --gpus 0."),
        ("on_long='cut' does not exist.", "--on-long cut does not exist."),
        ("s3://b/y=1/rows: split = train, batch=3, a_column=b", "s3://b/y=1/rows: split = train, batch=3, a_column=b"),
    ],
)  # fmt: skip
def test_errors_name_flags(text, expected):
    assert with_flags(text) == expected


def test_the_default_of_on_error_depends_on_ray(monkeypatch, tmp_path):
    """Without Ray, a job stops and continues later. A job with Ray cannot continue, so a failed prompt is a row."""
    chosen = []

    def run(*_args, on_error, **_further):
        chosen.append(on_error)
        raise OSError("enough")

    monkeypatch.setattr("residuum.cli.generation.extract.job_of", run)
    for flags in ([], ["--on-error", "skip"]):
        main(["extract", "in.jsonl", "--output", str(tmp_path / "rows"), "--capture", "1", *flags])
    assert chosen == ["stop", "skip"]
